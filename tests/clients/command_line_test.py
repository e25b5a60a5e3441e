"""The k3serve program as a shell sees it: exit codes, messages, help, generate, logs, signals. Standard library only."""

import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

from running_server import RunningServer, main


def run(*args, env=None, timeout=60):
    return subprocess.run([BINARY, *args], capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, **(env or {})})


class ExitCodesTest(unittest.TestCase):
    def test_usage(self):
        for args in ([], ["serv"], ["serve"], ["serve", MODEL, "--prot", "1"], ["serve", MODEL, "--device", "tpu"],
                     ["serve", MODEL, "--port", "off", "--grpc-port", "off"], ["generate", "--temperature", "x", "hi"],
                     ["plan"], ["verify", MODEL], ["version", "--all"]):
            self.assertEqual(run(*args).returncode, 2, args)
        self.assertIn("did you mean --port?", run("serve", MODEL, "--prot", "1").stderr)

    def test_expert_activations(self):
        data = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data")
        for args in (["serve"], ["verify", "--golden", os.path.join(data, "tiny-kimi-linear.safetensors")]):
            result = run(*args, os.path.join(data, "tiny-kimi-linear"), "--device", "cpu", "--expert-activations", "mxfp8")
            self.assertEqual(result.returncode, 2, result)
            self.assertIn("--expert-activations mxfp8 is for experts with MXFP4 weights", result.stderr)
        # Another arithmetic than the golden's: near it, and further away than rounding of fp32.
        result = run("verify", MODEL, "--golden", os.path.join(data, "tiny-k3.safetensors"), "--device", "cpu",
                     "--expert-activations", "mxfp8")
        error = json.loads(result.stdout.splitlines()[-1])["max_rel_error"]
        self.assertTrue(0.01 < error < 0.1, error)

    def test_keys_that_no_header_can_carry(self):
        for key in ("schl\u00fcssel", "two words", "\u00fc", " "):
            with tempfile.NamedTemporaryFile("w", encoding="utf-8") as keys:
                keys.write(key + "\n")
                keys.flush()
                for args in (["generate", "--target", "127.0.0.1:1", "hi"], ["verify", "--target", "127.0.0.1:1"],
                             ["bench", "--target", "127.0.0.1:1"], ["bench", "--url", "http://127.0.0.1:1"]):
                    result = run(*args, "--api-key-file", keys.name)
                    self.assertEqual(result.returncode, 2, (args, result))
                    self.assertIn("is no key: expected printable ASCII", result.stderr)
                    self.assertNotIn(key.strip() or "no such text", result.stderr)

    def test_unknown_variables_are_named(self):
        result = run("serve", "/nowhere", "--port", "off", "--grpc-port", "0",
                     env={"K3SERVE_PROT": "8", "K3SERVE_SERVICE_HOST": "10.0.0.1", "K3SERVE_LOG_LEVEL": "info"})
        self.assertIn("unknown environment variable K3SERVE_PROT has no effect; did you mean K3SERVE_PORT?", result.stderr)
        self.assertEqual(result.stderr.count("unknown environment variable"), 1, result.stderr)

    def test_help_and_version(self):
        for args in (["--help"], ["serve", "--help"], ["generate", "--help"], ["plan", "--help"], ["version"]):
            result = run(*args)
            self.assertEqual(result.returncode, 0, args)
            self.assertTrue(result.stdout)

    def test_print_config(self):
        result = run("serve", MODEL, "--grpc-port", "7", "--print-config", env={"K3SERVE_PORT": "8"})
        self.assertEqual(result.returncode, 0)
        self.assertIn("grpc-port = 7  # command line", result.stdout)
        self.assertIn("port = 8  # environment K3SERVE_PORT", result.stdout)

    def test_bad_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(run("serve", folder, "--port", "off", "--grpc-port", "0").returncode, 4)
            shutil.copytree(MODEL, folder, dirs_exist_ok=True)
            with open(os.path.join(folder, "model.safetensors"), "r+b") as file:
                file.truncate(1 << 20)
            result = run("serve", folder, "--port", "off", "--grpc-port", "0")
            self.assertEqual(result.returncode, 4)
            self.assertIn("model.safetensors", result.stderr)

    def test_results_alone_are_on_standard_output(self):
        # As in the full K3: vision tensors, which are skipped with a line in the log.
        data = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data")
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(os.path.join(data, "tiny-kimi-linear", "config.json"), folder)
            with open(os.path.join(data, "tiny-kimi-linear", "model.safetensors"), "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
                tensors = file.read()
            header["vision_tower.norm.weight"] = {"dtype": "U8", "shape": [1],
                                                  "data_offsets": [len(tensors), len(tensors) + 1]}
            text = json.dumps(header).encode()
            with open(os.path.join(folder, "model.safetensors"), "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text + tensors + b"\0")
            for args in (["plan", "--json"], ["verify", "--device", "cpu", "--golden",
                                              os.path.join(data, "tiny-kimi-linear.safetensors")]):
                result = run(*args, folder)
                self.assertEqual(result.returncode, 0, result)
                for line in result.stdout.splitlines():
                    json.loads(line)
                self.assertIn("skipping 1 vision tensors", result.stderr)

    def test_folders_in_the_place_of_files(self):
        """What a container's mount of a missing file leaves."""
        serve = ("serve", MODEL, "--device", "cpu", "--port", "off", "--grpc-port", "0")
        with tempfile.TemporaryDirectory() as folder:
            for flags in (["--config"], ["--api-key-file"], ["--tls-key", MODEL + "/config.json", "--tls-cert"]):
                result = run(*serve, *flags, folder)
                self.assertEqual(result.returncode, 2, flags)
                self.assertIn(folder + ": expected a file, found a directory", result.stderr)
            for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model",
                         "model.safetensors"):
                with tempfile.TemporaryDirectory() as model:
                    for other in os.listdir(MODEL):
                        if other != name:
                            os.symlink(os.path.join(MODEL, other), os.path.join(model, other))
                    os.mkdir(os.path.join(model, name))
                    result = run("serve", model, *serve[2:])
                    self.assertEqual(result.returncode, 4, result.stderr)
                    self.assertIn(name + ": expected a file, found", result.stderr)

    def test_a_pipe_in_the_place_of_a_file(self):
        for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model"):
            with tempfile.TemporaryDirectory() as model:
                for other in os.listdir(MODEL):
                    if other != name:
                        os.symlink(os.path.join(MODEL, other), os.path.join(model, other))
                os.mkfifo(os.path.join(model, name))
                result = run("serve", model, "--device", "cpu", "--port", "off", "--grpc-port", "0")
                self.assertEqual(result.returncode, 4, result.stderr)
                self.assertIn(name, result.stderr)

    def test_ipv6_hosts(self):
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError:
            self.skipTest("this machine has no IPv6")
        for host in ("::1", "[::1]"):
            server = RunningServer(BINARY, MODEL, "--host", host)
            self.assertRegex(server.http, r"^\[::1\]:\d+$")
            self.assertRegex(server.grpc, r"^\[::1\]:\d+$")
            self.assertEqual(run("generate", "What does grep do?", "--target", server.grpc).returncode, 0)
            verified = run("verify", "--server", server.url)
            self.assertNotIn("connect to", verified.stdout + verified.stderr)
            self.assertEqual(server.stop(), 0)

    def test_does_not_fit(self):
        result = run("serve", MODEL, "--device", "cpu", "--port", "off", "--grpc-port", "0", "--latent-pages",
                     "4000000000")
        self.assertEqual(result.returncode, 3, result.stderr)

    def test_cannot_bind(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            for flags in (["--port", "off", "--grpc-port", port], ["--port", port, "--grpc-port", "0"]):
                result = run("serve", MODEL, "--device", "cpu", *flags)
                self.assertEqual(result.returncode, 5, result.stderr)
                self.assertIn(port, result.stderr)

    def test_generate_without_a_server(self):
        result = run("generate", "--target", "127.0.0.1:1", "hi")
        self.assertEqual(result.returncode, 1)
        self.assertIn("UNAVAILABLE", result.stderr)


class StartAndStopTest(unittest.TestCase):
    def start(self, *flags):
        server = RunningServer(BINARY, MODEL, *flags)
        self.addCleanup(lambda: server.process.poll() is None and server.process.kill())
        return server

    def test_generate(self):
        server = self.start()
        result = run("generate", "What does grep do?", "--target", server.grpc, "--temperature", "0", "--stats",
                     "--show-reasoning")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("grep", result.stdout)
        self.assertIn("tokens/s", result.stderr)
        raw = run("generate", "grep is", "--raw", "--max-tokens", "5", "--target", server.grpc)
        self.assertEqual(raw.returncode, 0, raw.stderr)
        self.assertTrue(raw.stdout.strip())
        refused = run("generate", "x", "--top-p", "0", "--target", server.grpc)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("spec.sampling.top_p" if "spec" in refused.stderr else "sampling.top_p", refused.stderr)
        self.assertEqual(server.stop(), 0)

    def test_verify_replays_the_contract(self):
        server = self.start()
        result = run("verify", "--server", server.url, "--target", server.grpc)
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertEqual(lines[-1], {"passed": True, "checks": len(lines) - 1, "failed": 0})
        self.assertGreater(len(lines), 25)
        self.assertEqual(server.stop(), 0)
        # Nobody there, and somebody who says the same to everything.
        gone = run("verify", "--server", server.url, "--target", server.grpc)
        self.assertEqual(gone.returncode, 1)
        self.assertEqual(json.loads(gone.stdout.splitlines()[-1])["failed"], len(lines) - 1)

        class Nonsense(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.send_response(200)
                self.send_header("content-length", "30")
                self.end_headers()
                self.wfile.write(b'{"object": "list", "data": []}')

            do_POST = do_GET

            def log_message(self, *_):
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nonsense) as nonsense:
            threading.Thread(target=nonsense.serve_forever, daemon=True).start()
            result = run("verify", "--server", "http://127.0.0.1:%d" % nonsense.server_port)
            nonsense.shutdown()
        self.assertEqual(result.returncode, 1)
        report = {line.get("check"): line for line in map(json.loads, result.stdout.splitlines())}
        self.assertTrue(report["http.health"]["passed"])
        for name in ("http.models", "http.unknown", "http.chat", "http.chat.stream", "http.chat.refusals"):
            self.assertFalse(report[name]["passed"], name)
            self.assertTrue(report[name]["detail"])
        for args in (["verify", "--server", "ftp://x"], ["verify", MODEL, "--server", server.url]):
            self.assertEqual(run(*args).returncode, 2, args)

    def test_bench_without_a_server(self):
        result = run("bench", "--url", "http://127.0.0.1:1")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("127.0.0.1:1", result.stderr)

    def test_bench_shows_its_key(self):
        with tempfile.NamedTemporaryFile("w") as keys:
            keys.write("sesame\n")
            keys.flush()
            server = self.start("--api-key-file", keys.name)
            for address in (["--target", server.grpc], ["--url", server.url]):
                common = ["bench", *address, "--num-requests", "4", "--input-len", "8", "--output-len", "4",
                          "--no-progress"]
                self.assertNotEqual(run(*common).returncode, 0)
                result = run(*common, "--api-key-file", keys.name)
                self.assertEqual(result.returncode, 0, result.stderr)
                # Found out before the run, not behind it.
                result = run(*common, "--api-key-file", keys.name, "--json", "/nowhere/figures.json")
                self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
                self.assertIn("cannot write /nowhere/figures.json", result.stderr)
            checked = run("verify", "--server", server.url, "--target", server.grpc, "--api-key-file", keys.name)
            self.assertEqual(checked.returncode, 0, checked.stdout)
            self.assertIn("http.keys", checked.stdout)
            self.assertEqual(server.stop(), 0)

    # B47, one process: what a killed server leaves behind.
    def test_kill_and_restart_on_the_same_ports(self):
        def shared_memory(server):
            """Files in shared memory that the process has mapped or open."""
            pid = server.process.pid
            with open(f"/proc/{pid}/maps") as maps:
                names = set(re.findall(r"/dev/shm/\S+", maps.read()))
            for fd in os.listdir(f"/proc/{pid}/fd"):
                try:
                    path = os.readlink(f"/proc/{pid}/fd/{fd}")
                except FileNotFoundError:  # closed by now
                    continue
                if path.startswith("/dev/shm/"):
                    names.add(path)
            return names

        server = self.start()
        flags = ["--port", server.http.split(":")[1], "--grpc-port", server.grpc.split(":")[1]]
        used = set()
        for _ in range(20):
            used |= shared_memory(server)
            process = subprocess.Popen([BINARY, "generate", "hi", "--target", server.grpc, "--max-tokens", "5000",
                                        "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            process.stdout.read(1)  # it streams
            server.process.kill()
            server.process.wait()
            server.process.stdout.close()
            self.assertNotEqual(process.wait(timeout=20), 0)
            process.stdout.close()
            server = RunningServer(BINARY, MODEL, *flags)
            self.addCleanup(lambda left=server: left.process.poll() is None and left.process.kill())
            self.assertEqual(run("generate", "hi", "--target", server.grpc, "--max-tokens", "3").returncode, 0)
        self.assertEqual([path for path in used if os.path.exists(path)], [])
        self.assertEqual(server.stop(), 0)

    def test_json_log(self):
        server = self.start("--log-format", "json")
        self.assertEqual(server.stop(), 0)
        server.log.seek(0)
        lines = server.log.read().decode().splitlines()
        self.assertGreater(len(lines), 1)
        for line in lines:
            self.assertLessEqual({"time", "level", "message"}, json.loads(line).keys())

    def test_a_signal_while_loading(self):
        for delay in (0.0, 0.02, 0.05, 0.1):
            process = subprocess.Popen([BINARY, "serve", MODEL, "--device", "cpu", "--port", "0", "--grpc-port", "0"],
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(delay)
            process.send_signal(signal.SIGTERM)
            # Before main has blocked the signal, the system's own action holds.
            self.assertIn(process.wait(timeout=2), (0, -signal.SIGTERM))


def configure(binary, model_dir):
    global BINARY, MODEL
    BINARY, MODEL = binary, model_dir


if __name__ == "__main__":
    main(configure)
