"""Structured output and forced tools against a running k3serve. Its small model knows nothing of JSON, so whatever fits,
fits because it was enforced."""

import asyncio
import concurrent.futures
import json
import random
import re
import time
import typing
import unittest
import urllib.error
import urllib.request

import grpc
import jsonschema
import openai
import pydantic

import grpc_stubs  # noqa: F401  makes the generated modules importable
from running_server import RunningServer, main

from k3serve.inference.v1 import chat_pb2, generation_service_pb2, generation_service_pb2_grpc

SERVER = None
QUESTION = [{"role": "user", "content": "What does grep do?"}]
PERSON = {"type": "object",
          "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
                         "tags": {"type": "array", "items": {"enum": ["a", "b", "\u00fc"]}, "maxItems": 3}},
          "required": ["name", "age", "tags"], "additionalProperties": False}


def client():
    return openai.OpenAI(base_url=SERVER.url + "/v1", api_key="none", max_retries=0, timeout=120)


def chat(**options):
    options = {"model": "tiny-k3", "messages": QUESTION, "max_tokens": 300, "reasoning_effort": "low", "seed": 11,
               **options}
    return client().chat.completions.create(**options)


def schema_format(schema, **options):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **options}}


def tool(name, parameters, **options):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **options}}


def post(path, body):
    """status and body"""
    request = urllib.request.Request(SERVER.url + path, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


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
        with grpc.insecure_channel(SERVER.grpc) as channel:
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


class HostileTest(unittest.TestCase):
    def refused(self, param, text="", **body):
        began = time.monotonic()
        status, reply = post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 30, **body})
        self.assertEqual(status, 400, reply)
        self.assertEqual(reply["error"]["type"], "invalid_request_error")
        self.assertEqual(reply["error"]["param"], param)
        self.assertIn(text, reply["error"]["message"])
        self.assertNotIn(".cc", reply["error"]["message"])
        self.assertLess(time.monotonic() - began, 20)

    def test_schemas(self):
        at = "response_format.json_schema.schema"

        def refused(schema, path):
            self.refused(at + path, response_format=schema_format(schema))

        refused({"type": "object", "properties": {"a": {"type": "text"}}}, ".properties.a.type")
        status, reply = post("/v1/completions", {"prompt": "x", "guided_json": {
            "type": "object", "properties": {"a": {"enum": list(range(6000))}}}})
        self.assertEqual((status, reply["error"]["param"]), (400, "guided_json.properties.a.enum"))
        refused({"$ref": "#"}, ".$ref")
        refused({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, ".$ref")
        refused({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "")
        refused({"type": "string", "pattern": "(x{1,9999}){1,9999}"}, ".pattern")
        refused({"type": "string", "pattern": "(("}, ".pattern")
        refused({"type": "array", "minItems": 10**9}, ".minItems")
        refused({"type": "integer", "minimum": 9, "maximum": 1}, ".minimum")
        refused({"not": {}}, ".not")
        deep = {"type": "string"}
        for _ in range(14):
            deep = {"anyOf": [deep, {"type": "array", "items": deep}]}
        status, reply = post("/v1/chat/completions", {"messages": QUESTION, "response_format": schema_format(deep)})
        self.assertEqual(status, 400, reply)

    def test_patterns_grammars_and_choices(self):
        self.refused("guided_regex", guided_regex="(" * 50)
        self.refused("guided_regex", guided_regex="a{500000}")
        self.refused("guided_grammar", "nowhere", guided_grammar="root ::= nowhere")
        self.refused("guided_grammar", guided_grammar="not a grammar")
        self.refused("guided_choice", guided_choice=[])
        self.refused("guided_json", guided_json=5)
        self.refused("guided_json.type", guided_json={"type": "x"})
        self.refused("structured_outputs.regex", structured_outputs={"regex": "[z-a]"})
        self.refused("guided_choice", "only one way", guided_choice=["a"], guided_regex="b")
        self.refused("guided_regex", "\\b cannot be enforced", guided_regex="\\ba")
        self.refused("guided_regex", "a reference to a group", guided_regex="(a)\\1")
        self.refused("guided_regex", "too long to follow", guided_regex="x.{1,2000}")
        self.refused("guided_regex", "no regular expression", guided_regex="a**")

    def test_without_strict_nothing_is_said_in_the_words_of_a_library(self):
        for schema in ({"type": "string", "pattern": "(a)\\1"}, {"type": "string", "pattern": "\\p{L}"},
                       {"type": "string", "pattern": "\\bx"}, {"type": "integer", "minimum": 1e30},
                       {"type": "integer", "minimum": 1.5, "maximum": 2}, {"type": "string", "minLength": 2.0},
                       {"type": "object", "properties": {"a": False}},
                       {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "string", "minLength": 60}]},
                       {"type": "string", "pattern": "x.{1,2000}"}):
            status, reply = post("/v1/chat/completions", {
                "messages": QUESTION, "max_tokens": 3, "thinking": {"type": "disabled"},
                "response_format": schema_format(schema, strict=False)})
            self.assertEqual(status, 200, (schema, reply))

    def test_lengths_that_exclude_one_another(self):
        self.refused("response_format.json_schema.schema.anyOf[0]", "whose lengths exclude", response_format=schema_format(
            {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "string", "minLength": 60}]}))
        seen = set()
        schema = {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 5, "maxLength": 8}]}
        for seed in range(20):
            status, reply = post("/v1/chat/completions", {
                "messages": QUESTION, "max_tokens": 60, "temperature": 2, "seed": seed, "thinking": {"type": "disabled"},
                "response_format": schema_format(schema)})
            self.assertEqual(status, 200, reply)
            if reply["choices"][0]["finish_reason"] == "stop":
                text = json.loads(reply["choices"][0]["message"]["content"])
                jsonschema.validate(text, schema)
                seen.add(len(text) > 2)
        self.assertTrue(seen)

    def test_formats(self):
        checker = jsonschema.FormatChecker(["date", "ipv4", "ipv6", "uuid", "email"])
        # Of the standard's draft 3, which asks for other times.
        checker.checkers = {**checker.checkers, "time": (lambda text: bool(re.fullmatch(
            r"\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", text)), ())}
        for name in ("date", "ipv4", "ipv6", "uuid", "time"):
            schema = {"type": "object", "properties": {"x": {"type": "string", "format": name}}, "required": ["x"],
                      "additionalProperties": False}
            for seed in range(6):
                body = {"messages": QUESTION, "max_tokens": 200, "temperature": 2, "seed": seed,
                        "thinking": {"type": "disabled"}}
                if seed % 2:
                    body["response_format"] = schema_format(schema)
                else:
                    body.update(tools=[tool("f", schema, strict=True)], tool_choice="required", parallel_tool_calls=False)
                status, reply = post("/v1/chat/completions", body)
                self.assertEqual(status, 200, reply)
                choice = reply["choices"][0]
                if choice["finish_reason"] == "length":
                    continue
                text = (choice["message"]["content"] if seed % 2
                        else choice["message"]["tool_calls"][0]["function"]["arguments"])
                jsonschema.validate(json.loads(text), schema, format_checker=checker)

    def test_others_are_served_meanwhile(self):
        """Hard grammars hold up neither the engine nor the event loop."""
        hard = [{"guided_grammar": "root ::= " + " ".join('("a" | "a" "a")*' for _ in range(60))},
                {"guided_grammar": "root ::= root root | \"a\" | root root root"},
                {"guided_regex": "(a|a?)*" * 40},
                {"guided_json": {"type": "object", "properties": {
                    "p%d" % i: {"type": "string", "maxLength": 900} for i in range(150)}}}]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            running = [pool.submit(post, "/v1/completions", {"prompt": "x", "max_tokens": 20, **h}) for h in hard]
            slowest = 0
            while not all(r.done() for r in running):
                began = time.monotonic()
                status, _ = post("/v1/completions", {"prompt": "x", "max_tokens": 2})
                self.assertEqual(status, 200)
                slowest = max(slowest, time.monotonic() - began)
            for r in running:
                self.assertIn(r.result()[0], (200, 400, 429))
        self.assertLess(slowest, 20)


    def test_a_flood_of_hard_grammars(self):
        """More of them than there are threads and places, each another: plain requests and new, ordinary schemas are
        answered meanwhile, and what finds no place is told to come back."""
        def hard(i):
            grammars = ({"guided_grammar": 'root ::= "%d" ' % i + " ".join('("a" | "a" "a")*' for _ in range(60))},
                        {"guided_grammar": 'root ::= "%d" x\nx ::= x x | "a" | x x x' % i},
                        {"guided_regex": "%d(a|a?)*" % i + "(b|b?)*" * 40},
                        {"guided_json": {"type": "object", "properties": {
                            "p%d_%d" % (i, k): {"type": "string", "pattern": "^.{1,%d}$" % (900 + i)} for k in range(60)}}})
            return post("/v1/completions", {"prompt": "x", "max_tokens": 4, **grammars[i % 4]})

        def memory():
            with open("/proc/%d/status" % SERVER.process.pid) as file:
                return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))

        before = memory()
        with concurrent.futures.ThreadPoolExecutor(60) as pool:
            running = [pool.submit(hard, i) for i in range(60)]
            slowest = 0
            for i in range(20):
                began = time.monotonic()
                schema = {"type": "object", "properties": {"n%d" % i: {"type": "string", "maxLength": 5}}}
                body = {"prompt": "x", "max_tokens": 4}
                self.assertEqual(post("/v1/completions", body)[0], 200)
                self.assertEqual(post("/v1/completions", {**body, "guided_json": schema})[0], 200)
                slowest = max(slowest, time.monotonic() - began)
            codes = [r.result()[0] for r in running]
        self.assertLessEqual(set(codes), {200, 400, 429})
        print("flood: slowest ordinary request %.1f s, memory +%.0f MB, %s" % (
            slowest, memory() - before, {code: codes.count(code) for code in set(codes)}))
        self.assertLess(slowest, 20)
        self.assertLess(memory() - before, 1024)


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


