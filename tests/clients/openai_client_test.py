"""The real `openai` package against a running k3serve: sync, async, streams, tools, reasoning, errors; besides what
lm-evaluation-harness and curl do."""

import asyncio
import json
import shutil
import subprocess
import unittest
import urllib.request

import openai

from running_server import RunningServer, main

SERVER = None
STRICT = None
QUESTION = [{"role": "user", "content": "What does grep do?"}]
WEATHER = [{
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}]


def client(server=None, **options):
    return openai.OpenAI(base_url=(server or SERVER).url + "/v1", api_key="none", max_retries=0, **options)


def post(path, body):
    request = urllib.request.Request(SERVER.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def collect(stream):
    """content, reasoning, finish reasons, usage, chunks of a stream of one choice."""
    content, reasoning, finish, usage, chunks = "", "", [], None, []
    for chunk in stream:
        chunks.append(chunk)
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            if choice.finish_reason:
                finish.append(choice.finish_reason)
    return content, reasoning, finish, usage, chunks


class ModelsTest(unittest.TestCase):
    def test_models(self):
        models = client().models.list().data
        self.assertEqual([m.id for m in models], ["tiny-k3", "org/alias"])
        self.assertEqual(client().models.retrieve("org/alias").id, "org/alias")
        self.assertGreater(models[0].max_model_len, 1000)
        with self.assertRaises(openai.NotFoundError) as caught:
            client().models.retrieve("nope")
        self.assertEqual(caught.exception.code, "model_not_found")


class ChatTest(unittest.TestCase):
    def test_whole_equals_stream(self):
        for model in ("tiny-k3", "org/alias"):
            whole = client().chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=120)
            message = whole.choices[0].message
            self.assertTrue(message.content)
            self.assertTrue(message.reasoning_content)
            self.assertEqual(whole.model, model)
            self.assertEqual(whole.choices[0].finish_reason, "stop")
            stream = client().chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=120,
                                                      stream=True, stream_options={"include_usage": True})
            content, reasoning, finish, usage, chunks = collect(stream)
            self.assertEqual(content, message.content)
            self.assertEqual(reasoning, message.reasoning_content)
            self.assertEqual(finish, ["stop"])
            self.assertEqual(usage.completion_tokens, whole.usage.completion_tokens)
            self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
            self.assertGreater(usage.completion_tokens_details.reasoning_tokens, 0)
            self.assertEqual(len({c.id for c in chunks}), 1)

    def test_stream_helper_accumulates(self):
        with client().chat.completions.stream(model="tiny-k3", messages=QUESTION, temperature=0,
                                              max_tokens=120) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        whole = client().chat.completions.create(model="tiny-k3", messages=QUESTION, temperature=0, max_tokens=120)
        self.assertEqual(final.choices[0].message.content, whole.choices[0].message.content)
        self.assertEqual(final.choices[0].message.role, "assistant")

    def test_async(self):
        async def run():
            async with openai.AsyncOpenAI(base_url=SERVER.url + "/v1", api_key="none", max_retries=0) as api:
                async def one(seed):
                    stream = await api.chat.completions.create(model="tiny-k3", messages=QUESTION, seed=seed,
                                                               max_tokens=40, stream=True)
                    return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
                return await asyncio.gather(*[one(i % 4) for i in range(16)])
        texts = asyncio.run(run())
        for i in range(4):
            self.assertEqual(len(set(texts[i::4])), 1, "the seed decides, not the batch")

    def test_effort_and_thinking(self):
        def prompt_tokens(**extra):
            reply = client().chat.completions.create(model="tiny-k3", messages=QUESTION, max_tokens=1, **extra)
            return reply.usage.prompt_tokens
        low = prompt_tokens(reasoning_effort="low")
        self.assertEqual(prompt_tokens(extra_body={"thinking": {"effort": "low"}}), low)
        self.assertEqual(prompt_tokens(extra_body={"chat_template_kwargs": {"thinking_effort": "low"}}), low)
        off = client().chat.completions.create(model="tiny-k3", messages=QUESTION, max_tokens=60, temperature=0,
                                               extra_body={"thinking": {"type": "disabled"}})
        self.assertFalse(getattr(off.choices[0].message, "reasoning_content", None))
        self.assertTrue(off.choices[0].message.content)

    def test_choices_logprobs_and_stop(self):
        reply = client().chat.completions.create(model="tiny-k3", messages=QUESTION, n=3, max_tokens=60, seed=7,
                                                 logprobs=True, top_logprobs=3)
        self.assertEqual([c.index for c in reply.choices], [0, 1, 2])
        for choice in reply.choices:
            for token in choice.logprobs.content:
                self.assertLessEqual(token.logprob, 0)
                self.assertEqual(len(token.top_logprobs), 3)
                best = token.top_logprobs[0].logprob
                self.assertTrue(all(t.logprob <= best for t in token.top_logprobs))
        whole = client().chat.completions.create(model="tiny-k3", messages=QUESTION, temperature=0, max_tokens=120)
        text = whole.choices[0].message.content
        word = text.split()[2]
        stopped = client().chat.completions.create(model="tiny-k3", messages=QUESTION, temperature=0, max_tokens=120,
                                                   stop=[word, "never"])
        self.assertEqual(stopped.choices[0].message.content, text[:text.index(word)])
        self.assertEqual(stopped.choices[0].stop_reason, word)

    def test_tools_in_the_prompt(self):
        """The small model calls nothing by itself (openai_tools_test.py and structured_output_test.py have calls); streams
        still equal whole replies."""
        messages = [{"role": "user", "content": "Weather in Paris?"}]
        extra = dict(model="tiny-k3", messages=messages, tools=WEATHER, temperature=0, max_tokens=200)
        for choice in ("auto", "none"):
            whole = client().chat.completions.create(tool_choice=choice, **extra).choices[0]
            with client().chat.completions.stream(tool_choice=choice, **extra) as stream:
                for _ in stream:
                    pass
                final = stream.get_final_completion().choices[0]
            self.assertEqual(final.message.content, whole.message.content)
            self.assertEqual(final.finish_reason, whole.finish_reason)
        first = client().chat.completions.create(**extra)
        messages.append({"role": "assistant", "content": None, "tool_calls": [
            {"id": "get_weather_0", "type": "function",
             "function": {"name": "get_weather", "arguments": "{\"city\":\"Paris\"}"}}]})
        messages.append({"role": "tool", "tool_call_id": "get_weather_0", "content": "18 degrees"})
        second = client().chat.completions.create(**extra)
        self.assertGreater(second.usage.prompt_tokens, first.usage.prompt_tokens)

    def test_partial_message_is_continued(self):
        rendered = post("/render", {"messages": QUESTION + [{"role": "assistant", "content": "It", "partial": True}]})
        plain = post("/render", {"messages": QUESTION})
        self.assertNotEqual(rendered["token_ids"][-5:], plain["token_ids"][-5:])

    def test_usage_counts_are_those_of_render(self):
        reply = client().chat.completions.create(model="tiny-k3", messages=QUESTION, max_tokens=1)
        self.assertEqual(post("/render", {"messages": QUESTION})["count"], reply.usage.prompt_tokens)

    def test_cached_tokens(self):
        messages = [{"role": "user", "content": "unique words " * 60}]
        first = client().chat.completions.create(model="tiny-k3", messages=messages, max_tokens=1, temperature=0)
        second = client().chat.completions.create(model="tiny-k3", messages=messages, max_tokens=1, temperature=0)
        before = first.usage.prompt_tokens_details.cached_tokens  # the beginning that all chats share
        self.assertGreater(second.usage.prompt_tokens_details.cached_tokens, before)


