"""Memory of a running k3serve over many short requests. Not among the tests: 100,000 requests take minutes.

  tests/clients/memory_growth.py --binary build/k3serve [--requests 100000] [--protocol http|grpc] [--connections 8]
  tests/clients/memory_growth.py --forced build/tests/clients/k3_forced_server    HTTP over a mock engine, much faster

HTTP: keep-alive connections that ask, in turn, for a chat, a streamed chat, a completion with log-probabilities, and
something that is refused. gRPC: whole and streamed answers to prompts of two tokens, and refusals, on one channel. Every
prompt is another one, so that caches are filled and evict. Prints the resident set at each tenth; fails when it grew by more
than --limit MiB from the second tenth on, by when caches and allocator arenas have reached their size."""

import argparse
import http.client
import json
import re
import subprocess
import sys
import threading
import time

from running_server import ROOT, RunningServer

FLAGS = ["--max-num-seqs", "16", "--max-queue", "256", "--latent-pages", "200", "--state-slots", "16",
         "--snapshot-slots", "16", "--snapshot-interval", "64"]


class ForcedServer:
    """k3_forced_server, with what RunningServer has. Its model says one word."""

    def __init__(self, binary):
        self.process = subprocess.Popen([binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.http = "127.0.0.1:" + self.process.stdout.readline().split()[1]
        self.process.stdin.write("word\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def stop(self):
        self.process.stdin.close()
        return self.process.wait(timeout=60)


def resident(pid):
    """MiB of the resident set."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return int(re.search(r"VmRSS:\s+(\d+) kB", file.read()).group(1)) / 1024


def ask_http(server):
    """A function of a request's number on a connection of its own."""
    host, port = server.http.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)

    def ask(number):
        chat = {"messages": [{"role": "user", "content": f"Number {number}?"}], "max_tokens": 1}
        path, body, status = [
            ("/v1/chat/completions", chat, 200),
            ("/v1/chat/completions", {**chat, "stream": True}, 200),
            ("/v1/completions", {"prompt": f"Count to {number}", "max_tokens": 1, "logprobs": 2}, 200),
            ("/v1/chat/completions", {**chat, "model": f"no-{number}"}, 404),
        ][number % 4]
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read()
        if reply.status != status:
            raise RuntimeError(f"request {number}: {reply.status}, {text[:300]}")
    return ask


def grpc_asker(server):
    """As ask_http, for calls on one channel."""
    import grpc
    from grpc_stubs import service, service_grpc, token_spec
    stub = service_grpc.GenerationServiceStub(grpc.insecure_channel(server.grpc))

    def ask(number):
        spec = token_spec([100 + number % 3000, 100 + number // 3000], max_new_tokens=1)
        if number % 4 == 3:
            spec.sampling.temperature = -1
            try:
                stub.Generate(service.GenerateRequest(spec=spec), timeout=60)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.INVALID_ARGUMENT:
                    raise
            else:
                raise RuntimeError("a temperature of -1 was accepted")
        elif number % 2:
            for _ in stub.StreamGenerate(service.StreamGenerateRequest(spec=spec), timeout=60):
                pass
        else:
            stub.Generate(service.GenerateRequest(spec=spec), timeout=60)
    return lambda: ask


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default=f"{ROOT}/build/k3serve")
    parser.add_argument("--forced", help="path of k3_forced_server")
    parser.add_argument("--model", default=f"{ROOT}/configs/models/tiny-k3")
    parser.add_argument("--protocol", choices=["http", "grpc"], default="http")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--limit", type=float, default=8, help="MiB of growth after the second tenth")
    args = parser.parse_args()
    if args.forced and args.protocol == "grpc":
        parser.error("k3_forced_server has no gRPC")
    server = ForcedServer(args.forced) if args.forced else RunningServer(args.binary, args.model, *FLAGS)
    make = grpc_asker(server) if args.protocol == "grpc" else lambda: ask_http(server)
    step = args.requests // 10
    start = time.monotonic()
    print(f"{args.protocol}: 0 requests, {resident(server.process.pid):.1f} MiB", flush=True)
    failures, sizes = [], []
    askers = [make() for _ in range(args.connections)]

    def work(ask, first, end):
        try:
            for number in range(first, end, args.connections):
                ask(number)
        except Exception as error:  # reported by the main thread
            failures.append(error)

    for done in range(0, 10 * step, step):
        threads = [threading.Thread(target=work, args=(ask, done + i, done + step)) for i, ask in enumerate(askers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            server.process.kill()
            raise failures[0]
        sizes.append(resident(server.process.pid))
        seconds = time.monotonic() - start
        print(f"{args.protocol}: {done + step} requests, {sizes[-1]:.1f} MiB, {seconds:.0f} s", flush=True)
    code = server.stop()
    growth = sizes[-1] - sizes[1]
    print(f"{args.protocol}: {growth:+.1f} MiB from {2 * step} to {10 * step} requests, exit code {code}")
    return 0 if growth <= args.limit and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
