"""Readers that stop and deadlines that pass, against the real engine: cases B43 and B44, B46's limits, limits per key.
Needs grpcio."""

import http.client
import json
import re
import socket
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request

import grpc

from grpc_stubs import details, service, service_grpc, token_spec
from running_server import RunningServer, main


def metric(server, name, **labels):
    total = 0
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as page:
        for line in page.read().decode().splitlines():
            match = re.fullmatch(r"k3serve_(\w+)(?:\{(.*)\})? (\S+)", line)
            if match and match.group(1) == name:
                found = dict(re.findall(r'(\w+)="([^"]*)"', match.group(2) or ""))
                if labels.items() <= found.items():
                    total += float(match.group(3))
    return total


def memory_mb(server):
    with open(f"/proc/{server.process.pid}/status") as file:
        return int(re.search(r"VmRSS:\s+(\d+) kB", file.read()).group(1)) / 1024


class OverloadTest(unittest.TestCase):
    def start(self, *flags):
        server = RunningServer(BINARY, MODEL, *flags)
        self.addCleanup(lambda: server.process.poll() is None and server.process.kill())
        return server

    def wait_idle(self, server, seconds=60):
        until = time.monotonic() + seconds
        while metric(server, "requests_running") or metric(server, "requests_waiting"):
            self.assertLess(time.monotonic(), until, "requests are still running")
            time.sleep(0.1)
        for gauge in ("latent_pages_used", "state_slots_used"):
            self.assertEqual(metric(server, gauge), 0, gauge)

    # B43.
    def test_readers_that_stop_hold_nobody_up_and_lose_nothing(self):
        server = self.start("--max-num-seqs", "128")
        tokens, count = 250, 50
        spec = token_spec([100, 200, 300], max_new_tokens=tokens, ignore_eos=True)
        spec.sampling.temperature = 0
        spec.output.token_ids = True
        body = json.dumps({"prompt": [100, 200, 300], "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
                           "stream": True, "logprobs": 5})  # much text for each token
        with grpc.insecure_channel(server.grpc) as channel:
            stub = service_grpc.GenerationServiceStub(channel)
            alone = list(stub.Generate(service.GenerateRequest(spec=spec)).choices[0].token_ids)
            # As many that read, first: pools and caches then are as large as they get.
            short = token_spec([100, 200, 300], max_new_tokens=20, ignore_eos=True)
            warm = [stub.Generate.future(service.GenerateRequest(spec=short)) for _ in range(2 * count)]
            for call in warm:
                call.result()
            before = memory_mb(server)
            # A channel each: one connection's window would be shared.
            channels = [grpc.insecure_channel(server.grpc, [("grpc.use_local_subchannel_pool", 1),
                                                            ("grpc.http2.lookahead_bytes", 1024)]) for _ in range(count)]
            calls = [service_grpc.GenerationServiceStub(c).StreamGenerate(service.StreamGenerateRequest(spec=spec))
                     for c in channels]
            firsts = [next(call) for call in calls]
            host, port = server.http.split(":")
            readers = []
            for _ in range(count):
                sock = socket.socket()
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect((host, int(port)))
                sock.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                             f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
                readers.append((sock, sock.recv(100)))
            # Others go on: the same request by a client that reads.
            begin = time.monotonic()
            self.assertEqual(list(stub.Generate(service.GenerateRequest(spec=spec)).choices[0].token_ids), alone)
            self.wait_idle(server)  # the engine finished all of them though nobody reads
            print(f"{2 * count} stopped readers: {time.monotonic() - begin:.1f} s, "
                  f"memory +{memory_mb(server) - before:.0f} MB")
            self.assertLess(memory_mb(server) - before, 64)
            # They go on and get everything, in order.
            for first, call in zip(firsts, calls):
                ids = list(first.delta.token_ids)
                for event in call:
                    ids.extend(event.delta.token_ids)
                self.assertEqual(ids, alone)
            for c in channels:
                c.close()
            for sock, text in readers:
                sock.settimeout(30)
                while b"data: [DONE]" not in text:
                    piece = sock.recv(65536)
                    self.assertTrue(piece)
                    text += piece
                sock.close()
                events = re.findall(rb"^data: (\{.*\})", text, re.M)
                self.assertEqual(sum(len(json.loads(event)["choices"][0]["logprobs"]["tokens"]) for event in events
                                     if json.loads(event)["choices"][0].get("logprobs")), tokens)
        self.wait_idle(server)
        self.assertEqual(server.stop(), 0)

    # B44.
    def test_deadlines_end_work_in_queue_prefill_and_decode(self):
        server = self.start("--max-num-seqs", "4", "--max-queue", "400")

        def ended():
            return sum(metric(server, "requests_finished_total", reason=r) for r in ("deadline", "abort"))

        def finished():
            return metric(server, "requests_finished_total")

        with grpc.insecure_channel(server.grpc) as channel:
            stub = service_grpc.GenerationServiceStub(channel)

            def endless(prompt, timeout):
                spec = token_spec([7] * prompt, max_new_tokens=100000, ignore_eos=False)
                spec.stopping.min_new_tokens = 1
                spec.sampling.logit_bias[3841] = -100  # neither of the model's end tokens
                spec.sampling.logit_bias[3842] = -100
                return stub.Generate.future(service.GenerateRequest(spec=spec), timeout=timeout)

            # With nothing else to do, a request is taken, ends at its deadline and is counted as such. On a machine so busy
            # that it arrives too late it is not started: then again.
            for _ in range(50):
                before = ended()
                self.assertEqual(endless(700, 0.5).code(), grpc.StatusCode.DEADLINE_EXCEEDED)
                self.wait_idle(server, 10)
                if ended() > before:
                    break
            self.assertEqual(ended(), before + 1)

            for fill in (0, 6):  # an empty queue, and one with waiting requests
                filling = [endless(3, None) for _ in range(fill)]
                while fill and metric(server, "requests_waiting") < fill - 4:
                    time.sleep(0.02)
                before, before_all = ended(), finished()
                rejected = metric(server, "rejected_total")
                calls = [endless(prompt, timeout) for timeout in (0, 0.001, 0.005, 0.05, 0.5) for prompt in (3, 700)
                         for _ in range(50)]
                codes = {}
                for call in calls:
                    codes[call.code()] = codes.get(call.code(), 0) + 1
                self.assertEqual(sum(codes.values()), 500)
                self.assertLessEqual(codes.keys(), {grpc.StatusCode.DEADLINE_EXCEEDED,
                                                    grpc.StatusCode.RESOURCE_EXHAUSTED})
                until = time.monotonic() + 20
                while metric(server, "requests_running") + metric(server, "requests_waiting") > fill:
                    self.assertLess(time.monotonic(), until)
                    time.sleep(0.02)
                # Every one that the engine took has ended as deadline or abort; the others were refused, or never came.
                self.assertEqual(ended() - before, finished() - before_all)
                self.assertLessEqual(ended() - before + metric(server, "rejected_total") - rejected, len(calls))
                for call in filling:
                    call.cancel()
                self.wait_idle(server, 20)
                made = metric(server, "generation_tokens_total")
                time.sleep(0.3)
                self.assertEqual(metric(server, "generation_tokens_total"), made)
        self.assertEqual(server.stop(), 0)

    # B46.
    def test_message_limits_hold_in_both_directions(self):
        server = self.start()
        limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(server.grpc, limits) as channel:
            stub = service_grpc.GenerationServiceStub(channel)
            with self.assertRaises(grpc.RpcError) as caught:
                stub.Generate(service.GenerateRequest(spec=token_spec([100] * 2000000, max_new_tokens=1)))
            self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertEqual(server.stop(), 0)
        small = self.start("--max-message-mib", "1")
        with grpc.insecure_channel(small.grpc, limits) as channel:
            stub = service_grpc.GenerationServiceStub(channel)
            spec = token_spec([5], max_new_tokens=2)
            spec.cache.salt = "x" * (1 << 20)
            with self.assertRaises(grpc.RpcError) as caught:
                stub.Generate(service.GenerateRequest(spec=spec))
            self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
            stub.Generate(service.GenerateRequest(spec=token_spec([5], max_new_tokens=2)))  # the connection goes on
        self.assertEqual(small.stop(), 0)

    def test_messages_that_do_not_parse(self):
        server = self.start()
        with grpc.insecure_channel(server.grpc) as channel:
            path = "/k3serve.inference.v1.GenerationService/"
            for _ in range(3):
                unary = channel.unary_unary(path + "Generate", bytes, bytes)
                stream = channel.unary_stream(path + "StreamGenerate", bytes, bytes)
                for ask in (lambda: unary(b"\xff\xff\xff\xff"), lambda: list(stream(b"\x0a\xff"))):
                    with self.assertRaises(grpc.RpcError) as caught:
                        ask()
                    self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
                    self.assertTrue(caught.exception.details())
            with self.assertRaises(grpc.RpcError) as caught:
                channel.unary_unary(path + "NoSuchMethod", bytes, bytes)(b"")
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)
            spec = token_spec([5], max_new_tokens=2, ignore_eos=True)
            service_grpc.GenerationServiceStub(channel).Generate(service.GenerateRequest(spec=spec))
        self.assertEqual(server.stop(), 0)

    def test_limits_of_requests_and_keys(self):
        with tempfile.NamedTemporaryFile("w") as keys:
            keys.write("one\ntwo\n")
            keys.flush()
            server = self.start("--api-key-file", keys.name, "--max-streams-per-key", "2", "--max-body-mib", "1",
                                "--max-connections", "12", "--request-timeout", "3600")

            def post(body, key="one", headers=None, path="/v1/completions"):
                connection = http.client.HTTPConnection(server.http, timeout=30)
                self.addCleanup(connection.close)
                connection.request("POST", path, body if isinstance(body, (str, bytes)) else json.dumps(body),
                                   {"authorization": "Bearer " + key, **(headers or {})})
                return connection.getresponse()

            endless = {"prompt": "x", "max_tokens": 100000, "ignore_eos": True, "stream": True}
            running = [post(endless), post(endless)]
            for reply in running:
                self.assertEqual(reply.status, 200)
                reply.read(10)
            refused = post(endless)
            self.assertEqual(refused.status, 429)
            self.assertGreaterEqual(int(refused.headers["retry-after"]), 1)
            with grpc.insecure_channel(server.grpc) as channel:
                stub = service_grpc.GenerationServiceStub(channel)
                spec = token_spec([5], max_new_tokens=2, ignore_eos=True)
                with self.assertRaises(grpc.RpcError) as caught:
                    stub.Generate(service.GenerateRequest(spec=spec), metadata=[("authorization", "Bearer one")])
                self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
                self.assertEqual(details(caught.exception)["ErrorInfo"].reason, "too_many_streams")
                stub.Generate(service.GenerateRequest(spec=spec), metadata=[("authorization", "Bearer two")])
            for reply in running:
                reply.close()
            chat = "/v1/chat/completions"
            for body, status in ((b"x" * (1 << 20) + b"y", 413), ("[" * 5000, 400),
                                 ({"prompt": "x", "stop": ["s"] * 17}, 400), ({"prompt": "x", "stop": "s" * 257}, 400)):
                self.assertEqual(post(body, "two").status, status)
            many = {"messages": [{"role": "user", "content": "x"}] * 16385, "max_tokens": 1}
            reply = post(many, "two", path=chat)
            self.assertEqual(reply.status, 400)
            self.assertIn("16384", json.loads(reply.read())["error"]["message"])
            self.assertIn(post("{}", "two", {"x-long": "h" * (70 << 10)}).status, (400, 431))
            # No origin is allowed to read answers.
            preflight = http.client.HTTPConnection(server.http, timeout=10)
            preflight.request("OPTIONS", chat, headers={"origin": "http://evil.example",
                                                        "access-control-request-method": "POST"})
            reply = preflight.getresponse()
            self.assertFalse([name for name, _ in reply.getheaders() if name.lower().startswith("access-control")])
            preflight.close()
            # One connection too many is told so.
            crowd = []
            for _ in range(30):
                sock = socket.create_connection(tuple(server.http.split(":")), timeout=5)
                crowd.append(sock)
            answers = [sock for sock in crowd if self.told_full(sock)]
            self.assertGreaterEqual(len(answers), 15)
            for sock in crowd:
                sock.close()
        self.assertEqual(server.stop(), 0)

    def test_grpc_connections_beyond_the_limit_are_turned_away(self):
        server = self.start("--max-connections", "12")
        request = service.GenerateRequest(spec=token_spec([5], max_new_tokens=2, ignore_eos=True))

        def served():
            with grpc.insecure_channel(server.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                try:
                    service_grpc.GenerationServiceStub(channel).Generate(request, timeout=60)
                    return True
                except grpc.RpcError as error:
                    self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE)
                    return False

        with grpc.insecure_channel(server.grpc) as channel:
            stub = service_grpc.GenerationServiceStub(channel)
            stub.Generate(request)
            crowd = [socket.create_connection(tuple(server.grpc.split(":")), timeout=5) for _ in range(30)]
            self.assertEqual(sum(map(self.was_closed, crowd)), 30 - 11)
            self.assertFalse(served())
            stub.Generate(request)  # a connection that was there
            with urllib.request.urlopen(server.url + "/health/ready", timeout=30) as reply:
                self.assertEqual(reply.status, 200)
            for sock in crowd:
                sock.close()
        until = time.monotonic() + 30
        while not served():
            self.assertLess(time.monotonic(), until)
        self.assertEqual(server.stop(), 0)

    @staticmethod
    def was_closed(sock):
        """The server's side speaks first: a settings frame, or the end."""
        sock.settimeout(30)
        try:
            return sock.recv(1000) == b""
        except ConnectionError:
            return True

    @staticmethod
    def told_full(sock):
        sock.settimeout(0.3)
        try:
            return sock.recv(1000).startswith(b"HTTP/1.1 503")
        except OSError:
            return False

    def test_no_request_outlasts_its_time(self):
        server = self.start("--request-timeout", "0.5", "--queue-timeout", "0.3", "--max-num-seqs", "1")
        body = json.dumps({"prompt": "x", "max_tokens": 100000}).encode()
        results = []

        def ask():
            begin = time.monotonic()
            try:
                urllib.request.urlopen(urllib.request.Request(server.url + "/v1/completions", body), timeout=30).read()
                results.append((200, 0))
            except urllib.error.HTTPError as error:
                results.append((error.code, time.monotonic() - begin))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertLessEqual({code for code, _ in results}, {429, 504, 200})
        self.assertIn(429, {code for code, _ in results})  # waited too long for the one slot, or could not make it
        self.assertLess(max(seconds for _, seconds in results), 2)
        self.wait_idle(server)
        self.assertEqual(server.stop(), 0)


def configure(binary, model_dir):
    global BINARY, MODEL
    BINARY, MODEL = binary, model_dir


if __name__ == "__main__":
    main(configure)
