"""TLS and client certificates on both front ends, and what SIGHUP reads again. Needs grpcio and the openssl program."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import unittest

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from certificates import Authority, read
from grpc_stubs import service, service_grpc, token_spec
from running_server import ROOT, RunningServer, main


class TlsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.authority = Authority(cls.temporary.name, "authority")
        cls.stranger = Authority(cls.temporary.name, "stranger")
        cls.server_files = cls.authority.sign("server")
        cls.client_files = cls.authority.sign("client")
        cls.stranger_files = cls.stranger.sign("client")

    def start(self, *flags, files=None):
        cert, key = files or self.server_files
        server = RunningServer(BINARY, MODEL, "--tls-cert", cert, "--tls-key", key, *flags)
        self.addCleanup(lambda: server.process.poll() is None and server.process.kill())
        return server

    def context(self, client=None, authority=None):
        context = ssl.create_default_context(cafile=(authority or self.authority).cert)
        if client:
            context.load_cert_chain(*client)
        return context

    def connection(self, server, client=None, authority=None):
        connection = http.client.HTTPSConnection(server.http, timeout=120, context=self.context(client, authority))
        self.addCleanup(connection.close)
        return connection

    def complete(self, connection, tokens=20, stream=False, headers=None, prompt="grep is"):
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json",
                                                                         **(headers or {})})
        reply = connection.getresponse()
        return reply.status, reply.read().decode()

    def channel(self, server, client=None, authority=None):
        key, cert = (read(client[1]), read(client[0])) if client else (None, None)
        credentials = grpc.ssl_channel_credentials(read((authority or self.authority).cert), key, cert)
        channel = grpc.secure_channel(server.grpc, credentials, [("grpc.use_local_subchannel_pool", 1)])
        self.addCleanup(channel.close)
        return channel

    def generate(self, channel, tokens=5, metadata=()):
        request = service.GenerateRequest(spec=token_spec([100] * 5, max_new_tokens=tokens, ignore_eos=True))
        return service_grpc.GenerationServiceStub(channel).Generate(request, timeout=120, metadata=metadata)

    def test_both_front_ends(self):
        server = self.start()
        connection = self.connection(server)
        first = self.complete(connection)
        self.assertEqual(first[0], 200)
        self.assertEqual(json.loads(first[1])["usage"]["completion_tokens"], 20)
        status, text = self.complete(connection, stream=True)  # the same connection
        self.assertEqual(status, 200)
        self.assertTrue(text.endswith("data: [DONE]\n\n"))
        # Larger than a record in both directions.
        connection.request("POST", "/tokenize", json.dumps({"prompt": "word " * 60000}),
                           {"content-type": "application/json"})
        self.assertGreaterEqual(len(json.loads(connection.getresponse().read())["token_ids"]), 60000)
        connection.request("GET", "/metrics")
        self.assertGreater(len(connection.getresponse().read()), 16384)
        self.assertEqual(self.generate(self.channel(server)).usage.completion_tokens, 5)
        # What does not speak TLS is closed, whatever it says.
        host, port = server.http.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as plain:
            plain.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            try:
                self.assertNotIn(b"HTTP/1.1 200", plain.recv(1000))
            except ConnectionError:
                pass
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("DEFAULT@SECLEVEL=0")
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            with self.assertRaises((ssl.SSLError, ConnectionError)):
                old.wrap_socket(raw)
        self.assertEqual(server.stop(), 0)

    def test_an_unfinished_handshake_holds_nothing(self):
        server = self.start()
        host, port = server.http.split(":")
        grpc_host, grpc_port = server.grpc.split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(20)]
        idle += [socket.create_connection((grpc_host, int(grpc_port))) for _ in range(20)]
        for sock in idle[10:30]:
            sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00")  # the start of a client hello
        self.assertEqual(self.complete(self.connection(server))[0], 200)
        self.assertEqual(self.generate(self.channel(server)).usage.completion_tokens, 5)
        begin = time.monotonic()
        for sock in idle:  # closed by the server within ten seconds
            sock.settimeout(20)
            try:
                self.assertEqual(sock.recv(100)[:1] in (b"", b"\x15"), True)
            except ConnectionError:
                pass
            sock.close()
        self.assertLess(time.monotonic() - begin, 15)
        begin = time.monotonic()
        self.assertEqual(server.stop(), 0)
        self.assertLess(time.monotonic() - begin, 2)

    def test_client_certificates(self):
        server = self.start("--tls-client-ca", self.authority.cert)
        self.assertEqual(self.complete(self.connection(server, self.client_files))[0], 200)
        self.assertEqual(self.generate(self.channel(server, self.client_files)).usage.completion_tokens, 5)
        for client in (None, self.stranger_files):
            with self.assertRaises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                self.complete(self.connection(server, client))
            with self.assertRaises(grpc.RpcError) as caught:
                self.generate(self.channel(server, client))
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)
        # A session that was begun with a certificate may be resumed.
        host, port = server.http.split(":")
        context, session = self.context(self.client_files), None
        for _ in range(2):
            with socket.create_connection((host, int(port)), timeout=5) as raw:
                with context.wrap_socket(raw, server_hostname="localhost", session=session) as secure:
                    secure.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    self.assertTrue(secure.recv(1000).startswith(b"HTTP/1.1 200"))
                    session = secure.session
        self.assertEqual(server.stop(), 0)

    def test_commands_speak_tls(self):
        server = self.start("--tls-client-ca", self.authority.cert, "--host", "0.0.0.0")
        http_port, grpc_port = (address.split(":")[1] for address in (server.http, server.grpc))
        cert = ["--tls-ca", self.authority.cert, "--tls-cert", self.client_files[0], "--tls-key", self.client_files[1]]

        def run(*words):
            result = subprocess.run([BINARY, *words], capture_output=True, text=True, timeout=120)
            return result.returncode, result.stdout + result.stderr

        def bench(*words):
            return run("bench", *words, "--num-requests", "6", "--concurrency", "2", "--input-len", "8", "--output-len",
                       "4", "--no-progress", "--timeout", "30")

        for host in ("127.0.0.1", "localhost"):
            url, target = f"https://{host}:{http_port}", f"{host}:{grpc_port}"
            for where in (["--url", url], ["--target", target]):
                code, text = bench(*where, *cert)
                self.assertEqual(code, 0, text)
            code, text = run("generate", "What is grep?", "--max-tokens", "4", "--target", target, *cert)
            self.assertEqual(code, 0, text)
        code, text = run("verify", "--server", url, "--target", target, *cert)
        self.assertEqual(code, 0, text)
        # No certificate, a stranger's, an authority that did not sign the server's, another host's name, no TLS.
        only_ca, stranger = cert[:2], ["--tls-ca", self.stranger.cert, *cert[2:]]
        other = ["--tls-ca", self.authority.cert, "--tls-cert", self.stranger_files[0], "--tls-key", self.stranger_files[1]]
        for flags, address in ((only_ca, "127.0.0.1"), (other, "127.0.0.1"), (stranger, "127.0.0.1"), (cert, "127.0.0.2"),
                               (["--tls"], "127.0.0.1")):
            for words in (("bench", "--url", f"https://{address}:{http_port}"),
                          ("verify", "--server", f"https://{address}:{http_port}"),
                          ("generate", "x", "--timeout", "20", "--target", f"{address}:{grpc_port}")):
                code, text = run(*words, *flags)
                self.assertIn(code, (1, 2), (words, flags, text))
                self.assertNotIn("completed", text)
                if words[0] != "generate" and "https" in words[2] and flags in (stranger, ["--tls"]):
                    self.assertIn("certificate verify failed", text)
        self.assertNotEqual(bench("--url", f"http://127.0.0.1:{http_port}")[0], 0)
        self.assertNotEqual(bench("--target", f"127.0.0.1:{grpc_port}", *stranger)[0], 0)
        # What would send a key in the clear, or is only half given, is refused with its name.
        for words, why in ((("--url", f"http://127.0.0.1:{http_port}", *only_ca), "https"),
                           (("--target", server.grpc, "--tls-cert", self.client_files[0]), "--tls-key"),
                           (("--target", server.grpc, *cert[:4], "--tls-key", self.stranger_files[1]), "mismatch"),
                           (("--target", server.grpc, "--tls-ca", "/nowhere"), "/nowhere"),
                           (("--target", server.grpc, "--tls-ca", self.client_files[1]), "--tls-ca"),
                           (("--target", server.grpc, "--insecure"), "unknown flag")):
            code, text = bench(*words)
            self.assertEqual(code, 2, text)
            self.assertIn(why, text)
        self.assertEqual(server.stop(), 0)

    def test_probes_need_no_certificate_on_their_own_port(self):
        server = self.start("--tls-client-ca", self.authority.cert, "--probe-port", "0")
        port = re.search(r"probes are answered on http 127.0.0.1:(\d+)", self.log(server)).group(1)
        for method, path, status in (("GET", "/health/ready", 200), ("GET", "/health/live", 200), ("GET", "/metrics", 200),
                                     ("GET", "/version", 200), ("GET", "/v1/models", 404),
                                     ("POST", "/v1/completions", 404), ("POST", "/health/ready", 405)):
            probe = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
            probe.request(method, path)
            self.assertEqual(probe.getresponse().status, status, path)
            probe.close()
        script = os.path.join(ROOT, "docker", "healthcheck.sh")
        for variables, code in (({"K3SERVE_PROBE_PORT": port}, 0), ({"K3SERVE_PORT": server.http.split(":")[1]}, 1)):
            self.assertEqual(subprocess.run(["bash", script], env={**os.environ, **variables},
                                            capture_output=True).returncode, code)
        self.assertEqual(server.stop(), 0)

    def test_drain_waits_for_streams_over_tls(self):
        server = self.start("--shutdown-timeout", "100")
        results = []

        def read_http():
            results.append(self.complete(self.connection(server), tokens=700, stream=True)[1][-14:])

        def read_grpc():
            results.append(self.generate(self.channel(server), tokens=700).usage.completion_tokens)

        threads = [threading.Thread(target=target) for target in (read_http, read_grpc)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        connection = self.connection(server)
        connection.request("GET", "/health/ready")
        self.assertEqual(connection.getresponse().status, 503)
        for thread in threads:
            thread.join()
        self.assertCountEqual(results, ["data: [DONE]\n\n", 700])
        self.assertEqual(server.process.wait(timeout=120), 0)

    def serial(self, address):
        host, port = address.split(":")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection((host, int(port)), timeout=5) as raw, context.wrap_socket(raw) as secure:
            return secure.getpeercert(binary_form=True)

    def wait_for(self, condition):
        until = time.monotonic() + 5
        while not condition():
            self.assertLess(time.monotonic(), until)
            time.sleep(0.02)

    def log(self, server):
        server.log.seek(0)
        return server.log.read().decode()

    def test_sighup_reads_certificates_and_keys_again(self):
        folder = tempfile.mkdtemp(dir=self.temporary.name)
        cert, key, keys = (os.path.join(folder, name) for name in ("cert.pem", "key.pem", "keys"))

        def write(files, text):
            shutil.copy(files[0], cert)
            shutil.copy(files[1], key)
            with open(keys, "w") as file:
                file.write(text)

        write(self.server_files, "first-secret\n")
        server = self.start("--api-key-file", keys, files=(cert, key))
        old = self.serial(server.http)
        self.assertEqual(self.serial(server.grpc), old)
        kept = self.connection(server)  # stays open over the reload
        first = {"authorization": "Bearer first-secret"}
        second = {"authorization": "Bearer second-secret"}
        self.assertEqual(self.complete(kept, headers=first)[0], 200)
        self.assertEqual(self.complete(kept, headers=second)[0], 401)

        write(self.authority.sign("renewed"), "second-secret\n")
        server.process.send_signal(signal.SIGHUP)
        self.wait_for(lambda: self.serial(server.http) != old)
        self.assertEqual(self.serial(server.grpc), self.serial(server.http))
        for connection in (kept, self.connection(server)):
            self.assertEqual(self.complete(connection, headers=first)[0], 401)
            self.assertEqual(self.complete(connection, headers=second)[0], 200)
        channel = self.channel(server)
        with self.assertRaises(grpc.RpcError) as caught:
            self.generate(channel, metadata=list(first.items()))
        self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAUTHENTICATED)
        self.generate(channel, metadata=list(second.items()))

        # A bad file keeps the old and says why: a key of another certificate, an empty key file, garbage.
        renewed = self.serial(server.http)
        for files, text, why in (((self.server_files[0], self.client_files[1]), "second-secret\n", "does not belong"),
                                 ((self.server_files[0], keys), "# none\n", "holds no key"),
                                 ((keys, keys), "second-secret\n", "holds no certificate")):
            write(files, text)
            server.process.send_signal(signal.SIGHUP)
            self.wait_for(lambda: why in self.log(server))
            self.assertEqual(self.serial(server.http), renewed)
            self.assertEqual(self.serial(server.grpc), renewed)
            self.assertEqual(self.complete(self.connection(server), headers=second)[0], 200)
        channel = self.channel(server)
        self.assertEqual(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5).status,
                         health_pb2.HealthCheckResponse.SERVING)
        self.assertEqual(server.stop(), 0)
        self.assertNotIn("secret", self.log(server))

    def test_bad_files_end_the_start(self):
        for flags, why in ((("--tls-cert", self.server_files[0], "--tls-key", self.client_files[1]), "does not belong"),
                           (("--tls-cert", "/nowhere", "--tls-key", self.client_files[1]), "/nowhere"),
                           (("--tls-cert", self.authority.sign("old", days=0)[0], "--tls-key",
                             os.path.join(self.authority.folder, "old.key")), "expired"),
                           (("--tls-cert", self.server_files[0], "--tls-key", self.server_files[1], "--tls-client-ca",
                             self.server_files[1]), "holds no certificate")):
            with self.assertRaises(RuntimeError) as caught:
                RunningServer(BINARY, MODEL, *flags)
            self.assertIn(why, str(caught.exception))


def configure(binary, model_dir):
    global BINARY, MODEL
    BINARY, MODEL = binary, model_dir


if __name__ == "__main__":
    main(configure)
