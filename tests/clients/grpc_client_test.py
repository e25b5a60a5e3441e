"""grpcio against a running k3serve: health, reflection, whole replies and streams, cancel, deadline, errors with their
details, large messages, a reader that stops."""

import threading
import time
import unittest

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from grpc_stubs import (admin, admin_grpc, chat, chat_spec, details, generation, model, model_grpc, service, service_grpc,
                        token_spec, tokenizer, tokenizer_grpc)
from running_server import RunningServer, main

SERVER = None
LARGE = [("grpc.max_send_message_length", 256 << 20), ("grpc.max_receive_message_length", 256 << 20)]
SERVICES = ["k3serve.inference.v1.GenerationService", "k3serve.inference.v1.TokenizerService",
            "k3serve.inference.v1.ModelService"]


class GrpcTest(unittest.TestCase):
    def setUp(self):
        self.channel = grpc.insecure_channel(SERVER.grpc, LARGE)
        self.stub = service_grpc.GenerationServiceStub(self.channel)
        self.models = model_grpc.ModelServiceStub(self.channel)

    def tearDown(self):
        self.channel.close()

    def stream(self, spec, **call):
        return self.stub.StreamGenerate(service.StreamGenerateRequest(spec=spec), **call)

    def load(self):
        watch = self.models.WatchLoad(model.WatchLoadRequest())
        report = next(watch)
        watch.cancel()
        return report

    def wait_idle(self):
        for _ in range(500):
            report = self.load()
            if report.running + report.waiting == 0:
                self.assertEqual(report.state_slots.used, 0)
                self.assertEqual(report.latent_pages.used, 0)
                return
            time.sleep(0.01)
        self.fail("requests are left: %s" % report)

    def refused(self, spec, code):
        with self.assertRaises(grpc.RpcError) as caught:
            list(self.stream(spec))
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        return caught.exception

    def test_health(self):
        stub = health_pb2_grpc.HealthStub(self.channel)
        for name in ["", *SERVICES]:
            self.assertEqual(stub.Check(health_pb2.HealthCheckRequest(service=name)).status,
                             health_pb2.HealthCheckResponse.SERVING)
        with self.assertRaises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="nope"))
        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)

    def test_reflection(self):
        stub = reflection_pb2_grpc.ServerReflectionStub(self.channel)
        requests = [reflection_pb2.ServerReflectionRequest(list_services=""),
                    reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICES[0])]
        listed, described = stub.ServerReflectionInfo(iter(requests))
        names = {entry.name for entry in listed.list_services_response.service}
        self.assertLessEqual({*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"}, names)
        self.assertGreater(len(described.file_descriptor_response.file_descriptor_proto), 1)

    def test_stream_and_whole_reply_agree(self):
        spec = chat_spec("What does grep do?", max_new_tokens=200)
        spec.sampling.temperature = 0
        call = self.stream(spec, metadata=[("x-request-id", "client-7")])
        initial = dict(call.initial_metadata())
        events = list(call)
        self.assertEqual(initial["x-request-id"], "client-7")
        self.assertIn("k3serve-weights-version", initial)
        self.assertEqual(events[0].WhichOneof("event"), "accepted")
        self.assertEqual(events[-1].WhichOneof("event"), "usage")
        text = "".join(e.delta.text for e in events if e.delta.channel == generation.CHANNEL_CONTENT)
        reasoning = "".join(e.delta.text for e in events if e.delta.channel == generation.CHANNEL_REASONING)
        whole = self.stub.Generate(service.GenerateRequest(spec=spec))
        self.assertEqual(whole.choices[0].content, text)
        self.assertEqual(whole.choices[0].reasoning, reasoning)
        self.assertIn("grep", text)
        self.assertEqual(whole.usage.completion_tokens, events[-1].usage.completion_tokens)
        trailing = dict(call.trailing_metadata())
        self.assertGreaterEqual(float(trailing["k3serve-decode-ms"]), 0)

    def test_render_is_what_runs(self):
        spec = chat_spec("Hi", max_new_tokens=5)
        stub = tokenizer_grpc.TokenizerServiceStub(self.channel)
        ids = stub.RenderChat(tokenizer.RenderChatRequest(chat=spec.chat)).token_ids
        spec.output.token_ids = True
        spec.sampling.temperature = 0
        same = token_spec(ids, max_new_tokens=5)
        same.output.token_ids = True
        same.sampling.temperature = 0
        chat_reply = self.stub.Generate(service.GenerateRequest(spec=spec))
        ids_reply = self.stub.Generate(service.GenerateRequest(spec=same))
        self.assertEqual(chat_reply.accepted.prompt_tokens, len(ids))
        self.assertEqual(list(chat_reply.choices[0].token_ids), list(ids_reply.choices[0].token_ids))
        text = stub.Detokenize(tokenizer.DetokenizeRequest(token_ids=ids_reply.choices[0].token_ids)).text
        self.assertEqual(ids_reply.choices[0].content, text)

    def test_server_info_tells_the_effort_in_force(self):
        info = self.models.GetServerInfo(model.GetServerInfoRequest())
        self.assertEqual(info.default_effort, "max")
        named = chat_spec("Hi")
        named.reasoning.effort = chat.EFFORT_MAX
        stub = tokenizer_grpc.TokenizerServiceStub(self.channel)
        rendered = [stub.RenderChat(tokenizer.RenderChatRequest(chat=s.chat, reasoning=s.reasoning)).token_ids
                    for s in (chat_spec("Hi"), named)]
        self.assertEqual(list(rendered[0]), list(rendered[1]))

    def test_same_seed_same_tokens(self):
        spec = chat_spec("What is a pointer?", max_new_tokens=40)
        spec.sampling.temperature = 1
        spec.sampling.seed = 11
        spec.output.token_ids = True
        replies = [self.stub.Generate(service.GenerateRequest(spec=spec)) for _ in range(2)]
        self.assertEqual(list(replies[0].choices[0].token_ids), list(replies[1].choices[0].token_ids))

    def test_errors(self):
        spec = chat_spec("x")
        spec.sampling.top_p = 0
        error = self.refused(spec, grpc.StatusCode.INVALID_ARGUMENT)
        self.assertEqual(details(error)["BadRequest"].field_violations[0].field, "spec.sampling.top_p")
        spec = chat_spec("x")
        spec.model = "other"
        error = self.refused(spec, grpc.StatusCode.NOT_FOUND)
        self.assertEqual(details(error)["ResourceInfo"].resource_name, "other")
        limit = self.models.GetServerInfo(model.GetServerInfoRequest()).limits.max_model_len
        error = self.refused(token_spec([5] * 10, max_new_tokens=limit), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertEqual(details(error)["ErrorInfo"].reason, "context_length_exceeded")
        self.assertEqual(details(error)["ErrorInfo"].metadata["max_model_len"], str(limit))
        spec = chat_spec("x")
        spec.cache.pin_name = "x"
        self.refused(spec, grpc.StatusCode.UNIMPLEMENTED)
        self.refused(generation.GenerationSpec(), grpc.StatusCode.INVALID_ARGUMENT)

    def test_cancel_frees_everything(self):
        for _ in range(20):
            spec = token_spec([100] * 50, max_new_tokens=5000, ignore_eos=True)
            call = self.stream(spec)
            next(call)
            call.cancel()
        self.wait_idle()

    def test_deadlines(self):
        for seconds in (0.0001, 0.005, 0.05, 0.3):
            spec = token_spec([100] * 50, max_new_tokens=20000, ignore_eos=True)
            with self.assertRaises(grpc.RpcError) as caught:
                list(self.stream(spec, timeout=seconds))
            self.assertIn(caught.exception.code(),
                          (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED))
        self.wait_idle()

    def test_six_megabytes_of_ids(self):
        # Over the default of 4 MiB: they reach the checks.
        error = self.refused(token_spec([5000000] * 1500000), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertEqual(details(error)["BadRequest"].field_violations[0].field, "spec.tokens.ids[0]")
        list(self.stream(chat_spec("still there?", max_new_tokens=3)))

    def test_a_reader_that_stops_does_not_slow_others(self):
        slow = self.stream(token_spec([100] * 5, max_new_tokens=4000, ignore_eos=True))
        next(slow)
        done = threading.Event()

        def read():
            list(self.stream(chat_spec("What does ls do?", max_new_tokens=20)))
            done.set()

        threading.Thread(target=read, daemon=True).start()
        self.assertTrue(done.wait(30))
        rest = list(slow)  # goes on: the rest is there, in order
        self.assertEqual(rest[-1].usage.completion_tokens, 4000)

    def test_many_streams(self):
        texts = [None] * 16

        def ask(index):
            spec = chat_spec("What does grep do?", max_new_tokens=60)
            spec.sampling.temperature = 0
            texts[index] = "".join(e.delta.text for e in self.stream(spec))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(texts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(set(texts)), 1)
        self.assertTrue(texts[0])

    def test_admin_service_is_not_public(self):
        with self.assertRaises(grpc.RpcError) as caught:
            admin_grpc.AdminServiceStub(self.channel).FlushCache(admin.FlushCacheRequest())
        self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)


def setUpModule():
    global SERVER
    SERVER = RunningServer(BINARY, MODEL)


def tearDownModule():
    assert SERVER.stop() == 0


def configure(binary, model_dir):
    global BINARY, MODEL
    BINARY, MODEL = binary, model_dir


if __name__ == "__main__":
    main(configure)
