#!/usr/bin/env python3
"""Checks that `k3serve bench` reports what an independent client sees.

Runs the same closed-loop workload with the harness and with a small client written here, in turn, several times, and
compares the medians of time to first token, inter-token latency, end-to-end latency and throughput. Fails when one
differs by more than the tolerance.

Without --target or --url it starts a server of its own whose replies come at a fixed pace, so that the figures do not
depend on what else the machine does. With them the two sides' runs are compared as they come, one after the other: that
needs a machine with nothing else to do. Needs grpcio and grpcio-tools.

  tests/clients/check_bench.py --binary build/k3serve
  tests/clients/check_bench.py --binary build/k3serve --target 127.0.0.1:50051 --url http://127.0.0.1:8000
"""

import argparse
import asyncio
import json
import multiprocessing
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The paced server: first token, gap between messages, tokens a message.
FIRST_S, GAP_S, PER_MESSAGE = 0.150, 0.040, 2


def load_stubs():
    """Generates the Python side of the proto files into a folder that lives as long as the process."""
    from grpc_tools import protoc

    out = tempfile.TemporaryDirectory(prefix="k3serve-stubs-")
    proto = ROOT / "proto"
    files = sorted(str(p.relative_to(proto)) for p in (proto / "k3serve").rglob("*.proto"))
    code = protoc.main(["protoc", f"-I{proto}", f"--python_out={out.name}", f"--grpc_python_out={out.name}", *files])
    if code != 0:
        sys.exit("check_bench: protoc failed")
    sys.path.insert(0, out.name)
    return out


# ---- the independent client: a request is (sent, [(time, tokens)], finished) ----


async def grpc_request(channel, ids, max_tokens):
    from k3serve.inference.v1 import generation_service_pb2 as service
    from k3serve.inference.v1 import generation_service_pb2_grpc as rpc

    request = service.StreamGenerateRequest()
    request.spec.tokens.ids.extend(ids)
    request.spec.sampling.temperature = 0
    request.spec.stopping.max_new_tokens = max_tokens
    request.spec.stopping.ignore_eos = True
    request.spec.output.token_ids = True
    arrivals = []
    sent = time.perf_counter()
    async for event in rpc.GenerationServiceStub(channel).StreamGenerate(request):
        tokens = len(event.delta.token_ids) if event.WhichOneof("event") == "delta" else 0
        if tokens:
            arrivals.append((time.perf_counter(), tokens))
    return sent, arrivals, time.perf_counter()


