"""What the soak's workers do, at random: ask and compare, leave, stop reading, cancel, set deadlines, send bad input."""

import collections
import http.client
import json
import random
import socket
import threading
import time

import grpc

from grpc_stubs import chat_spec, service, service_grpc, token_spec
from soak_client import DOCUMENT, LIMIT, Busy, Client, questions, structured_questions

BAD = [b"{", b"[]", b"{\"prompt\": 5}", b"{\"prompt\": \"x\", \"max_tokens\": -1}", b"\xff\xfe",
       b"{\"messages\": []}", b"[" * 5000, b"{\"prompt\": \"x\", \"temperature\": \"hot\"}",
       b"{\"prompt\": \"x\", \"stop\": " + json.dumps(["s"] * 40).encode() + b"}"]


class Failures:
    """What went wrong, told as it happens. Thread-safe."""

    def __init__(self):
        self.count = 0
        self.lock = threading.Lock()

    def add(self, what):
        with self.lock:
            self.count += 1
        print("soak: FAILED:", what[:600], flush=True)


class Load:
    """Workers that go on, whatever the server answers, until `finish`. `addresses` may change while they run."""

    def __init__(self, addresses, failures):
        self.addresses = addresses
        self.failures = failures
        self.counts = collections.Counter()
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.cases = questions()
        self.answers = []  # the right ones
        self.running = {}  # worker -> (what, since)
        self.threads = []

    def learn(self):
        """Takes the answers of the server that is at the addresses now for the right ones."""
        client = Client(self.addresses)
        try:
            client.http(*structured_questions()[0])
            self.cases += structured_questions()
        except AssertionError as error:  # built without
            if "unsupported_parameter" not in str(error):
                raise
        with grpc.insecure_channel(self.addresses["grpc"]) as channel:
            self.answers = [client.grpc(body, True, channel) if kind == "tokens" else client.http(kind, body)
                            for kind, body in self.cases]

    def start(self, workers, seed):
        self.threads = [threading.Thread(target=self.worker, args=(seed + i,)) for i in range(workers)]
        for thread in self.threads:
            thread.start()

    def finish(self):
        self.stop.set()
        for thread in self.threads:
            thread.join(timeout=LIMIT + 60)
            if thread.is_alive():
                self.failures.add("a request never ended")

    def look_for_stuck(self):
        for what, since in list(self.running.values()):
            if time.monotonic() - since > LIMIT + 30:
                self.failures.add(f"{what} has been going on for {time.monotonic() - since:.0f} s")

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

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
            self.failures.add(f"case {index} {kind}: {answer!r} instead of {self.answers[index]!r}")
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
                self.failures.add(f"bad input answered {reply.status} {error}")
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
                self.failures.add(f"{kind.__name__}: {type(error).__name__} {error}")
        self.running.pop(seed, None)
        channel.close()
