"""An engine that hangs and a device that fails, in a real server: what probes, running requests and the process say.
Needs grpcio and permission to trace a child process."""

import json
import re
import signal
import threading
import time
import unittest
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from frozen_thread import FrozenThread, can_trace, threads
from running_server import RunningServer, main

STALL = 30  # seconds without a finished step


def probe(url):
    """The status, None when nobody answers in time."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


class StallTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.traces = can_trace()

    def start(self, *flags):
        server = RunningServer(BINARY, MODEL, *flags)
        self.addCleanup(server.log.close)
        self.addCleanup(lambda: server.process.poll() is None and server.process.kill())
        return server

    def need_tracing(self):
        if not self.traces:
            self.skipTest("a child process may not be traced here")

    def stream(self, server):
        """A request that goes on for ever: its events, which fill up, and its thread."""
        events = []
        begun = threading.Event()

        def read():
            body = json.dumps({"prompt": "x", "max_tokens": 100000, "ignore_eos": True, "stream": True}).encode()
            with urllib.request.urlopen(server.url + "/v1/completions", body, timeout=120) as reply:
                for line in reply:
                    if line.startswith(b"data: "):
                        events.append((time.monotonic(), line[6:].strip()))
                        begun.set()

        def follow():
            try:
                read()
            except OSError:
                pass  # the server has gone; what came is in the events

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        self.assertTrue(begun.wait(60))
        return events, thread

    @staticmethod
    def log_of(server):
        with open(f"/proc/self/fd/{server.log.fileno()}", "rb") as log:
            return log.read().decode()

    def wait_for(self, condition, seconds):
        until = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), until)
            time.sleep(0.1)

    # B48: ready, the gRPC health service and the metrics tell of a hanging step, alive or not is another question.
    def test_an_engine_that_hangs_is_not_ready_until_it_goes_on(self):
        self.need_tracing()
        server = self.start("--shutdown-timeout", "1")
        events, _ = self.stream(server)
        with grpc.insecure_channel(server.grpc) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=300)
            self.assertEqual(next(watch).status, health_pb2.HealthCheckResponse.SERVING)
            engine = FrozenThread(next(tid for tid, (name, _) in threads(server.process.pid).items()
                                       if name == "k3-engine"))
            engine.freeze_outside_of_locks(lambda: probe(server.url + "/metrics") == 200)  # which asks the engine
            begin = time.monotonic()
            try:
                self.assertEqual(next(watch).status, health_pb2.HealthCheckResponse.NOT_SERVING)
                seconds = time.monotonic() - begin
                self.assertEqual(probe(server.url + "/health/ready"), 503)
                self.assertEqual(probe(server.url + "/health/live"), 200)
                self.assertEqual(probe(server.url + "/metrics"), 200)
            finally:
                engine.thaw()
            self.assertGreater(seconds, STALL - 5)
            self.assertLess(seconds, STALL + 60)  # most of it for a busy machine
            self.assertEqual(next(watch).status, health_pb2.HealthCheckResponse.SERVING)
            self.assertEqual(probe(server.url + "/health/ready"), 200)
            seen = len(events)
            self.wait_for(lambda: len(events) > seen, 30)  # the request was not lost
            watch.cancel()
        self.assertEqual(server.stop(), 0)

    # Nobody waits for the step any more, and a device that hangs would never end it.
    def test_an_engine_that_hangs_does_not_outlive_the_drain(self):
        self.need_tracing()
        for impatient in (False, True):
            server = self.start("--shutdown-timeout", "1")
            self.stream(server)
            engine = FrozenThread(next(tid for tid, (name, _) in threads(server.process.pid).items()
                                       if name == "k3-engine"))
            engine.freeze_outside_of_locks(lambda: probe(server.url + "/metrics") == 200)
            server.process.send_signal(signal.SIGTERM)
            if impatient:
                self.wait_for(lambda: "drained in" in self.log_of(server), 60)
                server.process.send_signal(signal.SIGTERM)
            engine.bury()
            self.assertEqual(server.process.wait(timeout=60), 143 if impatient else 0)
            self.assertIn("second signal 15: ending at once" if impatient else "threads still work after 10 s",
                          self.log_of(server))

    # B48: ready means warmed up. What else the machine does can make one start look bad, a cost of the first request all.
    def test_the_first_request_costs_what_the_second_does(self):
        ratios = []
        for _ in range(6):
            server = self.start()
            seconds = []
            for prompt in range(2):  # of equal length, and no prefix of the other
                body = json.dumps({"prompt": [100 + prompt] * 200, "max_tokens": 60, "ignore_eos": True}).encode()
                begin = time.monotonic()
                with urllib.request.urlopen(server.url + "/v1/completions", body, timeout=120) as reply:
                    reply.read()
                seconds.append(time.monotonic() - begin)
            self.assertEqual(server.stop(), 0)
            ratios.append(seconds[0] / seconds[1])
            if ratios[-1] <= 1.5:
                return
        self.fail(f"first over second request: {ratios}")

    # B48: the device's error ends the requests, then the process.
    def test_a_failed_device_ends_requests_and_process(self):
        self.need_tracing()
        server = self.start("--tensor-parallel-size", "2", "--threads", "2", "--rank-timeout", "1")
        events, thread = self.stream(server)
        # The ranks compute, nobody else does.
        ticks = {}
        while sorted(ticks.values())[-2:-1] < [50]:
            time.sleep(0.1)
            ticks = {tid: used for tid, (name, used) in threads(server.process.pid).items() if name != "k3-engine"}
        rank = FrozenThread(max(ticks, key=ticks.get))
        # The other rank gives up after five --rank-timeout on the CPU, if it waits for this one: not when the step's last
        # exchange is over; then the stream goes on.
        for _ in range(20):
            rank.freeze_outside_of_locks(lambda: probe(server.url + "/metrics") == 200)
            time.sleep(7)
            seen = len(events)
            begin = time.monotonic()
            rank.thaw()
            self.wait_for(lambda: len(events) > seen, 60)
            time.sleep(0.5)
            if any(b'"error"' in event for _, event in events[seen:]):
                break
        states = set()
        while server.process.poll() is None:
            states.add(probe(server.url + "/health/ready"))
            self.assertLess(time.monotonic() - begin, 120)
            time.sleep(0.02)
        thread.join(timeout=60)
        self.assertEqual(server.process.returncode, 70)
        self.assertIn(503, states)
        self.assertEqual(events[-1][1], b"[DONE]")
        self.assertEqual(json.loads(events[-2][1])["error"]["type"], "server_error")
        self.assertLess(events[-1][0] - begin, 60)  # at once; tests run beside others
        server.log.seek(0)
        self.assertTrue(re.search(r"critical .*device has failed", server.log.read().decode()))
        server.process.stdout.close()


def configure(binary, model_dir):
    global BINARY, MODEL
    BINARY, MODEL = binary, model_dir


if __name__ == "__main__":
    main(configure)