class EnforcedTest(unittest.TestCase):
    """Whatever a strict schema says is enforced, or its place is named."""

    KEYS = ["a", "b", "ab", "\u00fc", "x\"y", "a&b"]
    PATTERNS = ["^[a-c]{1,4}$", "a", "^x-[0-9]+$", "[^\u00fc]", "^(a|b)+$", "^.{2,5}$", "\u00e9{1,3}"]

    def scalar(self, rng):
        return rng.choice(["a", "b", "xx", 1, 2.5, 3.0, None, True, [1], {"a": 1}, "\n", "\u540d"])

    def schema(self, rng, depth):
        """Any keywords, with and without sense together."""
        def some(share):
            return rng.random() < share

        kind, s = rng.random(), {}
        if depth < 3 and kind < .12:
            s[rng.choice(["anyOf", "oneOf", "allOf"])] = [self.schema(rng, depth + 1) for _ in range(rng.randrange(1, 3))]
            if some(.3):
                s["type"] = rng.choice(["string", "object", "integer", ["string", "null"]])
            return s
        if kind < .18:
            s["enum"] = [self.scalar(rng) for _ in range(rng.randrange(1, 4))]
            if some(.4):
                s["type"] = rng.choice(["string", "integer", "number"])
            return s
        if kind < .22:
            return {"const": self.scalar(rng)}
        if kind < .26:
            return {"$ref": "#/$defs/" + rng.choice(["p", "q", "a~1b", "x%20y", "list/prefixItems/0"])}
        if depth < 3 and kind < .30:
            return {"anyOf": [{"type": "string", **limits} for limits in rng.sample(
                [{"maxLength": 2}, {"minLength": 5}, {"minLength": 3, "maxLength": 9}, {"minLength": 30}, {"maxLength": 20.0}],
                2)]}
        types = rng.choice([["string"], ["integer"], ["number"], ["boolean"], ["null"], ["array"], ["object"], ["object"],
                            ["array"], ["string", "integer"], ["null", "object"], []])
        if types:
            s["type"] = types[0] if len(types) == 1 else types
        for word in types or rng.sample(["string", "integer", "array", "object"], 2):
            if word == "string":
                if some(.4):
                    s["minLength"] = rng.randrange(6)
                if some(.4):
                    s["maxLength"] = s.get("minLength", 0) + rng.randrange(8)
                if some(.25):
                    s["pattern"] = rng.choice(self.PATTERNS)
                if some(.15):
                    s["format"] = rng.choice(["date", "email", "uuid", "ipv4", "time", "unknown"])
            elif word in ("integer", "number"):
                if some(.4):
                    s[rng.choice(["minimum", "exclusiveMinimum"])] = rng.choice([-5, 0, 1, 10, .5])
                if some(.4):
                    s[rng.choice(["maximum", "exclusiveMaximum"])] = rng.choice([11, 20, 1000, 12.5])
                if some(.2):
                    s["multipleOf"] = rng.choice([2, 3, .5, 5])
            elif word == "array":
                if depth < 3 and some(.7):
                    s["items"] = self.schema(rng, depth + 1)
                if depth < 3 and some(.2):
                    s["prefixItems"] = [self.schema(rng, depth + 1)]
                if some(.3):
                    s["minItems"] = rng.randrange(3)
                if some(.5):
                    s["maxItems"] = s.get("minItems", 0) + rng.randrange(3)
                if some(.1):
                    s["uniqueItems"] = rng.choice([True, False])
                if some(.05):
                    s["contains"] = {"type": "integer"}
            elif word == "object":
                if depth < 3 and some(.7):
                    s["properties"] = {k: False if some(.05) else self.schema(rng, depth + 1)
                                       for k in rng.sample(self.KEYS, rng.randrange(4))}
                if some(.5):
                    s["required"] = (rng.sample(self.KEYS, rng.randrange(3)) if some(.2)
                                     else [k for k in s.get("properties", {}) if some(.5)])
                if some(.4):
                    s["additionalProperties"] = rng.choice([True, False, {"type": "integer"},
                                                            {"type": "string", "maxLength": 3}])
                if some(.12):
                    s["patternProperties"] = {rng.choice(self.PATTERNS): {"type": "boolean"}}
                if some(.1):
                    s["propertyNames"] = rng.choice([{"pattern": "^[ab]+$"}, {"enum": ["a", "b"]}, {"maxLength": 2},
                                                     {"type": "string"}])
                if some(.2):
                    s["minProperties"] = rng.randrange(3)
                if some(.2):
                    s["maxProperties"] = s.get("minProperties", 0) + rng.randrange(3)
                if some(.1):
                    s["unevaluatedProperties"] = rng.choice([True, False, {"type": "null"}])
                if some(.03):
                    s["dependentRequired"] = {"a": ["b"]}
        for share, key, value in ((.03, "not", {"type": "string"}), (.02, "if", {}), (.1, "title", "t")):
            if some(share):
                s[key] = value
        return s

    def check(self, index):
        """Counts a finished answer, after checking it."""
        rng = random.Random(index)
        schema = self.schema(rng, 0)
        while "properties" not in schema and rng.random() < .9:
            schema = self.schema(rng, 0)
        if "type" in schema and rng.random() < .9:
            schema["type"] = "object"
        schema["$defs"] = {"p": {"type": "integer", "minimum": 1, "maximum": 9}, "q": {"type": "string", "maxLength": 3},
                           "a/b": {"type": "boolean"}, "x y": {"enum": [1, "x"]}, "list": {"prefixItems": [{"type": "null"}]}}
        body = {"messages": QUESTION, "max_tokens": 150, "temperature": 1.5, "seed": index, "thinking": {"type": "disabled"}}
        if index % 2:
            body["response_format"] = schema_format(schema)
            place = "response_format.json_schema.schema"
        else:
            body.update(tools=[tool("f", schema, strict=True)], tool_choice="required", parallel_tool_calls=False)
            place = "tools[0].function.parameters"
        status, reply = post("/v1/chat/completions", body)
        if status != 200:
            self.assertEqual(status, 400, reply)
            self.assertTrue(reply["error"]["param"].startswith(place), reply)
            return 0
        choice = reply["choices"][0]
        if choice["finish_reason"] == "length":
            return 0
        text = choice["message"]["content"] if index % 2 else choice["message"]["tool_calls"][0]["function"]["arguments"]
        def once(pairs):
            self.assertEqual(len({name for name, _ in pairs}), len(pairs), text)
            return dict(pairs)

        with self.subTest(schema=schema, text=text):
            jsonschema.Draft202012Validator(schema).validate(json.loads(text, object_pairs_hook=once))
        return 1

    def test_all_keywords(self):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            self.assertGreater(sum(pool.map(self.check, range(240))), 30)

    def test_numbers_of_arguments(self):
        properties = {name: {"type": "boolean"} for name in "abcde"}
        for least, most in ((1, 5), (2, 2), (0, 1), (4, 5)):
            schema = {"type": "object", "properties": properties, "additionalProperties": False, "minProperties": least,
                      "maxProperties": most}
            seen = []
            for seed in range(8):
                reply = chat(tools=[tool("f", schema, strict=True)], tool_choice="required", parallel_tool_calls=False,
                             temperature=2, seed=seed, max_tokens=300, extra_body={"thinking": {"type": "disabled"}})
                if reply.choices[0].finish_reason == "length":
                    continue  # the text before the call took all tokens
                arguments = json.loads(reply.choices[0].message.tool_calls[0].function.arguments)
                jsonschema.validate(arguments, schema)
                seen.append(len(arguments))
            self.assertTrue(seen)

    def test_what_arguments_cannot_enforce(self):
        at = "tools[0].function.parameters"
        open_object = {"type": "object", "additionalProperties": {"type": "integer"}}
        for schema, place in (({"type": "object", "patternProperties": {"^x": {}}}, ".patternProperties"),
                              ({"type": "object", "propertyNames": {"maxLength": 3}}, ".propertyNames"),
                              ({**open_object, "minProperties": 1}, ".minProperties"),
                              ({**open_object, "maxProperties": 2}, ".maxProperties"),
                              ({"anyOf": [{"type": "object", "properties": {}}, {"type": "null"}]}, ".anyOf[1]"),
                              ({"const": {"a": 1}}, ".const"),
                              ({"enum": [{"a": 1}]}, ".enum")):
            status, reply = post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 5, "tools": [
                tool("f", schema, strict=True)]})
            self.assertEqual((status, reply["error"]["param"]), (400, at + place))
            status, reply = post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 5, "tools": [
                tool("f", schema)]})
            self.assertEqual(status, 200, reply)


class PreemptionTest(unittest.TestCase):
    def test_a_preempted_answer_is_the_same_and_fits(self):
        schema = {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 5}
        server = RunningServer(SERVER.process.args[0], SERVER.process.args[2], "--latent-pages", "64", "--page-size", "16",
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
        async with openai.AsyncOpenAI(base_url=SERVER.url + "/v1", api_key="none", max_retries=0) as async_client:
            replies = await asyncio.gather(*[async_client.chat.completions.create(
                model="tiny-k3", messages=QUESTION, response_format=schema_format(PERSON), temperature=1, seed=i,
                max_tokens=400, reasoning_effort="low") for i in range(16)])
        for reply in replies:
            if reply.choices[0].finish_reason == "stop":
                jsonschema.validate(json.loads(reply.choices[0].message.content), PERSON)


def configure(binary, model):
    global SERVER
    SERVER = RunningServer(binary, model, "--max-model-len", "4096")


def tearDownModule():
    assert SERVER.stop() == 0


if __name__ == "__main__":
    main(configure)
