"""The same request by gRPC and by HTTP gives the same prompt ids and the same tokens."""

import json
import pathlib
import sys
import tempfile
import unittest
import urllib.request

import grpc
from grpc_tools import protoc

from running_server import ROOT, RunningServer, main

SERVER = None
STUBS = tempfile.TemporaryDirectory(prefix="k3serve-stubs-")
PROTO = pathlib.Path(ROOT) / "proto"
if protoc.main(["protoc", f"-I{PROTO}", f"--python_out={STUBS.name}", f"--grpc_python_out={STUBS.name}",
                *sorted(str(p.relative_to(PROTO)) for p in (PROTO / "k3serve").rglob("*.proto"))]) != 0:
    sys.exit("protoc failed")
sys.path.insert(0, STUBS.name)

from k3serve.inference.v1 import chat_pb2, generation_service_pb2, generation_service_pb2_grpc  # noqa: E402
from k3serve.inference.v1 import tokenizer_service_pb2, tokenizer_service_pb2_grpc  # noqa: E402


def post(path, body):
    request = urllib.request.Request(SERVER.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


class SameTokensTest(unittest.TestCase):
    def setUp(self):
        self.channel = grpc.insecure_channel(SERVER.grpc)

    def tearDown(self):
        self.channel.close()

    def test_chat(self):
        for temperature in (0, 1):
            request = generation_service_pb2.GenerateRequest()
            spec = request.spec
            message = spec.chat.messages.add(role=chat_pb2.ROLE_USER)
            message.content.add(text="What does grep do?")
            spec.sampling.temperature = temperature
            spec.sampling.seed = 42
            spec.sampling.n = 2
            spec.stopping.max_new_tokens = 60
            spec.output.token_ids = True
            reply = generation_service_pb2_grpc.GenerationServiceStub(self.channel).Generate(request)
            body = {"messages": [{"role": "user", "content": "What does grep do?"}], "temperature": temperature,
                    "seed": 42, "n": 2, "max_tokens": 60, "return_token_ids": True}
            http = post("/v1/chat/completions", body)
            for choice, other in zip(reply.choices, http["choices"]):
                self.assertEqual(list(choice.token_ids), other["token_ids"])
                self.assertEqual(choice.content, other["message"]["content"])
                self.assertEqual(choice.reasoning, other["message"].get("reasoning_content", ""))
            self.assertEqual(reply.usage.prompt_tokens, http["usage"]["prompt_tokens"])
            rendered = tokenizer_service_pb2_grpc.TokenizerServiceStub(self.channel).RenderChat(
                tokenizer_service_pb2.RenderChatRequest(chat=spec.chat))
            self.assertEqual(list(rendered.token_ids), http["prompt_token_ids"])

    def test_prompt_log_probabilities(self):
        ids = list(range(300, 330))
        request = generation_service_pb2.GenerateRequest()
        request.spec.tokens.ids.extend(ids)
        request.spec.output.prompt_logprobs = True
        request.spec.output.top_logprobs = 0
        request.spec.stopping.max_new_tokens = 1
        reply = generation_service_pb2_grpc.GenerationServiceStub(self.channel).Generate(request)
        http = post("/v1/completions", {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 1})
        values = http["choices"][0]["logprobs"]["token_logprobs"][1:len(ids)]
        self.assertEqual(len(values), len(reply.prompt_logprobs.logprobs))
        import numpy
        self.assertEqual([numpy.float32(v) for v in values],
                         [numpy.float32(v) for v in reply.prompt_logprobs.logprobs], "each float comes through exactly")


def configure(binary, model):
    global SERVER
    SERVER = RunningServer(binary, model, "--no-enable-prefix-caching")


def tearDownModule():
    assert SERVER.stop() == 0


if __name__ == "__main__":
    main(configure)
