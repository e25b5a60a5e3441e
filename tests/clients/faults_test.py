"""What the machine can do to a server: a full disk under the log, a wall clock that jumps, too few file descriptors, too
little memory for a pool, a damaged byte in the checkpoint. Needs grpcio; the clock test needs a C compiler."""

import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from grpc_stubs import service, service_grpc, token_spec
from running_server import RunningServer, main

HERE = os.path.dirname(os.path.abspath(__file__))


def complete(url, tokens=8):
    body = json.dumps({"prompt": "ls is", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["choices"][0]["text"]


class FaultsTest(unittest.TestCase):
    def start(self, *flags, **options):
        server = RunningServer(BINARY, MODEL, *flags, **options)
        self.addCleanup(lambda: server.process.poll() is None and server.process.kill())
        return server

    def test_a_full_disk_under_the_log(self):
        expected = complete(self.start().url)
        with open("/dev/full", "wb") as full:
            server = self.start("--log-level", "trace", log=full)
        for _ in range(5):
            self.assertEqual(complete(server.url), expected)
        with grpc.insecure_channel(server.grpc) as channel:
            reply = service_grpc.GenerationServiceStub(channel).Generate(
                service.GenerateRequest(spec=token_spec([5] * 4, max_new_tokens=3, ignore_eos=True)))
            self.assertEqual(reply.usage.completion_tokens, 3)
        self.assertEqual(server.stop(), 0)

    @unittest.skipIf(shutil.which("cc") is None, "no C compiler")
    def test_the_wall_clock_jumps(self):
        with tempfile.TemporaryDirectory() as folder:
            shim, clock = os.path.join(folder, "shim.so"), os.path.join(folder, "clock")
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, os.path.join(HERE, "clock_shim.c"), "-ldl"],
                           check=True)

            def jump(hours):
                with open(clock, "r+b") as file:
                    file.write(struct.pack("q", int(hours * 3600e9)))

            with open(clock, "wb") as file:
                file.write(bytes(8))
            server = self.start("--request-timeout", "60", "--queue-timeout", "30", "--log-level", "debug",
                                env={"LD_PRELOAD": shim, "K3_CLOCK_FILE": clock})
            with grpc.insecure_channel(server.grpc) as channel:
                stub = service_grpc.GenerationServiceStub(channel)
                health = health_pb2_grpc.HealthStub(channel)
                for hours in (3, -5, 24 * 400, 0):
                    # A stream in progress, with a deadline, while the clock jumps.
                    stream = stub.StreamGenerate(service.StreamGenerateRequest(
                        spec=token_spec([5] * 4, max_new_tokens=600, ignore_eos=True)), timeout=50)
                    next(stream)
                    jump(hours)
                    self.assertEqual(list(stream)[-1].usage.completion_tokens, 600, hours)
                    reply = stub.Generate(service.GenerateRequest(
                        spec=token_spec([5] * 4, max_new_tokens=5, ignore_eos=True)), timeout=20)
                    self.assertEqual(reply.usage.completion_tokens, 5, hours)
                    self.assertTrue(complete(server.url))
                    self.assertEqual(health.Check(health_pb2.HealthCheckRequest()).status,
                                     health_pb2.HealthCheckResponse.SERVING)
                    # A real deadline still holds.
                    begin = time.monotonic()
                    with self.assertRaises(grpc.RpcError):
                        stub.Generate(service.GenerateRequest(
                            spec=token_spec([5] * 4, max_new_tokens=100000, ignore_eos=True)), timeout=0.3)
                    self.assertLess(time.monotonic() - begin, 5)
            self.assertEqual(server.stop(), 0)
            server.log.seek(0)
            years = set(re.findall(r"^(\d{4})-", server.log.read().decode(), re.M))
            self.assertGreater(len(years), 1, "the clock did not jump")

    @staticmethod
    def crowd(address, count=80):
        host, port = address.split(":")
        sockets = []
        for _ in range(count):
            sock = socket.socket()
            sock.settimeout(0.2)
            try:
                sock.connect((host, int(port)))
            except OSError:
                pass
            sockets.append(sock)
        return sockets

    def wait_for(self, attempt, error, seconds=30):
        """Until it succeeds without the error."""
        until = time.monotonic() + seconds
        while True:
            try:
                self.assertTrue(attempt())
                return
            except error:
                self.assertLess(time.monotonic(), until)
                time.sleep(0.1)

    def test_too_few_file_descriptors(self):
        server = self.start(limits={resource.RLIMIT_NOFILE: (72, 72)})
        expected = complete(server.url)
        with grpc.insecure_channel(server.grpc) as channel:
            stub = service_grpc.GenerationServiceStub(channel)
            stream = stub.StreamGenerate(service.StreamGenerateRequest(
                spec=token_spec([5] * 4, max_new_tokens=3000, ignore_eos=True)))
            next(stream)
            crowd = self.crowd(server.grpc)
            # The other front end has places of its own.
            self.assertEqual(complete(server.url), expected)
            crowd += self.crowd(server.http)
            # What runs goes on, and its connection takes new calls.
            reply = stub.Generate(service.GenerateRequest(
                spec=token_spec([5] * 4, max_new_tokens=5, ignore_eos=True)), timeout=30)
            self.assertEqual(reply.usage.completion_tokens, 5)
            for sock in crowd:
                sock.close()
            self.assertEqual(list(stream)[-1].usage.completion_tokens, 3000)
        # New connections of both are served again.
        self.wait_for(lambda: complete(server.url) == expected, OSError)
        with grpc.insecure_channel(server.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = service_grpc.GenerationServiceStub(channel)
            self.wait_for(lambda: stub.Generate(service.GenerateRequest(
                spec=token_spec([5] * 4, max_new_tokens=5, ignore_eos=True)), timeout=30), grpc.RpcError)
        self.assertEqual(server.stop(), 0)

    def test_too_little_memory_for_a_pool(self):
        # The address space ends in the middle of the pools, whatever the plan says.
        for limit_mib in (700, 1000, 1400):
            process = subprocess.run(
                [BINARY, "serve", MODEL, "--device", "cpu", "--port", "off", "--grpc-port", "0", "--threads", "1",
                 "--cpu-memory-gib", "6", "--latent-pages", "60000"], capture_output=True, text=True, timeout=60,
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_mib << 20, limit_mib << 20)))
            self.assertIn(process.returncode, (3, 70), process.stderr[-500:])
            self.assertRegex(process.stderr.lower(), "memory|bytes|fit")
            self.assertNotIn("terminate called", process.stderr)

    def test_a_damaged_byte_in_the_checkpoint(self):
        rng = random.Random(5)
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(MODEL, folder, dirs_exist_ok=True)
            path = os.path.join(folder, "model.safetensors")
            with open(path, "rb") as file:
                head = struct.unpack("<Q", file.read(8))[0]
                header = json.loads(file.read(head))
            # Its length, its brackets, names, offsets: the start ends with exit code 4 and a reason, or the byte did
            # not matter (a space, a name in the metadata).
            refused = 0
            for at in [0, 1, 3, 7, 8, 9, 8 + head - 1] + [8 + rng.randrange(head) for _ in range(12)]:
                with open(path, "r+b") as file:
                    file.seek(at)
                    old = file.read(1)
                    file.seek(at)
                    file.write(bytes([old[0] ^ (1 << rng.randrange(8))]))
                result = subprocess.run([BINARY, "verify", folder, "--golden", "/nowhere"], capture_output=True, text=True,
                                        timeout=60)
                served = self.outcome(folder)
                self.assertIn(served, (0, 4), f"byte {at}")
                self.assertGreaterEqual(result.returncode, 0, f"byte {at}: a signal ended verify")
                refused += served == 4
                with open(path, "r+b") as file:
                    file.seek(at)
                    file.write(old)
            self.assertGreater(refused, 12)
            self.assertEqual(self.outcome(folder), 0)
            # A weight that is no number: the first request of the start's own finds it.
            name = next(n for n in header if n.endswith("norm.weight") and "layers" not in n)
            with open(path, "r+b") as file:
                file.seek(8 + head + header[name]["data_offsets"][0])
                file.write(b"\xff\xff\xff\xff")
            self.assertEqual(self.outcome(folder), 4, name)

    def outcome(self, folder):
        """0 when the server gets ready, else its exit code."""
        process = subprocess.Popen([BINARY, "serve", folder, "--device", "cpu", "--port", "off", "--grpc-port", "0"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        ready = process.stdout.readline()
        if ready:
            process.send_signal(signal.SIGTERM)
        reader = threading.Thread(target=process.stderr.read)
        reader.start()
        code = process.wait(timeout=60)
        reader.join()
        process.stdout.close()
        process.stderr.close()
        return code


def configure(binary, model_dir):
    global BINARY, MODEL
    BINARY, MODEL = binary, model_dir


if __name__ == "__main__":
    main(configure)
