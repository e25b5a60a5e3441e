"""A Kimi-Linear checkpoint over HTTP, with the `openai` package: chat, streams, and tools in the K2 family's format. Its
weights are random and its vocabulary is the shipped one cut short, so what it says means nothing; calls are forced."""

import atexit
import json
import os
import shutil
import subprocess
import tempfile
import unittest
import urllib.request

import openai

from running_server import ROOT, RunningServer, main

SERVER = BINARY = FOLDER = None
MODEL = os.path.join(ROOT, "tests/data/tiny-kimi-linear")
NAMES = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
         "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
         "<|tool_call_argument_begin|>", "<|tool_call_end|>"]
RANKS = 768  # the model's 1,024 ids less 256 special ones
SIZE = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99},
                                         "unit": {"enum": ["cm", "m\u00b2"]}},
        "required": ["n", "unit"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SIZE, "strict": True}}
         for name in ("measure", "cut-off")]
HI = [{"role": "user", "content": "Hi"}]


def client():
    return openai.OpenAI(base_url=SERVER.url + "/v1", api_key="none", max_retries=0)


def chat(**options):
    return client().chat.completions.create(**{"model": "tiny-kimi-linear", "messages": HI, "max_tokens": 200, "seed": 4,
                                               **options})


class KimiLinearTest(unittest.TestCase):
    def check_size(self, text):
        value = json.loads(text)
        self.assertEqual(sorted(value), ["n", "unit"])
        self.assertIn(value["n"], range(1, 100))
        self.assertIn(value["unit"], SIZE["properties"]["unit"]["enum"])

    def test_special_tokens_need_names(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(os.path.join(FOLDER, "tiktoken.model"), folder)
            result = subprocess.run([BINARY, "serve", MODEL, "--device", "cpu", "--port", "off", "--grpc-port", "0",
                                     "--tokenizer", folder], capture_output=True, text=True, timeout=60)
            self.assertEqual(result.returncode, 4, result)
            self.assertIn("tokenizer_config.json: cannot be opened; it names the special tokens", result.stderr)

    def test_the_end_has_the_name_that_the_file_gives_it(self):
        with urllib.request.urlopen(SERVER.url + "/tokenizer_info") as reply:
            info = json.load(reply)
        self.assertEqual((info["eos_token"], info["eos_token_id"]), ("<|im_end|>", RANKS + 2))
        self.assertLessEqual({RANKS + 1, RANKS + 2}, set(info["stop_token_ids"]))

    def test_chat_whole_and_streamed(self):
        whole = chat(max_tokens=40, temperature=0).choices[0]
        parts = [c.choices[0] for c in chat(max_tokens=40, temperature=0, stream=True)]
        self.assertEqual("".join(p.delta.content or "" for p in parts), whole.message.content)
        self.assertEqual(parts[-1].finish_reason, whole.finish_reason)
        self.assertIsNone(getattr(whole.message, "reasoning_content", None))

    def test_forced_calls(self):
        named = {"type": "function", "function": {"name": "cut-off"}}
        for choice in ("required", named):
            for stream in (False, True):
                reply = chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=stream, max_tokens=400,
                             temperature=0.7)
                if stream:
                    name = identifier = arguments = ""
                    for chunk in reply:
                        for part in chunk.choices[0].delta.tool_calls or []:
                            name += part.function.name or ""
                            identifier += part.id or ""
                            arguments += part.function.arguments or ""
                        finish = chunk.choices[0].finish_reason
                else:
                    finish = reply.choices[0].finish_reason
                    calls = reply.choices[0].message.tool_calls or []
                    name, identifier, arguments = "", "", ""
                    if calls:
                        name, identifier = calls[0].function.name, calls[0].id
                        arguments = calls[0].function.arguments
                if finish == "length":
                    continue  # it never stopped talking before its call
                self.assertEqual(finish, "tool_calls")
                self.assertIn(name, ("cut-off",) if choice is named else ("cut-off", "measure"))
                self.assertEqual(identifier, "functions.%s:0" % name)
                self.check_size(arguments)

    def test_results_go_back_and_ids_go_on(self):
        history = HI + [
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "functions.measure:0", "type": "function",
                 "function": {"name": "measure", "arguments": "{\"n\": 3, \"unit\": \"cm\"}"}}]},
            {"role": "tool", "tool_call_id": "functions.measure:0", "content": "done"}]
        self.assertGreater(chat(messages=history, max_tokens=1).usage.prompt_tokens, chat(max_tokens=1).usage.prompt_tokens)
        # A format beside tools leaves no room for talk: the text, or a call.
        reply = chat(messages=history, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=300,
                     response_format={"type": "json_schema", "json_schema": {"name": "size", "schema": SIZE}})
        self.assertEqual(reply.choices[0].finish_reason, "tool_calls")
        call = reply.choices[0].message.tool_calls[0]
        self.assertEqual(call.id, "functions.%s:1" % call.function.name)
        self.check_size(call.function.arguments)

    def test_structured_output(self):
        reply = chat(response_format={"type": "json_schema", "json_schema": {"name": "size", "schema": SIZE}},
                     temperature=1.5)
        self.assertEqual(reply.choices[0].finish_reason, "stop")
        self.check_size(reply.choices[0].message.content)


def configure(binary, model):
    global SERVER, BINARY, FOLDER
    del model
    BINARY = binary
    FOLDER = folder = tempfile.mkdtemp(prefix="k3serve-tokenizer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with open(os.path.join(ROOT, "configs/models/tiny-k3/tiktoken.model"), encoding="ascii") as file:
        ranks = file.readlines()[:RANKS]
    with open(os.path.join(folder, "tiktoken.model"), "w", encoding="ascii") as file:
        file.writelines(ranks)
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump({"added_tokens_decoder": {str(RANKS + i): {"content": name} for i, name in enumerate(NAMES)},
                   "bos_token": "[BOS]", "eos_token": "<|im_end|>"}, file)
    SERVER = RunningServer(binary, MODEL, "--tokenizer", folder)


def tearDownModule():
    assert SERVER.stop() == 0


if __name__ == "__main__":
    main(configure)
