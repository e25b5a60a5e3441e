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


def questions():
    """Deterministic requests, as (front end, body): greedy, so that each has one right answer."""
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
    return cases


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
        """The choice of a reply, whole or put together from its stream."""
        route = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        body = {**body, "temperature": 0, "stream": stream}
        connection = self.connect()
        try:
            reply = self.post(route, json.dumps(body), connection)
            if reply.status != 200:
                raise AssertionError(f"{route} {reply.status} {reply.read()[:300]}")
            if not stream:
                return self.reduce(kind, json.loads(reply.read())["choices"][0])
            return self.read_stream(kind, reply, pause)
        except http.client.IncompleteRead as error:
            raise Busy from error
        finally:
            connection.close()

    @staticmethod
    def reduce(kind, choice):
        if kind == "completion":
            logprobs = choice.get("logprobs") or {}
            return [choice["text"], choice["finish_reason"], logprobs.get("tokens")]
        message = choice["message"]
        calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or []]
        return [message["content"] or "", message.get("reasoning_content") or "", calls, choice["finish_reason"]]

    @staticmethod
    def read_stream(kind, reply, pause):
        text, reasoning, calls, finish, tokens, ended = "", "", [], None, None, False
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
            for choice in chunk["choices"]:
                finish = choice["finish_reason"] or finish
                if kind == "completion":
                    text += choice["text"]
                    if choice.get("logprobs"):
                        tokens = (tokens or []) + choice["logprobs"]["tokens"]
                    continue
                delta = choice["delta"]
                text += delta.get("content") or ""
                reasoning += delta.get("reasoning_content") or ""
                for call in delta.get("tool_calls") or []:
                    while len(calls) <= call["index"]:
                        calls.append(["", ""])
                    calls[call["index"]][0] += call["function"].get("name") or ""
                    calls[call["index"]][1] += call["function"].get("arguments") or ""
        if not ended:
            raise Busy  # cut off by a drain that ran out of time
        return [text, finish, tokens] if kind == "completion" else [text, reasoning, calls, finish]

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
