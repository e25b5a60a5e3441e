"""Schemas, patterns and grammars that are large, hostile or mean something unusual, against a running k3serve."""

import concurrent.futures
import json
import random
import re
import time
import unittest

import jsonschema

import structured_client as shared
from running_server import main
from structured_client import QUESTION, chat, post, schema_format, tool


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
            with open("/proc/%d/status" % shared.SERVER.process.pid) as file:
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


def tearDownModule():
    shared.stop()


if __name__ == "__main__":
    main(shared.configure)
