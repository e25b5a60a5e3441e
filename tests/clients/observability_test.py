"""What operators see: metrics that agree with what clients counted, traces, logs without prompts or keys, health that
answers while all workers are busy. Needs grpcio."""

import http.client
import http.server
import json
import os
import re
import tempfile
import threading
import time
import unittest
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from grpc_stubs import admin, admin_grpc, service, service_grpc, token_spec
from running_server import RunningServer, main

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "00-%s-b7ad6b7169203331-01" % TRACE
NAMES = """requests_running requests_waiting latent_pages_used latent_pages_total state_slots_used state_slots_total
snapshots_used snapshots_total prefix_cache_query_tokens_total prefix_cache_page_hit_tokens_total
prefix_cache_hit_tokens_total prompt_tokens_total generation_tokens_total requests_finished_total preemptions_total
nonfinite_rows_total rejected_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
e2e_request_latency_seconds_bucket queue_time_seconds_bucket prefill_time_seconds_bucket decode_time_seconds_bucket
request_prompt_tokens_bucket request_generation_tokens_bucket step_duration_seconds_bucket
step_batch_tokens_bucket""".split()
VLLM_NAMES = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
prefix_cache_hits_total prompt_tokens_total generation_tokens_total request_success_total num_preemptions_total
cache_config_info time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket request_prefill_time_seconds_bucket
request_decode_time_seconds_bucket request_prompt_tokens_bucket request_generation_tokens_bucket""".split()


class Metrics:
    """One scrape, as {name: [(labels, value)]}."""

    def __init__(self, url):
        self.samples = {}
        with urllib.request.urlopen(url + "/metrics", timeout=10) as reply:
            for line in reply.read().decode().splitlines():
                match = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?", line)
                if not line.startswith("#"):
                    name, labels, value = match.groups()
                    labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or ""))
                    self.samples.setdefault(name, []).append((labels, float(value)))

    def value(self, name, **labels):
        return sum(v for l, v in self.samples["k3serve_" + name] if labels.items() <= l.items())


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans as an OpenTelemetry collector does."""

    def __init__(self):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in json.loads(body)["resourceSpans"]:
                    for scope in resource["scopeSpans"]:
                        self.server.spans.extend(scope["spans"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.spans = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class ObservabilityTest(unittest.TestCase):
    def start(self, *flags):
        server = RunningServer(BINARY, MODEL, *flags)
        self.addCleanup(lambda: server.process.poll() is None and server.process.kill())
        return server

    def log(self, server):
        server.log.seek(0)
        return server.log.read().decode()

    def post(self, server, path, body, headers=None):
        connection = http.client.HTTPConnection(server.http, timeout=60)
        self.addCleanup(connection.close)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **(headers or {})})
        return connection, connection.getresponse()

    def completion(self, tokens, stream=False, prompt="grep is"):
        return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": stream,
                "stream_options": {"include_usage": True} if stream else None}

    def test_counters_are_what_clients_counted(self):
        server = self.start("--metrics-compat", "vllm", "--max-num-seqs", "8")
        before = Metrics(server.url)
        lock = threading.Lock()
        seen = {"finished": 0, "cancelled": 0, "refused": 0, "prompt": 0, "tokens": 0, "first": 0}

        def count(**more):
            with lock:
                for name, value in more.items():
                    seen[name] += value

        def http_client(worker):
            for i in range(6):
                connection, reply = self.post(server, "/v1/completions", self.completion(10 + worker + i, stream=i % 2 == 1))
                text = reply.read().decode()
                usage = json.loads(text if i % 2 == 0 else text.split("data: ")[-2])["usage"]
                count(finished=1, prompt=usage["prompt_tokens"], tokens=usage["completion_tokens"], first=1)
            self.assertEqual(self.post(server, "/v1/completions", {"prompt": "x", "max_tokens": -1})[1].status, 400)
            count(refused=1)

        def grpc_client(worker):
            with grpc.insecure_channel(server.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                stub = service_grpc.GenerationServiceStub(channel)
                for i in range(6):
                    spec = token_spec([100 + worker] * (5 + i), max_new_tokens=12 + i, ignore_eos=True)
                    usage = list(stub.StreamGenerate(service.StreamGenerateRequest(spec=spec)))[-1].usage
                    count(finished=1, prompt=usage.prompt_tokens, tokens=usage.completion_tokens, first=1)
                spec = token_spec([100 + worker] * 7, max_new_tokens=100000, ignore_eos=True)
                call = stub.StreamGenerate(service.StreamGenerateRequest(spec=spec))
                for _ in range(3):
                    next(call)
                call.cancel()
                count(cancelled=1, prompt=7)

        threads = [threading.Thread(target=client, args=(i,)) for client in (http_client, grpc_client) for i in range(6)]
        for thread in threads:
            thread.start()
        scrapes = []
        while any(thread.is_alive() for thread in threads):
            scrapes.append(Metrics(server.url))
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        time.sleep(0.5)
        after = Metrics(server.url)

        def rise(name, **labels):
            return after.value(name, **labels) - before.value(name, **labels)

        self.assertEqual(seen["finished"], 72)
        self.assertEqual(rise("requests_accepted_total"), seen["finished"] + seen["cancelled"])
        self.assertEqual(rise("requests_finished_total", reason="length"), seen["finished"])
        self.assertEqual(rise("requests_finished_total", reason="abort"), seen["cancelled"])
        self.assertEqual(rise("requests_finished_total"), seen["finished"] + seen["cancelled"])
        self.assertEqual(rise("rejected_total", reason="invalid_argument"), seen["refused"])
        self.assertEqual(rise("prompt_tokens_total"), seen["prompt"])
        self.assertEqual(rise("request_prompt_tokens_sum"), seen["prompt"])
        # Tokens of cancelled requests count too; their clients did not see all of them.
        self.assertGreaterEqual(rise("generation_tokens_total"), seen["tokens"])
        self.assertEqual(rise("generation_tokens_total"), rise("request_generation_tokens_sum"))
        self.assertEqual(rise("e2e_request_latency_seconds_count"), seen["finished"] + seen["cancelled"])
        self.assertGreaterEqual(rise("time_to_first_token_seconds_count"), seen["first"])
        for gauge in ("requests_running", "requests_waiting", "latent_pages_used", "state_slots_used"):
            self.assertEqual(after.value(gauge), 0, gauge)
        self.assertTrue(any(scrape.value("requests_running") > 1 for scrape in scrapes))
        for earlier, later in zip([before] + scrapes, scrapes + [after]):
            for name, samples in earlier.samples.items():
                if name.endswith("_total") or name.endswith("_count"):
                    for labels, value in samples:
                        now = next(v for l, v in later.samples[name] if l == labels)
                        self.assertGreaterEqual(now, value, name)
        for name in NAMES:
            self.assertIn("k3serve_" + name, after.samples)
        for name in VLLM_NAMES:
            self.assertIn("vllm:" + name, after.samples)
        aliases = {label: value for label, value in ((l["finished_reason"], v)
                                                     for l, v in after.samples["vllm:request_success_total"])}
        self.assertEqual(aliases["length"], after.value("requests_finished_total", reason="length"))
        for name, samples in after.samples.items():
            if name.startswith("k3serve_") and name.endswith("_seconds_bucket"):
                bounds = [float(labels["le"]) for labels, _ in samples if labels["le"] != "+Inf"]
                self.assertGreaterEqual(max(bounds), 3600, name)
        self.assertEqual(server.stop(), 0)

    def test_traces_are_continued_on_both_front_ends(self):
        collector = Collector()
        self.addCleanup(collector.server_close)
        self.addCleanup(collector.shutdown)
        server = self.start("--otlp-endpoint", "http://127.0.0.1:%d" % collector.server_port)
        for stream in (False, True):
            reply = self.post(server, "/v1/completions", self.completion(4, stream), {"traceparent": PARENT})[1]
            self.assertRegex(reply.headers["traceparent"], "^00-%s-[0-9a-f]{16}-01$" % TRACE)
            self.assertNotEqual(reply.headers["traceparent"], PARENT)
            reply.read()
        refused = self.post(server, "/v1/completions", {"prompt": "x", "max_tokens": -1}, {"traceparent": PARENT})[1]
        self.assertIn(TRACE, refused.headers["traceparent"])
        own = self.post(server, "/v1/completions", self.completion(4))[1]  # begins a trace
        self.assertNotIn(TRACE, own.headers["traceparent"])
        own.read()
        with grpc.insecure_channel(server.grpc) as channel:
            stub = service_grpc.GenerationServiceStub(channel)
            call = stub.StreamGenerate(service.StreamGenerateRequest(spec=token_spec([5], max_new_tokens=3)),
                                       metadata=[("traceparent", PARENT)])
            self.assertIn(TRACE, dict(call.initial_metadata())["traceparent"])
            list(call)
            with self.assertRaises(grpc.RpcError) as caught:
                stub.Generate(service.GenerateRequest(spec=token_spec([], max_new_tokens=3)),
                              metadata=[("traceparent", PARENT)])
            self.assertIn(TRACE, dict(caught.exception.trailing_metadata())["traceparent"])
        self.assertEqual(server.stop(), 0)
        self.assertEqual(self.log(server).count("trace=" + TRACE), 4)
        spans = [span for span in collector.spans if span["traceId"] == TRACE]
        self.assertEqual(len(spans), 4)
        self.assertEqual({span["parentSpanId"] for span in spans}, {"b7ad6b7169203331"})
        self.assertEqual(len({span["spanId"] for span in spans}), 4)
        self.assertEqual(sorted(span["status"]["code"] for span in spans), [1, 1, 1, 2])
        self.assertEqual(len(collector.spans), 5)
        for span in spans:
            self.assertLessEqual(int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"]))

    def test_no_prompt_and_no_key_in_logs_errors_and_metrics(self):
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
            keys.write("hush-hush-key\n")
            keys.flush()
            server = self.start("--log-level", "trace", "--api-key-file", keys.name)
            secret = "xylophonist-quartz"
            bearer = {"authorization": "Bearer hush-hush-key"}
            answers = []

            def send(path, body, headers=bearer):
                answers.append(self.post(server, path, body, headers)[1].read().decode())

            chat = {"messages": [{"role": "user", "content": secret}], "max_tokens": 5}
            send("/v1/chat/completions", chat)
            send("/v1/chat/completions", chat, {"authorization": "Bearer " + secret})
            send("/v1/chat/completions", chat, {"authorization": "Basic hush-hush-key"})
            errors = len(answers)
            send("/v1/chat/completions", {**chat, "temperature": -1})
            send("/v1/chat/completions", {"messages": [{"role": "tool", "content": secret}]})
            send("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]})
            send("/v1/completions", {"prompt": secret, "max_tokens": 1 << 30})
            connection, reply = self.post(server, "/v1/completions", self.completion(100000, True, secret), bearer)
            reply.read(20)
            reply.close()
            connection.close()
            with grpc.insecure_channel(server.grpc) as channel:
                spec = token_spec([5], max_new_tokens=3)
                with self.assertRaises(grpc.RpcError) as caught:
                    service_grpc.GenerationServiceStub(channel).Generate(
                        service.GenerateRequest(spec=spec), metadata=[("authorization", "Bearer " + secret)])
                self.assertNotIn(secret, str(caught.exception))
            time.sleep(0.3)
            with urllib.request.urlopen(server.url + "/metrics") as page:
                answers.append(page.read().decode())
            self.assertEqual(server.stop(), 0)
            log = self.log(server)
            for text in [log, *answers[errors:]]:
                self.assertNotIn(secret, text)
                self.assertNotIn("hush-hush", text)
            # The request that its client left is logged with what it had made.
            left = re.search(r"status=499 .*prompt_tokens=(\d+) .*completion_tokens=(\d+)", log)
            self.assertGreater(int(left.group(1)), 0, log)
            self.assertGreater(int(left.group(2)), 0, log)

    def test_health_answers_while_all_workers_are_busy(self):
        server = self.start("--max-num-seqs", "4")
        # Large prompts to encode on every text worker of both front ends, and generation that never ends.
        body = json.dumps({"prompt": "word " * 600000, "max_tokens": 1})
        stop = threading.Event()

        def load():
            while not stop.is_set():
                connection = http.client.HTTPConnection(server.http, timeout=60)
                try:
                    connection.request("POST", "/tokenize", body, {"content-type": "application/json"})
                    connection.getresponse().read()
                except OSError:
                    pass
                finally:
                    connection.close()

        threads = [threading.Thread(target=load) for _ in range(8)]
        with grpc.insecure_channel(server.grpc) as channel:
            stub = service_grpc.GenerationServiceStub(channel)
            streams = [stub.StreamGenerate(service.StreamGenerateRequest(
                spec=token_spec([50] * 5, max_new_tokens=100000, ignore_eos=True))) for _ in range(4)]
            for thread in threads:
                thread.start()
            slowest = 0
            health = health_pb2_grpc.HealthStub(channel)
            for _ in range(40):
                for probe in (lambda: urllib.request.urlopen(server.url + "/health/ready", timeout=5).read(),
                              lambda: urllib.request.urlopen(server.url + "/health/live", timeout=5).read(),
                              lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=5)):
                    begin = time.monotonic()
                    probe()
                    slowest = max(slowest, time.monotonic() - begin)
                time.sleep(0.02)
            stop.set()
            for call in streams:
                call.cancel()
            for thread in threads:
                thread.join()
        self.assertLess(slowest, 2)  # a probe's own limit; two cores are shared with the load itself
        self.assertEqual(server.stop(), 0)

    def test_a_profile_of_running_steps(self):
        server = self.start("--admin-port", "0")
        with grpc.insecure_channel(server.grpc) as channel, grpc.insecure_channel(server.admin) as private:
            generation = service_grpc.GenerationServiceStub(channel)
            actions = admin_grpc.AdminServiceStub(private)

            def generate(tokens):
                generation.Generate(service.GenerateRequest(
                    spec=token_spec([50] * 5, max_new_tokens=tokens, ignore_eos=True)))

            def stop():
                path = actions.StopProfile(admin.StopProfileRequest()).path
                try:
                    with open(path) as file:
                        text = file.read()
                    self.assertEqual(os.stat(path).st_mode & 0o777, 0o600)
                finally:
                    os.remove(path)
                steps = int(re.match(r"(\d+) steps, ", text).group(1))
                return steps, text

            with self.assertRaises(grpc.RpcError) as caught:
                actions.StopProfile(admin.StopProfileRequest())
            self.assertEqual(caught.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)

            generate(2)
            actions.StartProfile(admin.StartProfileRequest())
            generate(8)
            steps, text = stop()
            self.assertEqual(steps, 8)  # the prompt's step gives the first token
            self.assertRegex(text, r"(?m)^RouterTopK")
            generate(4)

            actions.StartProfile(admin.StartProfileRequest(steps=3))
            generate(8)
            self.assertEqual(stop()[0], 3)
            with self.assertRaises(grpc.RpcError) as caught:
                actions.StopProfile(admin.StopProfileRequest())
            self.assertEqual(caught.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
        self.assertEqual(server.stop(), 0)


def configure(binary, model_dir):
    global BINARY, MODEL
    BINARY, MODEL = binary, model_dir


if __name__ == "__main__":
    main(configure)
