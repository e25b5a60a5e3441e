"""Structured output and forced tools against a running k3serve. Its small model knows nothing of JSON, so whatever fits,
fits because it was enforced."""

import asyncio
import concurrent.futures
import json
import random
import typing
import unittest
import urllib.request

import grpc
import jsonschema
import openai
import pydantic

import grpc_stubs  # noqa: F401  makes the generated modules importable
import structured_client as shared
from running_server import RunningServer, main
from structured_client import PERSON, QUESTION, chat, client, post, schema_format, tool

from k3serve.inference.v1 import chat_pb2, generation_service_pb2, generation_service_pb2_grpc


class JsonTest(unittest.TestCase):
    def test_parse_of_a_pydantic_model(self):
        class Size(pydantic.BaseModel):
            width: int = pydantic.Field(ge=1, le=500)
            unit: typing.Literal["cm", "inch"]

        class Thing(pydantic.BaseModel):
            name: str = pydantic.Field(max_length=12)
            size: Size
            colour: typing.Optional[typing.Literal["red", "green"]]

        for seed in range(3):
            reply = client().chat.completions.parse(model="tiny-k3", messages=QUESTION, response_format=Thing, seed=seed,
                                                    max_tokens=400, temperature=1.5,
                                                    extra_body={"thinking": {"type": "disabled"}})
            choice = reply.choices[0]
            self.assertEqual(choice.finish_reason, "stop")
            self.assertIsInstance(choice.message.parsed, Thing)

    def test_answers_are_compact_and_reasoning_stays_free(self):
        for stream in (False, True):
            reply = chat(response_format=schema_format(PERSON), temperature=0, stream=stream)
            if stream:
                chunks = list(reply)
                deltas = [c.choices[0].delta for c in chunks if c.choices]
                text = "".join(d.content or "" for d in deltas)
                reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
            else:
                text = reply.choices[0].message.content
                reasoning = reply.choices[0].message.reasoning_content
            jsonschema.validate(json.loads(text), PERSON)
            self.assertNotIn("\n", text)
            self.assertEqual(text, json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False))
            self.assertIn("The user asks", reasoning)

    def test_json_object(self):
        reply = chat(response_format={"type": "json_object"}, temperature=0.8, seed=3, max_tokens=120)
        text = reply.choices[0].message.content
        if reply.choices[0].finish_reason == "stop":
            self.assertIsInstance(json.loads(text), dict)
        else:
            self.assertEqual(reply.choices[0].finish_reason, "length")
            self.assertTrue(text is None or text == "" or text.startswith("{"))

    def test_choices_of_one_request_each_follow_it(self):
        reply = chat(response_format=schema_format(PERSON), temperature=1.5, n=4, seed=1)
        texts = set()
        for choice in reply.choices:
            self.assertEqual(choice.finish_reason, "stop")
            jsonschema.validate(json.loads(choice.message.content), PERSON)
            texts.add(choice.message.content)
        self.assertGreater(len(texts), 1)

    def test_alone_and_in_a_batch_the_same(self):
        schemas = [PERSON, {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
                   {"type": "string", "pattern": "^[a-z]{3,9}$"}]

        def run(index):
            return chat(response_format=schema_format(schemas[index % 3]), temperature=0,
                        messages=[{"role": "user", "content": "What is file %d?" % index}]).choices[0].message.content

        alone = [run(i) for i in range(6)]
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            together = list(pool.map(run, list(range(6)) * 2))
        self.assertEqual(together, alone * 2)

    def test_min_tokens_yields_to_a_complete_answer(self):
        reply = chat(extra_body={"guided_choice": ["yes", "no"], "min_tokens": 100}, temperature=1)
        self.assertIn(reply.choices[0].message.content, ("yes", "no"))
        self.assertEqual(reply.choices[0].finish_reason, "stop")

    def test_ignore_eos_adds_nothing(self):
        status, reply = post("/v1/completions", {"model": "tiny-k3", "prompt": "x", "max_tokens": 30, "ignore_eos": True,
                                                 "guided_choice": ["yes", "no"]})
        self.assertEqual(status, 200, reply)
        self.assertIn(reply["choices"][0]["text"], ("yes", "no"))
        self.assertEqual(reply["choices"][0]["finish_reason"], "length")
        self.assertEqual(reply["usage"]["completion_tokens"], 30)

    def test_a_partial_message_is_continued_in_its_form(self):
        messages = QUESTION + [{"role": "assistant", "content": '{"name":"colum', "partial": True}]
        status, reply = post("/v1/chat/completions", {"messages": messages, "response_format": schema_format(PERSON),
                                                      "max_tokens": 200, "temperature": 1, "seed": 5})
        self.assertEqual(status, 200, reply)
        self.assertEqual(reply["choices"][0]["finish_reason"], "stop")
        jsonschema.validate(json.loads('{"name":"colum' + reply["choices"][0]["message"]["content"]), PERSON)
        messages[-1]["content"] = "{5"
        status, reply = post("/v1/chat/completions", {"messages": messages, "response_format": schema_format(PERSON)})
        self.assertEqual((status, reply["error"]["param"]), (400, "messages"))

    def test_stop_strings_cut_short(self):
        reply = chat(response_format=schema_format(PERSON), temperature=0, stop=['"age"'])
        self.assertEqual(reply.choices[0].finish_reason, "stop")
        self.assertNotIn("age", reply.choices[0].message.content)

    def test_a_length_limit_is_told(self):
        reply = chat(response_format=schema_format({"type": "array", "items": {"type": "integer"}, "minItems": 50}),
                     max_tokens=60, temperature=0)
        self.assertEqual(reply.choices[0].finish_reason, "length")

    def test_guided_fields_on_both_routes(self):
        cases = [({"guided_regex": "[0-9]{3}-[ab]{1,4}c"}, r"[0-9]{3}-[ab]{1,4}c"),
                 ({"guided_grammar": 'root ::= "<" [a-z]{2} ">"'}, r"<[a-z]{2}>"),
                 ({"guided_choice": ["r\u00e9d", "green \"x\""]}, "r\u00e9d|green \"x\""),
                 ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 5}}, "[345]"),
                 ({"structured_outputs": {"regex": "x{2,4}y"}}, "x{2,4}y"),
                 ({"structured_outputs": {"choice": ["one"]}}, "one"),
                 ({"response_format": {"type": "regex", "pattern": "ab?c"}}, "ab?c"),
                 ({"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "hi"}}}, "hi")]
        for extra, expected in cases:
            status, reply = post("/v1/completions", {"model": "tiny-k3", "prompt": "Say: ", "max_tokens": 60,
                                                     "temperature": 1.2, **extra})
            self.assertEqual(status, 200, reply)
            self.assertRegex(reply["choices"][0]["text"], "^(%s)$" % expected)
            status, reply = post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 200, "temperature": 1.2,
                                                          "reasoning_effort": "low", **extra})
            self.assertEqual(status, 200, reply)
            if reply["choices"][0]["finish_reason"] == "stop":
                self.assertRegex(reply["choices"][0]["message"]["content"], "^(%s)$" % expected)

    def test_grpc_gives_the_same_tokens(self):
        request = generation_service_pb2.GenerateRequest()
        spec = request.spec
        spec.chat.messages.add(role=chat_pb2.ROLE_USER).content.add(text="What does grep do?")
        spec.sampling.temperature = 0.9
        spec.sampling.seed = 17
        spec.stopping.max_new_tokens = 300
        spec.constraint.json_schema = json.dumps(PERSON)
        spec.output.token_ids = True
        with grpc.insecure_channel(shared.SERVER.grpc) as channel:
            by_grpc = generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            bad = generation_service_pb2.GenerateRequest()
            bad.CopyFrom(request)
            bad.spec.constraint.json_schema = '{"type": "object", "properties": {"a": {"type": "text"}}}'
            with self.assertRaises(grpc.RpcError) as caught:
                generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(bad)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("constraint.json_schema.properties.a.type", caught.exception.details())
        status, by_http = post("/v1/chat/completions", {
            "messages": QUESTION, "temperature": 0.9, "seed": 17, "max_tokens": 300, "return_token_ids": True,
            "response_format": schema_format(PERSON)})
        self.assertEqual(status, 200, by_http)
        self.assertEqual(list(by_grpc.choices[0].token_ids), by_http["choices"][0]["token_ids"])
        jsonschema.validate(json.loads(by_http["choices"][0]["message"]["content"]), PERSON)


