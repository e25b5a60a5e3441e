"""Mixed load for a long time against k3serve on the CPU: chat, tools, streams, log-probabilities, shared prefixes,
cancels, disconnects, slow and stopped readers, deadlines, bad input, and drains in the middle of it. Checks that

  every answer is the one that the same request gets alone on a fresh server without a prefix cache,
  no request takes longer than its limit (a stuck stream),
  memory and open files do not grow,
  afterwards nothing runs, no page and no slot is held, and each accepted request has one outcome.

  tests/clients/soak.py --seconds 3600 --drains 6      an hour; scripts/soak_server.sh builds first
  tests/clients/soak.py --seconds 20 --drains 1        the short form, part of the tests

Needs grpcio. Prints one line of figures for each life of the server and a summary."""

import argparse
import collections
import http.client
import json
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import urllib.request

import grpc

from grpc_stubs import chat_spec, service, service_grpc, token_spec
from running_server import ROOT, RunningServer

LIMIT = 180  # seconds that any one request may take
FLAGS = ["--max-num-seqs", "8", "--max-queue", "64", "--latent-pages", "100", "--state-slots", "8", "--snapshot-slots",
         "16", "--snapshot-interval", "128", "--shutdown-timeout", "20", "--log-level", "info"]
TOOL = {"type": "function", "function": {
    "name": "run_command", "description": "Runs a shell command",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
DOCUMENT = " ".join(f"Line {i}: the command number {i} copies files from the folder {i % 7}." for i in range(60))


def questions():
    """Deterministic requests, as (front end, body): greedy, so that each has one right answer."""
    cases = []
    for i, name in enumerate(("grep", "ls", "tar", "sed", "find", "chmod")):
        cases.append(("chat", {"messages": [{"role": "user", "content": f"What does {name} do?"}], "max_tokens": 40 + i}))
        cases.append(("completion", {"prompt": f"The {name} command", "max_tokens": 24 + i, "logprobs": i % 3}))
    cases.append(("chat", {"messages": [{"role": "user", "content": "List files, please."}], "tools": [TOOL],
                           "max_tokens": 60}))
    cases.append(("chat", {"messages": [{"role": "user", "content": "List files."},
                                        {"role": "assistant", "content": None, "tool_calls": [
                                            {"id": "run_command_0", "type": "function", "function":
                                                {"name": "run_command", "arguments": "{\"command\": \"ls\"}"}}]},
                                        {"role": "tool", "tool_call_id": "run_command_0", "content": "a.txt b.txt"}],
                           "tools": [TOOL], "max_tokens": 50}))
    for i in range(8):  # one long prefix, ends that differ
        cases.append(("completion", {"prompt": f"{DOCUMENT} In short, number {i}", "max_tokens": 16, "logprobs": None}))
    for i in range(6):
        cases.append(("tokens", {"ids": [100 + i] * (3 + 40 * i), "max_tokens": 20 + i}))
    return cases


BAD = [b"{", b"[]", b"{\"prompt\": 5}", b"{\"prompt\": \"x\", \"max_tokens\": -1}", b"\xff\xfe",
       b"{\"messages\": []}", b"[" * 5000, b"{\"prompt\": \"x\", \"temperature\": \"hot\"}",
       b"{\"prompt\": \"x\", \"stop\": " + json.dumps(["s"] * 40).encode() + b"}"]


class Busy(Exception):
    """The server is draining, restarting or its queue is full: come back."""


class Client:
    """One way of asking; `ask` returns what is compared."""

    def __init__(self, addresses):
        self.addresses = addresses

    def connect(self):
        host, port = self.addresses["http"].split(":")
        return http.client.HTTPConnection(host, int(port), timeout=LIMIT)

    def post(self, path, body, connection):
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            reply = connection.getresponse()
        except (ConnectionError, http.client.RemoteDisconnected) as error:
            raise Busy from error
        if reply.status in (429, 503):
            reply.read()
            raise Busy
        return reply

    def http(self, kind, body, stream=False, pause=None):
        """The choice of a reply, whole or put together from its stream."""
        route = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        body = {**body, "temperature": 0, "stream": stream}
        connection = self.connect()
        try:
            reply = self.post(route, json.dumps(body), connection)
            if reply.status != 200:
                raise AssertionError(f"{route} {reply.status} {reply.read()[:300]}")
            if not stream:
                return self.reduce(kind, json.loads(reply.read())["choices"][0])
            return self.read_stream(kind, reply, pause)
        except http.client.IncompleteRead as error:
            raise Busy from error
        finally:
            connection.close()

    @staticmethod
    def reduce(kind, choice):
        if kind == "completion":
            logprobs = choice.get("logprobs") or {}
            return [choice["text"], choice["finish_reason"], logprobs.get("tokens")]
        message = choice["message"]
        calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or []]
        return [message["content"] or "", message.get("reasoning_content") or "", calls, choice["finish_reason"]]

    @staticmethod
    def read_stream(kind, reply, pause):
        text, reasoning, calls, finish, tokens, ended = "", "", [], None, None, False
        for line in reply:
            if pause:
                pause()
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                ended = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                if chunk["error"].get("code") in ("draining", "server_error") or "shutting" in chunk["error"]["message"]:
                    raise Busy
                raise AssertionError(f"error event {chunk}")
            for choice in chunk["choices"]:
                finish = choice["finish_reason"] or finish
                if kind == "completion":
                    text += choice["text"]
                    if choice.get("logprobs"):
                        tokens = (tokens or []) + choice["logprobs"]["tokens"]
                    continue
                delta = choice["delta"]
                text += delta.get("content") or ""
                reasoning += delta.get("reasoning_content") or ""
                for call in delta.get("tool_calls") or []:
                    while len(calls) <= call["index"]:
                        calls.append(["", ""])
                    calls[call["index"]][0] += call["function"].get("name") or ""
                    calls[call["index"]][1] += call["function"].get("arguments") or ""
        if not ended:
            raise Busy  # cut off by a drain that ran out of time
        return [text, finish, tokens] if kind == "completion" else [text, reasoning, calls, finish]

    def grpc(self, body, unary, channel):
        stub = service_grpc.GenerationServiceStub(channel)
        spec = token_spec(body["ids"], max_new_tokens=body["max_tokens"], ignore_eos=True)
        spec.sampling.temperature = 0
        spec.output.token_ids = True
        try:
            if unary:
                return list(stub.Generate(service.GenerateRequest(spec=spec), timeout=LIMIT).choices[0].token_ids)
            ids = []
            for event in stub.StreamGenerate(service.StreamGenerateRequest(spec=spec), timeout=LIMIT):
                ids.extend(event.delta.token_ids)
            return ids
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
                raise Busy from error
            raise


class Soak:
    def __init__(self, args):
        self.args = args
        self.addresses = {}
        self.counts = collections.Counter()
        self.failures = []
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.cases = questions()
        self.answers = {}
        self.running = {}  # thread -> (what, since)

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def fail(self, what):
        with self.lock:
            self.failures.append(what)
        print("soak: FAILED:", what[:600], flush=True)

    def start(self, *flags):
        ports = []
        if self.addresses:
            ports = ["--port", self.addresses["http"].split(":")[1], "--grpc-port", self.addresses["grpc"].split(":")[1]]
        server = RunningServer(self.args.binary, self.args.model, *FLAGS, *ports, *flags)
        self.addresses.update(http=server.http, grpc=server.grpc)
        return server

    # ---- what the load consists of ----

    def ask_and_compare(self, rng, client, channel):
        index = rng.randrange(len(self.cases))
        kind, body = self.cases[index]
        if kind == "tokens":
            answer = client.grpc(body, rng.random() < 0.5, channel)
        else:
            pause = None
            stream = rng.random() < 0.6
            if stream and rng.random() < 0.2:  # a slow reader
                pause = lambda: time.sleep(rng.random() * 0.05)  # noqa: E731
            answer = client.http(kind, body, stream, pause)
        if answer != self.answers[index]:
            self.fail(f"case {index} {kind}: {answer!r} instead of {self.answers[index]!r}")
        self.count("compared")

    def disconnect(self, rng, client, _):
        """Leaves in the queue, in prefill or in the middle of the text; politely or with a reset."""
        connection = client.connect()
        body = json.dumps({"prompt": DOCUMENT if rng.random() < 0.5 else "x", "max_tokens": 5000, "stream": True,
                           "ignore_eos": True})
        try:
            if rng.random() < 0.3:
                connection.connect()
                connection.sock.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                                        f"{body[:rng.randrange(len(body))]}".encode())
            else:
                reply = client.post("/v1/completions", body, connection)
                reply.read(rng.randrange(2000) + 1)
            if rng.random() < 0.5 and connection.sock:
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        except ConnectionError as error:
            raise Busy from error
        finally:
            connection.close()
        self.count("disconnected")

    def stopped_reader(self, rng, client, _):
        """Asks for much, reads nothing for a while, then leaves."""
        host, port = self.addresses["http"].split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            sock.connect((host, int(port)))
            body = json.dumps({"prompt": "x", "max_tokens": 800, "stream": True, "ignore_eos": True})
            sock.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            self.stop.wait(rng.random() * 3)
        except ConnectionError as error:
            raise Busy from error
        finally:
            sock.close()
        self.count("stopped reading")

    def cancel(self, rng, _, channel):
        stub = service_grpc.GenerationServiceStub(channel)
        spec = token_spec([7] * rng.choice((2, 900)), max_new_tokens=5000, ignore_eos=True)
        call = stub.StreamGenerate(service.StreamGenerateRequest(spec=spec), timeout=LIMIT)
        try:
            for _ in range(rng.randrange(10)):
                next(call)
        except grpc.RpcError as error:
            if call.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
                raise
            raise Busy from error
        finally:
            call.cancel()
        self.count("cancelled")

    def deadline(self, rng, _, channel):
        stub = service_grpc.GenerationServiceStub(channel)
        spec = chat_spec("Say much.", max_new_tokens=3000, ignore_eos=True)
        try:
            stub.Generate(service.GenerateRequest(spec=spec), timeout=rng.choice((0.001, 0.01, 0.1, 0.5)))
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED,
                                    grpc.StatusCode.UNAVAILABLE):
                raise
        self.count("with a deadline")

    def bad_input(self, rng, client, _):
        connection = client.connect()
        try:
            reply = client.post(rng.choice(("/v1/completions", "/v1/chat/completions")), rng.choice(BAD), connection)
            error = json.loads(reply.read())["error"]
            if reply.status != 400 or not error["message"]:
                self.fail(f"bad input answered {reply.status} {error}")
        finally:
            connection.close()
        self.count("refused")

    def worker(self, seed):
        rng = random.Random(seed)
        client = Client(self.addresses)
        kinds = [self.ask_and_compare] * 12 + [self.disconnect] * 3 + [self.cancel] * 3 + [self.deadline] * 2 + \
                [self.bad_input] * 2 + [self.stopped_reader]
        channel = grpc.insecure_channel(self.addresses["grpc"], [("grpc.use_local_subchannel_pool", 1)])
        while not self.stop.is_set():
            kind = rng.choice(kinds)
            self.running[seed] = (kind.__name__, time.monotonic())
            try:
                kind(rng, client, channel)
            except Busy:
                self.count("told to come back")
                time.sleep(0.05 + rng.random() * 0.1)
            except Exception as error:  # noqa: BLE001
                self.fail(f"{kind.__name__}: {type(error).__name__} {error}")
        self.running.pop(seed, None)
        channel.close()

    # ---- watching ----

    @staticmethod
    def status(server):
        with open(f"/proc/{server.process.pid}/status") as file:
            rss = int(re.search(r"VmRSS:\s+(\d+) kB", file.read()).group(1)) / 1024
        return rss, len(os.listdir(f"/proc/{server.process.pid}/fd"))

    def metric(self, name):
        with urllib.request.urlopen(f"http://{self.addresses['http']}/metrics", timeout=30) as page:
            return sum(float(line.rsplit(" ", 1)[1]) for line in page.read().decode().splitlines()
                       if re.match(rf"k3serve_{name}(\{{| )", line))

    def watch(self, server, seconds):
        """Samples of (time, RSS in MB, open files) while the load runs; looks for requests that are stuck."""
        samples = []
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            if server.process.poll() is not None:
                raise SystemExit(f"soak: the server ended with {server.process.returncode}")
            samples.append((time.monotonic() - begin, *self.status(server)))
            for what, since in list(self.running.values()):
                if time.monotonic() - since > LIMIT + 30:
                    self.fail(f"{what} has been going on for {time.monotonic() - since:.0f} s")
            time.sleep(min(1.0, seconds / 20))
        return samples

    def check_memory(self, samples):
        """MB an hour over the second half of the samples, by least squares, and the rise over it."""
        half = samples[len(samples) // 2:]
        mean_t = sum(t for t, _, _ in half) / len(half)
        mean_m = sum(m for _, m, _ in half) / len(half)
        spread = sum((t - mean_t) ** 2 for t, _, _ in half)
        slope = sum((t - mean_t) * (m - mean_m) for t, m, _ in half) / spread if spread else 0
        rise = slope * (half[-1][0] - half[0][0])
        print(f"soak: {samples[-1][0]:.0f} s, memory {samples[0][1]:.0f} to {samples[-1][1]:.0f} MB, "
              f"{slope * 3600:.0f} MB/h over the second half, files {samples[0][2]} to {samples[-1][2]}", flush=True)
        if rise > self.args.max_rise_mb:
            self.fail(f"memory rose by {rise:.0f} MB in the second half of a life")

    def check_idle(self, server):
        until = time.monotonic() + 20
        gauges = ("requests_running", "requests_waiting", "latent_pages_used", "state_slots_used")
        while any(self.metric(gauge) for gauge in gauges):
            if time.monotonic() > until:
                return self.fail(f"after the load: { {gauge: self.metric(gauge) for gauge in gauges} }")
            time.sleep(0.1)
        time.sleep(0.5)
        accepted, finished = self.metric("requests_accepted_total"), self.metric("requests_finished_total")
        print(f"soak: accepted {accepted:.0f}, finished {finished:.0f}, preemptions {self.metric('preemptions_total'):.0f}, "
              f"cache hits {self.metric('prefix_cache_hit_tokens_total'):.0f} tokens", flush=True)
        if accepted != finished:
            self.fail(f"{accepted} requests were accepted, {finished} have an outcome")
        if self.status(server)[1] > self.idle_files + 40:
            self.fail(f"{self.status(server)[1]} files are open, {self.idle_files} at the start")

    def check_log(self, server):
        server.log.seek(0)
        for line in server.log.read().decode().splitlines():
            if re.search(r" (error|critical) ", line[:60]):
                self.fail("log: " + line)
        server.log.close()

    def drain(self, server):
        server.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        code = server.process.wait(timeout=60)
        seconds = time.monotonic() - begin
        print(f"soak: drained under load in {seconds:.1f} s", flush=True)
        if code != 0 or seconds > 25:
            self.fail(f"drain: exit code {code} after {seconds:.1f} s")
        server.process.stdout.close()
        self.check_log(server)

    def run(self):
        reference = RunningServer(self.args.binary, self.args.model, "--no-enable-prefix-caching")
        self.addresses.update(http=reference.http, grpc=reference.grpc)
        client = Client(self.addresses)
        with grpc.insecure_channel(reference.grpc) as channel:
            for index, (kind, body) in enumerate(self.cases):
                self.answers[index] = client.grpc(body, True, channel) if kind == "tokens" else client.http(kind, body)
        reference.stop()
        reference.log.close()

        server = self.start()
        self.idle_files = self.status(server)[1]
        threads = [threading.Thread(target=self.worker, args=(self.args.seed + i,)) for i in range(self.args.workers)]
        for thread in threads:
            thread.start()
        lives = self.args.drains + 1
        for life in range(lives):
            self.check_memory(self.watch(server, self.args.seconds / lives))
            if life + 1 < lives:
                self.drain(server)
                server = self.start()
        self.stop.set()
        for thread in threads:
            thread.join(timeout=LIMIT + 60)
            if thread.is_alive():
                self.fail("a request never ended")
        self.check_idle(server)
        if server.stop() != 0:
            self.fail("the server did not end well")
        self.check_log(server)
        print("soak:", ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items())))
        print(f"soak: {len(self.failures)} failures")
        return 1 if self.failures or not self.counts["compared"] else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "k3serve"))
    parser.add_argument("--model", default=os.path.join(ROOT, "configs", "models", "tiny-k3"))
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--drains", type=int, default=6)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-rise-mb", type=float, default=24, help="of memory in the second half of a life")
    sys.exit(Soak(parser.parse_args()).run())


if __name__ == "__main__":
    main()