class ErrorsTest(unittest.TestCase):
    def test_exception_classes(self):
        api = client().chat.completions
        with self.assertRaises(openai.NotFoundError) as caught:
            api.create(model="nope", messages=QUESTION)
        self.assertEqual(caught.exception.code, "model_not_found")
        with self.assertRaises(openai.BadRequestError) as caught:
            api.create(model="tiny-k3", messages=[])
        self.assertEqual(caught.exception.param, "messages")
        with self.assertRaises(openai.BadRequestError) as caught:
            api.create(model="tiny-k3", messages=QUESTION, max_tokens=10**9)
        self.assertEqual(caught.exception.code, "context_length_exceeded")
        with self.assertRaises(openai.BadRequestError):
            api.create(model="tiny-k3", messages=QUESTION, temperature=3, stream=True)
        with self.assertRaises(openai.BadRequestError):
            api.create(model="tiny-k3", messages=QUESTION, functions=[{"name": "f"}])

    def test_strict(self):
        api = client(STRICT).chat.completions
        api.create(model=STRICT.model, messages=QUESTION, temperature=1, top_p=0.95, n=1, max_tokens=1)
        for extra in ({"temperature": 0.6}, {"top_p": 0.5}, {"n": 2}, {"presence_penalty": 1},
                      {"extra_body": {"thinking": {"type": "disabled"}}}, {"reasoning_effort": "medium"}):
            with self.assertRaises(openai.BadRequestError, msg=str(extra)):
                api.create(model=STRICT.model, messages=QUESTION, max_tokens=1, **extra)

    def test_closing_a_stream_frees_its_place(self):
        for _ in range(20):
            stream = client().chat.completions.create(model="tiny-k3", messages=QUESTION, max_tokens=2000, stream=True,
                                                      extra_body={"ignore_eos": True})
            next(iter(stream))
            stream.close()
        with urllib.request.urlopen(SERVER.url + "/metrics") as reply:
            text = reply.read().decode()
        running = [line for line in text.splitlines() if line.startswith("k3serve_requests_running")]
        self.assertTrue(running and float(running[0].split()[-1]) <= 2, running)