class ToolsTest(unittest.TestCase):
    def test_required_named_and_parallel(self):
        tools = [tool("look", {"type": "object", "properties": {"what": {"type": "string", "maxLength": 9}},
                               "required": ["what"], "additionalProperties": False}),
                 tool("count", {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
                                "required": ["n"]}, strict=True)]
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
        named = {"type": "function", "function": {"name": "count"}}
        for choice in ("required", named):
            for stream in (False, True):
                for parallel in (False, True):
                    reply = chat(tools=tools, tool_choice=choice, parallel_tool_calls=parallel, temperature=1.2,
                                 stream=stream, seed=5, max_tokens=400)
                    calls = {}
                    if stream:
                        finish = None
                        for chunk in reply:
                            for part in chunk.choices[0].delta.tool_calls or []:
                                call = calls.setdefault(part.index, ["", "", ""])
                                call[0] += part.id or ""
                                call[1] += part.function.name or ""
                                call[2] += part.function.arguments or ""
                            finish = chunk.choices[0].finish_reason or finish
                    else:
                        finish = reply.choices[0].finish_reason
                        for i, call in enumerate(reply.choices[0].message.tool_calls):
                            calls[i] = [call.id, call.function.name, call.function.arguments]
                    if finish == "length":
                        continue  # the model would not stop calling
                    self.assertEqual(finish, "tool_calls")
                    self.assertTrue(calls)
                    if not parallel:
                        self.assertEqual(len(calls), 1)
                    for i, (identifier, name, arguments) in calls.items():
                        self.assertEqual(identifier, "%s_%d" % (name, i))
                        if choice is named:
                            self.assertEqual(name, "count")
                        jsonschema.validate(json.loads(arguments), schemas[name])

    def test_one_call_when_parallel_is_off(self):
        reply = chat(tools=[tool("go", {"type": "object", "properties": {}})], tool_choice="required",
                     parallel_tool_calls=False, temperature=0)
        self.assertEqual(reply.choices[0].finish_reason, "tool_calls")
        self.assertEqual([(c.function.name, c.function.arguments) for c in reply.choices[0].message.tool_calls],
                         [("go", "{}")])

    def test_random_schemas(self):
        """The property: whatever a finished answer holds, fits its schema."""
        rng = random.Random(7)

        def value(depth):
            kind = rng.randrange(9 if depth < 2 else 6)
            return [lambda: {"type": "string", "maxLength": rng.randrange(1, 12)}, lambda: {"type": "integer", "minimum": -5, "maximum": 40},
                    lambda: {"type": "boolean"}, lambda: {"enum": ["x", "\u540d\u524d", 4, None]},
                    lambda: {"type": ["null", "boolean"]}, lambda: {"type": "string", "pattern": "^[a-z]{1,4}$"},
                    lambda: {"type": "array", "items": value(depth + 1), "maxItems": 2},
                    lambda: {"anyOf": [value(depth + 1), {"type": "null"}]},
                    lambda: thing(depth + 1)][kind]()

        def thing(depth):
            names = rng.sample(["a", "\u00fcber", "c d", "x\"y", "e"], rng.randrange(1, 4))
            return {"type": "object", "properties": {n: value(depth) for n in names},
                    "required": [n for n in names if rng.random() < 0.6], "additionalProperties": False}

        def run(index):
            schema = schemas[index]
            if index % 2:
                reply = chat(response_format=schema_format(schema), temperature=1.5, seed=index, max_tokens=500)
                text = reply.choices[0].message.content
            else:
                reply = chat(tools=[tool("f", schema, strict=True)], tool_choice="required", parallel_tool_calls=False,
                             temperature=1.5, seed=index, max_tokens=500)
                calls = reply.choices[0].message.tool_calls
                text = calls[0].function.arguments if calls else None
            if reply.choices[0].finish_reason == "length":
                return 0
            jsonschema.validate(json.loads(text), schema)
            return 1

        schemas = [thing(0) for _ in range(40)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            self.assertGreater(sum(pool.map(run, range(40))), 25)

    def test_strict_is_enforced_and_named_where_it_cannot_be(self):
        status, reply = post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 5, "tools": [
            tool("f", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, strict=True)]})
        self.assertEqual(status, 400, reply)
        self.assertEqual(reply["error"]["param"], "tools[0].function.parameters.properties.a.uniqueItems")
        # Without strict the keyword is ignored, forced or not.
        for choice in ("auto", "required"):
            status, reply = post("/v1/chat/completions", {
                "messages": QUESTION, "max_tokens": 5, "tool_choice": choice, "tools": [
                    tool("f", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})]})
            self.assertEqual(status, 200, reply)

    def test_format_and_tools_together(self):
        reply = chat(tools=[tool("f", {"type": "object", "properties": {}})], response_format=schema_format(PERSON),
                     temperature=1)
        message = reply.choices[0].message
        if reply.choices[0].finish_reason != "length" and message.content:
            jsonschema.validate(json.loads(message.content), PERSON)
        self.assertTrue(message.content or message.tool_calls or reply.choices[0].finish_reason == "length")


