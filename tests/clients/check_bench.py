"""Checks that `k3serve bench` reports what happened, in one run for each protocol.

A proxy stands between the harness and the server and writes down when requests and tokens pass. Its medians of time to
first token, inter-token latency and end-to-end latency, its throughput and its count of tokens must be the harness's
within the tolerance: both saw the same requests, so nothing else on the machine falls on one side only. Then every
percentile is computed anew from the harness's own times of each request, and must be what it reports.

Without --target or --url a paced server answers, whose times are long beside a hop. Needs grpcio and grpcio-tools.

  tests/clients/check_bench.py --binary build/k3serve
  tests/clients/check_bench.py --binary build/k3serve --target 127.0.0.1:50051 --url http://127.0.0.1:8000
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile

import paced_server
from recording_proxy import GrpcProxy, HttpProxy
from running_server import ROOT


def percentile(values, share):
    values = sorted(values)
    position = share * (len(values) - 1)
    below = int(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (position - below)


def per_token(messages):
    """Mean seconds of a token after the first message."""
    return (messages[-1][0] - messages[0][0]) / sum(tokens for _, tokens in messages[1:])


def seen(records):
    """The figures of the proxy's records."""
    tokens = sum(n for _, messages, _ in records for _, n in messages)
    seconds = max(end for _, _, end in records) - min(arrived for arrived, _, _ in records)
    return {
        "ttft_ms p50": 1e3 * statistics.median(messages[0][0] - arrived for arrived, messages, _ in records),
        "tpot_ms p50": 1e3 * statistics.median(per_token(messages) for _, messages, _ in records if len(messages) > 1),
        "e2e_ms p50": 1e3 * statistics.median(end - arrived for arrived, _, end in records),
        "output_tokens_per_second": tokens / seconds,
        "output_tokens": tokens,
    }


def reported(run):
    return {name: run[name.split()[0]]["p50"] if " " in name else run[name] for name in
            ("ttft_ms p50", "tpot_ms p50", "e2e_ms p50", "output_tokens_per_second", "output_tokens")}


def recomputed(run):
    """{figure: (reported, from the times of each request)}"""
    requests = [[(ms / 1e3, tokens) for ms, tokens in request["arrivals"]] for request in run["requests"]]
    sent = [request["sent_ms"] / 1e3 for request in run["requests"]]
    end = [request["finished_ms"] / 1e3 for request in run["requests"]]
    gaps = [(now - before) / tokens for messages in requests
            for (before, _), (now, tokens) in zip(messages, messages[1:]) for _ in range(tokens)]
    values = {"ttft_ms": [messages[0][0] - s for messages, s in zip(requests, sent)],
              "tpot_ms": [per_token(messages) for messages in requests if len(messages) > 1],
              "itl_ms": gaps,
              "e2e_ms": [e - s for e, s in zip(end, sent)]}
    figures = {}
    for name, seconds in values.items():
        for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            figures[f"{name} {label}"] = (run[name][label], 1e3 * percentile(seconds, share))
        figures[f"{name} mean"] = (run[name]["mean"], 1e3 * statistics.fmean(seconds))
    tokens = sum(n for messages in requests for _, n in messages)
    figures["output_tokens_per_second"] = (run["output_tokens_per_second"], tokens / (max(end) - min(sent)))
    return figures


async def bench(args, *where):
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        process = await asyncio.create_subprocess_exec(
            args.binary, "bench", *where, "--concurrency", str(args.concurrency), "--num-requests",
            str(args.num_requests), "--input-len", str(args.input_len), "--output-len", str(args.output_len),
            "--vocab-size", "256", "--warmup", "0", "--json", report.name, "--save-requests", "--no-progress",
            stdout=asyncio.subprocess.DEVNULL)
        if await process.wait() != 0:
            sys.exit(f"check_bench: bench ended with {process.returncode}")
        run = json.load(report)["runs"][0]
    if run["failed"]:
        sys.exit(f"check_bench: requests failed: {run['errors']}")
    return run


async def compare(args, protocol, address):
    """Prints a line for each figure; returns how many were compared and how many differ."""
    proxy = GrpcProxy() if protocol == "grpc" else HttpProxy()
    front = await proxy.start(address)
    run = await bench(args, "--target" if protocol == "grpc" else "--url", front)
    await proxy.stop()
    compared = failed = 0

    def check(name, ours, theirs, tolerance):
        nonlocal compared, failed
        difference = abs(ours - theirs) / theirs
        good = difference <= tolerance
        compared += 1
        failed += not good
        print(f"{protocol} {name:26} bench {ours:10.3f}  {theirs:10.3f}  {100 * difference:7.4f} %"
              f"{'' if good else '  FAILED'}", flush=True)

    print(f"{protocol}: what the proxy saw")
    figures, report = seen(proxy.records), reported(run)
    for name, theirs in figures.items():
        check(name, report[name], theirs, 0 if name == "output_tokens" else args.tolerance)
    print(f"{protocol}: from the times of each request")
    for name, (ours, theirs) in recomputed(run).items():
        check(name, ours, theirs, 1e-4)
    return compared, failed


async def check(args):
    target, url, paced = args.target, args.url, None
    if not target and not url:
        target, url, paced = await paced_server.start()
    results = [await compare(args, protocol, address) for protocol, address in (("grpc", target), ("http", url))
               if address]
    if paced:
        await paced[0].stop(None)
        paced[1].close()
    compared, failed = (sum(column) for column in zip(*results))
    print(f"{compared - failed} passed, {failed} failed")
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "k3serve"))
    parser.add_argument("--target", help="a running gRPC server")
    parser.add_argument("--url", help="a running HTTP server")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=12)
    parser.add_argument("--tolerance", type=float, default=0.03)
    sys.exit(asyncio.run(check(parser.parse_args())))


if __name__ == "__main__":
    main()