async def http_request(url, model, ids, max_tokens):
    body = json.dumps({
        "model": model, "prompt": ids, "max_tokens": max_tokens, "stream": True, "temperature": 0, "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }).encode()
    head = (f"POST {url.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n").encode()
    arrivals, total = [], 0
    sent = time.perf_counter()
    reader, writer = await asyncio.open_connection(url.hostname, url.port or 80)
    writer.write(head + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"HTTP: {status.decode().strip()} {(await reader.read(2000)).decode(errors='replace')}")
    while True:  # chunk framing is skipped: an event is always one whole line
        line = await reader.readline()
        if not line or line.startswith(b"data: [DONE]"):
            break
        if not line.startswith(b"data: "):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RuntimeError(chunk["error"])
        usage = chunk.get("usage")
        if chunk["choices"] and usage and usage["completion_tokens"] > total:
            arrivals.append((time.perf_counter(), usage["completion_tokens"] - total))
            total = usage["completion_tokens"]
        elif chunk["choices"] and not usage and chunk["choices"][0]["text"]:
            arrivals.append((time.perf_counter(), 1))
    finished = time.perf_counter()
    writer.close()
    return sent, arrivals, finished


async def run_client(args, send):
    """Closed loop: `concurrency` workers share the requests."""
    rng = random.Random()
    left = args.num_requests
    records = []

    async def worker():
        nonlocal left
        while left > 0:
            left -= 1
            ids = [rng.randrange(args.vocab_size) for _ in range(args.input_len)]
            records.append(await send(ids, args.output_len))

    await send([rng.randrange(args.vocab_size) for _ in range(args.input_len)], args.output_len)  # warms up
    await asyncio.gather(*(worker() for _ in range(args.concurrency)))
    return records


def figures(records):
    tokens = sum(t for _, arrivals, _ in records for _, t in arrivals)
    seconds = max(r[2] for r in records) - min(r[0] for r in records)
    per_token = [(a[-1][0] - a[0][0]) / sum(t for _, t in a[1:]) for _, a, _ in records if len(a) > 1]
    return {
        "ttft_ms p50": 1e3 * statistics.median(a[0][0] - sent for sent, a, _ in records),
        "tpot_ms p50": 1e3 * statistics.median(per_token),
        "e2e_ms p50": 1e3 * statistics.median(end - sent for sent, _, end in records),
        "output_tokens_per_second": tokens / seconds,
        "output_tokens": tokens,
    }


def client_figures(args, protocol):
    async def over_grpc():
        import grpc

        async with grpc.aio.insecure_channel(args.target) as channel:
            return await run_client(args, lambda ids, n: grpc_request(channel, ids, n))

    async def over_http():
        url = urllib.parse.urlsplit(args.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port or 80)
        writer.write(f"GET {url.path.rstrip('/')}/v1/models HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n\r\n"
                     .encode())
        answer = await reader.read()
        writer.close()
        model = json.loads(answer[answer.index(b"{"):answer.rindex(b"}") + 1])["data"][0]["id"]
        return await run_client(args, lambda ids, n: http_request(url, model, ids, n))

    return figures(asyncio.run(over_grpc() if protocol == "grpc" else over_http()))


def bench_figures(args, protocol):
    where = ["--target", args.target] if protocol == "grpc" else ["--url", args.url]
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        subprocess.run([args.binary, "bench", *where, "--concurrency", str(args.concurrency), "--num-requests",
                        str(args.num_requests), "--input-len", str(args.input_len), "--output-len",
                        str(args.output_len), "--vocab-size", str(args.vocab_size), "--json", report.name,
                        "--no-progress"], check=True, stdout=subprocess.DEVNULL)
        run = json.load(open(report.name))["runs"][0]
    if run["failed"]:
        sys.exit(f"check_bench: {protocol}: requests failed: {run['errors']}")
    return {
        "ttft_ms p50": run["ttft_ms"]["p50"],
        "tpot_ms p50": run["tpot_ms"]["p50"],
        "e2e_ms p50": run["e2e_ms"]["p50"],
        "output_tokens_per_second": run["output_tokens_per_second"],
        "output_tokens": run["output_tokens"],
    }


# ---- the paced server ----


async def serve_paced(pipe):
    import grpc
    from k3serve.inference.v1 import generation_service_pb2 as service
    from k3serve.inference.v1 import generation_service_pb2_grpc as rpc
    from k3serve.inference.v1 import model_service_pb2 as model
    from k3serve.inference.v1 import model_service_pb2_grpc as model_rpc

    async def paced(max_tokens):
        start, sent = time.perf_counter(), 0
        while sent < max_tokens:
            due = start + FIRST_S + GAP_S * (sent // PER_MESSAGE)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            now = min(PER_MESSAGE, max_tokens - sent)
            sent += now
            yield now, sent

    class Generation(rpc.GenerationServiceServicer):
        async def StreamGenerate(self, request, context):
            yield service.StreamGenerateResponse(accepted={"prompt_tokens": len(request.spec.tokens.ids)})
            async for now, _ in paced(request.spec.stopping.max_new_tokens):
                yield service.StreamGenerateResponse(delta={"text": "x", "token_ids": [1] * now})
            yield service.StreamGenerateResponse(usage={})

    class Model(model_rpc.ModelServiceServicer):
        async def GetServerInfo(self, request, context):
            return model.GetServerInfoResponse(version="paced", device="none")

        async def ListModels(self, request, context):
            return model.ListModelsResponse(models=[{"name": "paced"}])

    async def http(reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next((int(line.split(":")[1]) for line in head.split("\r\n")
                               if line.startswith("content-length:")), 0)
                body = await reader.readexactly(length)
                if head.startswith("get"):
                    text = b'{"data":[{"id":"paced"}]}' if head.startswith("get /v1/models") else b"{}"
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
                else:
                    request = json.loads(body)
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                                 b"Transfer-Encoding: chunked\r\n\r\n")

                    def event(data):
                        line = b"data: " + data + b"\n\n"
                        writer.write(b"%x\r\n%s\r\n" % (len(line), line))

                    async for _, sent in paced(request["max_tokens"]):
                        event(json.dumps({"choices": [{"index": 0, "text": "x"}],
                                          "usage": {"completion_tokens": sent}}).encode())
                    event(b"[DONE]")
                    writer.write(b"0\r\n\r\n")
                await writer.drain()
                if "connection: close" in head:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    server = grpc.aio.server()
    rpc.add_GenerationServiceServicer_to_server(Generation(), server)
    model_rpc.add_ModelServiceServicer_to_server(Model(), server)
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    http_server = await asyncio.start_server(http, "127.0.0.1", 0)
    pipe.send((grpc_port, http_server.sockets[0].getsockname()[1]))
    await server.wait_for_termination()


def paced_process(pipe):
    stubs = load_stubs()
    try:
        asyncio.run(serve_paced(pipe))
    finally:
        stubs.cleanup()


ATTEMPTS = 4


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=str(ROOT / "build" / "k3serve"))
    parser.add_argument("--target", help="a running gRPC server")
    parser.add_argument("--url", help="a running HTTP server")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--num-requests", type=int, default=12)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=20)
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, in turn")
    parser.add_argument("--tolerance", type=float, default=0.03)
    args = parser.parse_args()

    server = None
    if not args.target and not args.url:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        server = context.Process(target=paced_process, args=(theirs,), daemon=True)
        server.start()
        grpc_port, http_port = ours.recv()
        args.target, args.url = f"127.0.0.1:{grpc_port}", f"http://127.0.0.1:{http_port}"
    stubs = load_stubs()
    failed = compared = 0
    try:
        for protocol in [p for p, address in (("grpc", args.target), ("http", args.url)) if address]:
            bench, client = [], []
            # What else runs on the machine falls on one side of a round: where it shows, more rounds are measured.
            for attempt in range(1, ATTEMPTS + 1):
                for _ in range(args.rounds):
                    bench.append(bench_figures(args, protocol))
                    client.append(client_figures(args, protocol))
                lines, bad = [], 0
                for name in bench[0]:
                    b = statistics.median(f[name] for f in bench)
                    c = statistics.median(f[name] for f in client)
                    difference = abs(b - c) / c
                    good = difference <= (0 if name == "output_tokens" else args.tolerance)
                    bad += not good
                    lines.append(f"{protocol} {name:26} bench {b:10.3f}  client {c:10.3f}  {100 * difference:5.2f} %"
                                 f"{'' if good else '  FAILED'}")
                if not bad or attempt == ATTEMPTS:
                    break
            print("\n".join(lines))
            compared += len(lines)
            failed += bad
    finally:
        if server:
            server.terminate()
        stubs.cleanup()
    print(f"{compared - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