class PreemptionTest(unittest.TestCase):
    def test_a_preempted_answer_is_the_same_and_fits(self):
        schema = {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 5}
        server = RunningServer(shared.SERVER.process.args[0], shared.SERVER.process.args[2], "--latent-pages", "64", "--page-size", "16",
                               "--max-num-seqs", "8", "--snapshot-slots", "4")
        try:
            def run(index):
                body = {"messages": [{"role": "user", "content": "What is file %d?" % index}], "max_tokens": 300,
                        "temperature": 1.2, "seed": index, "return_token_ids": True, "thinking": {"type": "disabled"}}
                if index % 2:
                    body["response_format"] = schema_format(schema)
                else:
                    body.update(tools=[tool("f", PERSON, strict=True)], tool_choice="required")
                request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode())
                with urllib.request.urlopen(request, timeout=120) as reply:
                    return json.load(reply)["choices"][0]

            def preemptions():
                with urllib.request.urlopen(server.url + "/metrics") as page:
                    return sum(float(line.split()[-1]) for line in page.read().decode().splitlines()
                               if line.startswith("k3serve_preemptions_total"))

            alone = [run(i) for i in range(8)]
            self.assertEqual(preemptions(), 0)
            for _ in range(10):  # who runs beside whom is left to the machine
                with concurrent.futures.ThreadPoolExecutor(8) as pool:
                    together = list(pool.map(run, range(8)))
                self.assertEqual([c["token_ids"] for c in together], [c["token_ids"] for c in alone])
                if preemptions() >= 2:
                    break
            self.assertGreaterEqual(preemptions(), 2)
            for index, choice in enumerate(together):
                if choice["finish_reason"] == "length":
                    continue
                if index % 2:
                    jsonschema.validate(json.loads(choice["message"]["content"]), schema)
                else:
                    for call in choice["message"]["tool_calls"]:
                        jsonschema.validate(json.loads(call["function"]["arguments"]), PERSON)
            self.assertGreater(sum(c["finish_reason"] != "length" for c in together), 2)
        finally:
            self.assertEqual(server.stop(), 0)


class AsyncTest(unittest.IsolatedAsyncioTestCase):
    async def test_many_at_once(self):
        async with openai.AsyncOpenAI(base_url=shared.SERVER.url + "/v1", api_key="none", max_retries=0) as async_client:
            replies = await asyncio.gather(*[async_client.chat.completions.create(
                model="tiny-k3", messages=QUESTION, response_format=schema_format(PERSON), temperature=1, seed=i,
                max_tokens=400, reasoning_effort="low") for i in range(16)])
        for reply in replies:
            if reply.choices[0].finish_reason == "stop":
                jsonschema.validate(json.loads(reply.choices[0].message.content), PERSON)


def tearDownModule():
    shared.stop()


if __name__ == "__main__":
    main(shared.configure)
