"""What the tests of structured output share: the server, and requests to it."""

import json
import urllib.error
import urllib.request

import openai

from running_server import RunningServer

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


def configure(binary, model):
    global SERVER
    SERVER = RunningServer(binary, model, "--max-model-len", "4096")


def stop():
    assert SERVER.stop() == 0
