"""The requests of the soak whose answers are compared, and a client that asks them by HTTP or gRPC, whole or streamed."""

import http.client
import json

import grpc

from grpc_stubs import service, service_grpc, token_spec

LIMIT = 180  # seconds that any one request may take
TOOL = {"type": "function", "function": {
    "name": "run_command", "description": "Runs a shell command",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
DOCUMENT = " ".join(f"Line {i}: the command number {i} copies files from the folder {i % 7}." for i in range(60))


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
          "required": ["name", "n"]}


def questions():
    """Requests as (front end, body) of which each has one right answer: greedy, or drawn from a seed."""
    cases = []
    for i, name in enumerate(("grep", "ls", "tar", "sed", "find", "chmod")):
        cases.append(("chat", {"messages": [{"role": "user", "content": f"What does {name} do?"}], "max_tokens": 40 + i}))
        cases.append(("completion", {"prompt": f"The {name} command", "max_tokens": 24 + i, "logprobs": i % 3}))
    cases.append(("chat", {"messages": [{"role": "user", "content": "List files, please."}], "tools": [TOOL],
                           "max_tokens": 60}))
    cases.append(("chat", {"messages": [{"role": "user", "content": "List files."},
                                        {"role": "assistant", "content": None, "tool_calls": [
                                            {"id": "run_command_0", "type": "function", "function":
                                                {"name": "run_command", "arguments": "{\"command\": \"ls\"}"}}]},
                                        {"role": "tool", "tool_call_id": "run_command_0", "content": "a.txt b.txt"}],
                           "tools": [TOOL], "max_tokens": 50}))
    for i in range(8):  # one long prefix, ends that differ
        cases.append(("completion", {"prompt": f"{DOCUMENT} In short, number {i}", "max_tokens": 16, "logprobs": None}))
    for i in range(6):
        cases.append(("tokens", {"ids": [100 + i] * (3 + 40 * i), "max_tokens": 20 + i}))
    # Several choices and prompts of one request, drawn from seeds, under penalties, biases, stops and grammars.
    for i in range(3):
        cases.append(("chat", {"messages": [{"role": "system", "content": DOCUMENT[:700]},
                                            {"role": "user", "content": "Which command copies?"}], "n": 2 + i,
                               "temperature": 1, "seed": 40 + i, "max_tokens": 50, "presence_penalty": 0.5 * i,
                               "logprobs": True, "top_logprobs": 2}))
        cases.append(("completion", {"prompt": [[7] * (60 + j) + [200 + i] for j in range(2 + i)], "max_tokens": 12,
                                     "temperature": 0.8, "seed": i, "n": 1 + i, "frequency_penalty": 0.3,
                                     "repetition_penalty": 1.1, "logprobs": 1, "return_token_ids": True}))
        cases.append(("completion", {"prompt": f"{DOCUMENT[:1200]} {i}", "max_tokens": (0, 1, 20)[i], "echo": True,
                                     "logprobs": 1, "stop": [" the", "\n"], "logit_bias": {"5": 4, "300": -100}}))
    cases.append(("chat", {"messages": [{"role": "user", "content": "Name a command."}], "max_tokens": 90, "n": 2,
                           "temperature": 1, "seed": 3, "min_tokens": 5, "stop": ["zz", ". "], "top_k": 40}))
    return cases


def structured_questions():
    """The same for a server that was built with structured output."""
    said = [{"role": "user", "content": "Name a command."}]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    return [("chat", {"messages": said, "max_tokens": 90, "response_format": schema, "n": 3, "temperature": 1, "seed": 9}),
            ("chat", {"messages": said, "max_tokens": 150, "tools": [TOOL], "tool_choice": "required", "seed": 5,
                      "temperature": 1}),
            ("completion", {"prompt": [f"{DOCUMENT[:500]} {i}" for i in range(5)], "max_tokens": 20,
                            "guided_regex": "[a-c]{3,9}x", "temperature": 1, "seed": 6})]


class Busy(Exception):
    """The server is draining, restarting or its queue is full: come back."""


class Client:
    """One way of asking; `ask` returns what is compared."""

    def __init__(self, addresses):
        self.addresses = addresses

    def connect(self):
        host, port = self.addresses["http"].split(":")
        return http.client.HTTPConnection(host, int(port), timeout=LIMIT)

    def post(self, path, body, connection):
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            reply = connection.getresponse()
        except (ConnectionError, http.client.RemoteDisconnected) as error:
            raise Busy from error
        if reply.status in (429, 503):
            reply.read()
            raise Busy
        return reply

    def http(self, kind, body, stream=False, pause=None):
        """All that a reply says but its ids and what was cached; whole, or put together from its stream."""
        route = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        body = {"temperature": 0, **body, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        connection = self.connect()
        try:
            reply = self.post(route, json.dumps(body), connection)
            if reply.status != 200:
                raise AssertionError(f"{route} {reply.status} {reply.read()[:300]}")
            if stream:
                return self.read_stream(kind, reply, pause)
            answer = json.loads(reply.read())
            return [self.reduce(kind, choice) for choice in answer["choices"]] + [self.usage(answer)]
        except http.client.IncompleteRead as error:
            raise Busy from error
        finally:
            connection.close()

    @staticmethod
    def usage(reply):
        return {name: reply["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}

    @staticmethod
    def reduce(kind, choice):
        end = [choice["finish_reason"], choice.get("stop_reason"), choice.get("token_ids") or []]
        if kind == "completion":
            return [choice["text"], Client.add({}, choice.get("logprobs") or {}), *end]
        message = choice["message"]
        calls = [[c["id"], c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or []]
        return [message["content"] or "", message.get("reasoning_content") or "", calls,
                Client.add({}, choice.get("logprobs") or {}), *end]

    @staticmethod
    def add(lists, more):
        """Joins the lists of one dict to those of the other; none says as much as an empty one."""
        for name, items in more.items():
            if items:
                lists.setdefault(name, []).extend(items)
        return lists

    @staticmethod
    def read_stream(kind, reply, pause):
        choices, usage, ended = {}, None, False
        for line in reply:
            if pause:
                pause()
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                ended = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                if chunk["error"].get("code") in ("draining", "server_error") or "shutting" in chunk["error"]["message"]:
                    raise Busy
                raise AssertionError(f"error event {chunk}")
            if not chunk["choices"]:
                usage = Client.usage(chunk)
            for choice in chunk["choices"]:
                whole = choices.setdefault(choice["index"], {
                    "text": "", "logprobs": {}, "token_ids": [],
                    "message": {"content": "", "reasoning_content": "", "tool_calls": []}})
                for name in ("finish_reason", "stop_reason"):
                    whole[name] = choice.get(name)
                whole["token_ids"] += choice.get("token_ids") or []
                Client.add(whole["logprobs"], choice.get("logprobs") or {})
                whole["text"] += choice.get("text") or ""
                delta, message = choice.get("delta") or {}, whole["message"]
                for name in ("content", "reasoning_content"):
                    message[name] += delta.get(name) or ""
                for call in delta.get("tool_calls") or []:
                    while len(message["tool_calls"]) <= call["index"]:
                        message["tool_calls"].append({"id": "", "function": {"name": "", "arguments": ""}})
                    joined = message["tool_calls"][call["index"]]
                    joined["id"] += call.get("id") or ""
                    for name in ("name", "arguments"):
                        joined["function"][name] += call["function"].get(name) or ""
        if not ended:
            raise Busy  # cut off by a drain that ran out of time
        return [Client.reduce(kind, choices[index]) for index in sorted(choices)] + [usage]

    def grpc(self, body, unary, channel):
        stub = service_grpc.GenerationServiceStub(channel)
        spec = token_spec(body["ids"], max_new_tokens=body["max_tokens"], ignore_eos=True)
        spec.sampling.temperature = 0
        spec.output.token_ids = True
        try:
            if unary:
                return list(stub.Generate(service.GenerateRequest(spec=spec), timeout=LIMIT).choices[0].token_ids)
            ids = []
            for event in stub.StreamGenerate(service.StreamGenerateRequest(spec=spec), timeout=LIMIT):
                ids.extend(event.delta.token_ids)
            return ids
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
                raise Busy from error
            raise
