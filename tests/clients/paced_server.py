"""A server that says nothing at a fixed pace, by gRPC and HTTP: what a load harness measures of it is known."""

import asyncio
import json

import grpc

from grpc_stubs import model, model_grpc, service, service_grpc

FIRST_S, GAP_S, PER_MESSAGE = 2.0, 0.4, 2  # first token, gap between messages, tokens a message


async def paced(max_tokens):
    """Yields (tokens of this message, tokens so far)."""
    start, sent = asyncio.get_running_loop().time(), 0
    while sent < max_tokens:
        due = start + FIRST_S + GAP_S * (sent // PER_MESSAGE)
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
        now = min(PER_MESSAGE, max_tokens - sent)
        sent += now
        yield now, sent


class Generation(service_grpc.GenerationServiceServicer):
    async def StreamGenerate(self, request, context):
        yield service.StreamGenerateResponse(accepted={"prompt_tokens": len(request.spec.tokens.ids)})
        async for now, _ in paced(request.spec.stopping.max_new_tokens):
            yield service.StreamGenerateResponse(delta={"text": "x", "token_ids": [1] * now})
        yield service.StreamGenerateResponse(usage={})


class Model(model_grpc.ModelServiceServicer):
    async def GetServerInfo(self, request, context):
        return model.GetServerInfoResponse(version="paced", device="none")

    async def ListModels(self, request, context):
        return model.ListModelsResponse(models=[{"name": "paced"}])


async def serve_http(reader, writer):
    """One request, as the recording proxy asks it."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
    body = await reader.readexactly(length)
    if head.startswith("get"):
        text = b'{"data":[{"id":"paced"}]}' if head.startswith("get /v1/models") else b"{}"
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n"
                     b"Transfer-Encoding: chunked\r\n\r\n")

        def event(data):
            line = b"data: " + data + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(line), line))

        async for _, sent in paced(json.loads(body)["max_tokens"]):
            event(json.dumps({"choices": [{"index": 0, "text": "x"}], "usage": {"completion_tokens": sent}}).encode())
        event(b"[DONE]")
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    writer.close()


async def start():
    """Returns the gRPC and the HTTP address, and the two servers."""
    server = grpc.aio.server()
    service_grpc.add_GenerationServiceServicer_to_server(Generation(), server)
    model_grpc.add_ModelServiceServicer_to_server(Model(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    http = await asyncio.start_server(serve_http, "127.0.0.1", 0)
    return f"127.0.0.1:{port}", "http://127.0.0.1:%d" % http.sockets[0].getsockname()[1], (server, http)