class CompletionsTest(unittest.TestCase):
    def test_text_and_stream(self):
        api = client().completions
        whole = api.create(model="tiny-k3", prompt="ls: list", max_tokens=20, temperature=0)
        stream = api.create(model="tiny-k3", prompt="ls: list", max_tokens=20, temperature=0, stream=True)
        self.assertEqual("".join(c.choices[0].text for c in stream if c.choices), whole.choices[0].text)
        self.assertEqual(whole.usage.completion_tokens, 20 if whole.choices[0].finish_reason == "length" else
                         whole.usage.completion_tokens)
        batch = api.create(model="tiny-k3", prompt=["ls: list", "grep: print", "ls: list"], max_tokens=20,
                           temperature=0)
        self.assertEqual(batch.choices[0].text, whole.choices[0].text)
        self.assertEqual(batch.choices[2].text, whole.choices[0].text)

    def test_what_lm_evaluation_harness_does(self):
        """Batches of token lists with echo, logprobs 1 and max_tokens 1 (or 0); greedy by exact float equality."""
        contexts = ["grep: print lines matching", "ls: list directory", "cat: concatenate"]
        continuations = [" a pattern", " contents", " files"]
        requests = []
        for context, continuation in zip(contexts, continuations):
            head = post("/tokenize", {"prompt": context, "add_special_tokens": False})["tokens"]
            tail = post("/tokenize", {"prompt": continuation, "add_special_tokens": False})["tokens"]
            requests.append((head, tail))
        body = {"model": "tiny-k3", "prompt": [h + t for h, t in requests], "echo": True, "logprobs": 1,
                "max_tokens": 1, "temperature": 0, "seed": 1234}
        reply = post("/v1/completions", body)
        zero = post("/v1/completions", {**body, "max_tokens": 0})
        choices = sorted(reply["choices"], key=lambda c: c["index"])
        for (head, tail), choice, short in zip(requests, choices, zero["choices"]):
            logprobs = choice["logprobs"]
            self.assertEqual(len(logprobs["token_logprobs"]), len(head) + len(tail) + 1)
            self.assertIsNone(logprobs["token_logprobs"][0])
            scores = logprobs["token_logprobs"][len(head):-1]
            tops = logprobs["top_logprobs"][len(head):-1]
            self.assertEqual(len(scores), len(tail))
            self.assertEqual(scores, short["logprobs"]["token_logprobs"][len(head):])
            for name, score, top in zip(logprobs["tokens"][len(head):-1], scores, tops):
                self.assertEqual(top[name], score)
                self.assertLessEqual(len(top), 2)
                self.assertGreaterEqual(max(top.values()), score)
            # The greedy continuation must be judged greedy: each token is the best, with the identical number.
            greedy = post("/v1/completions", {"prompt": head, "max_tokens": 4, "temperature": 0, "ignore_eos": True,
                                              "return_token_ids": True})["choices"][0]["token_ids"]
            judged = post("/v1/completions", {**body, "prompt": head + greedy})["choices"][0]["logprobs"]
            for score, top in zip(judged["token_logprobs"][len(head):-1], judged["top_logprobs"][len(head):-1]):
                self.assertEqual(score, max(top.values()))

    def test_tokenizer_info(self):
        with urllib.request.urlopen(SERVER.url + "/tokenizer_info") as reply:
            info = json.load(reply)
        self.assertTrue(info["eos_token"])

    @unittest.skipIf(shutil.which("curl") is None, "no curl")
    def test_curl(self):
        out = subprocess.run(
            ["curl", "-sN", SERVER.url + "/v1/chat/completions", "-d",
             json.dumps({"messages": QUESTION, "stream": True, "max_tokens": 5})],
            check=True, capture_output=True, text=True).stdout
        events = out.split("\n\n")
        self.assertEqual(events[-2:], ["data: [DONE]", ""])
        for event in events[:-2]:
            json.loads(event.removeprefix("data: "))


def configure(binary, model):
    global SERVER, STRICT
    SERVER = RunningServer(binary, model, "--served-model-name", "tiny-k3", "org/alias")
    STRICT = RunningServer(binary, model, "--vendor-strict")


def tearDownModule():
    for server in (SERVER, STRICT):
        code = server.stop()
        assert code == 0, code


if __name__ == "__main__":
    main(configure)
