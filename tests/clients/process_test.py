"""Running streams and signals: drain, the time limit of a drain, the second signal. Needs grpcio."""

import json
import signal
import threading
import time
import unittest
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from grpc_stubs import chat_spec, service, service_grpc, token_spec
from running_server import RunningServer, main


def status_of(url, body=None):
    try:
        with urllib.request.urlopen(url, body) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


class ServeTest(unittest.TestCase):
    def start(self, *flags):
        server = RunningServer(BINARY, MODEL, *flags)
        self.addCleanup(lambda: server.process.poll() is None and server.process.kill())
        return server

    def streams(self, server, count, tokens, http=0):
        """Starts gRPC and then HTTP streams; returns their results, which fill up as they end, and the threads. A result
        is the number of tokens, the code of a gRPC error, or the code of an error event."""
        results = [None] * (count + http)
        started = threading.Barrier(count + http + 1)

        def read_http(index):
            body = json.dumps({"prompt": [100] * 5, "max_tokens": tokens, "ignore_eos": True, "stream": True,
                               "stream_options": {"include_usage": True}}).encode()
            with urllib.request.urlopen(server.url + "/v1/completions", body) as reply:
                events = [reply.readline()]
                started.wait()
                events += [line for line in reply if line.startswith(b"data: ")]
            if events[-1] != b"data: [DONE]\n":
                results[index] = "no end"
                return
            last = json.loads(events[-2][6:])
            results[index] = last["error"]["type"] if "error" in last else last["usage"]["completion_tokens"]

        def read(index):
            with grpc.insecure_channel(server.grpc) as channel:
                spec = token_spec([100] * 5, max_new_tokens=tokens, ignore_eos=True)
                call = service_grpc.GenerationServiceStub(channel).StreamGenerate(
                    service.StreamGenerateRequest(spec=spec))
                next(call)
                started.wait()
                try:
                    events = list(call)
                    results[index] = events[-1].usage.completion_tokens
                except grpc.RpcError as error:
                    results[index] = error.code()

        threads = [threading.Thread(target=read, args=(i,)) for i in range(count)]
        threads += [threading.Thread(target=read_http, args=(count + i,)) for i in range(http)]
        for thread in threads:
            thread.start()
        started.wait()
        return results, threads

    def http_streams(self, server, count, tokens):
        """The same by HTTP: the whole text of each stream."""
        results = [None] * count
        started = threading.Barrier(count + 1)

        def read(index):
            body = {"prompt": [100] * 5, "max_tokens": tokens, "ignore_eos": True, "stream": True,
                    "stream_options": {"include_usage": True}}
            request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request) as reply:
                lines = [reply.readline()]
                started.wait()
                lines += reply.readlines()
            results[index] = [line[6:].strip().decode() for line in lines if line.startswith(b"data: ")]

        threads = [threading.Thread(target=read, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        started.wait()
        return results, threads

    def test_running_http_streams_end_before_the_process(self):
        server = self.start()
        results, threads = self.http_streams(server, 4, 400)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        for events in results:
            self.assertEqual(events[-1], "[DONE]")
            self.assertEqual(json.loads(events[-2])["usage"]["completion_tokens"], 400)
            self.assertEqual(json.loads(events[-3])["choices"][0]["finish_reason"], "length")
        self.assertEqual(server.process.wait(timeout=10), 0)

    def test_http_streams_that_outlast_the_timeout_end_with_an_error_event(self):
        server = self.start("--shutdown-timeout", "0.3")
        results, threads = self.http_streams(server, 4, 200000)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        self.assertEqual(server.process.wait(timeout=10), 0)
        self.assertLess(time.monotonic() - begin, 4)
        for thread in threads:
            thread.join()
        for events in results:
            self.assertEqual(events[-1], "[DONE]")
            self.assertEqual(json.loads(events[-2])["error"]["type"], "server_error")

    def test_the_timeout_begins_when_the_lag_is_over(self):
        server = self.start("--drain-lag", "1", "--shutdown-timeout", "1")
        results, threads = self.http_streams(server, 1, 400000)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        threads[0].join()
        self.assertGreaterEqual(time.monotonic() - begin, 2)
        self.assertEqual(json.loads(results[0][-2])["error"]["type"], "server_error")
        self.assertEqual(server.process.wait(timeout=60), 0)

    # B45. The times are what the server can do: of several tries on a busy machine one must be in time; all else holds
    # in each.
    def in_time(self, drain):
        for _ in range(5):
            if drain():
                return
        self.fail("too slow in every try")

    def test_running_streams_end_before_the_process(self):
        def drain():
            server = self.start("--shutdown-timeout", "250")
            tokens = 1200  # some 3 s of four streams
            results, threads = self.streams(server, 2, tokens, http=2)
            with grpc.insecure_channel(server.grpc) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                watch = health.Watch(health_pb2.HealthCheckRequest())
                self.assertEqual(next(watch).status, health_pb2.HealthCheckResponse.SERVING)
                begin = time.monotonic()
                server.process.send_signal(signal.SIGTERM)
                self.assertEqual(next(watch).status, health_pb2.HealthCheckResponse.NOT_SERVING)
                self.assertEqual(status_of(server.url + "/health/ready"), 503)
                unready = time.monotonic() - begin
                self.assertEqual(status_of(server.url + "/health/live"), 200)
                with self.assertRaises(grpc.RpcError) as caught:
                    list(service_grpc.GenerationServiceStub(channel).StreamGenerate(
                        service.StreamGenerateRequest(spec=chat_spec("x"))))
                self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)
                self.assertEqual(status_of(server.url + "/v1/completions", b'{"prompt": "x"}'), 503)
            for thread in threads:
                thread.join()
            done = time.monotonic()
            self.assertEqual(results, [tokens] * 4)
            self.assertEqual(server.process.wait(timeout=30), 0)
            return unready < 0.2 and time.monotonic() - done < 2
        self.in_time(drain)

    def test_what_outlasts_the_timeout_ends_unavailable(self):
        def drain():
            server = self.start("--shutdown-timeout", "1")
            results, threads = self.streams(server, 2, 200000, http=2)
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            self.assertEqual(server.process.wait(timeout=30), 0)
            seconds = time.monotonic() - begin
            for thread in threads:
                thread.join()
            self.assertEqual(results, [grpc.StatusCode.UNAVAILABLE] * 2 + ["server_error"] * 2)
            return seconds < 2
        self.in_time(drain)

    def test_a_second_signal_ends_at_once(self):
        server = self.start()
        _, threads = self.streams(server, 2, 200000)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        self.assertIsNone(server.process.poll())
        server.process.send_signal(signal.SIGINT)
        self.assertEqual(server.process.wait(timeout=2), 128 + signal.SIGINT)
        for thread in threads:
            thread.join()


def configure(binary, model_dir):
    global BINARY, MODEL
    BINARY, MODEL = binary, model_dir


if __name__ == "__main__":
    main(configure)
