"""Proxies between a load harness and a server that write down when what passes: the same requests, seen by somebody else.

A record is (arrival of the request, [(time, tokens)], end)."""

import asyncio
import json
import time
import urllib.parse

import grpc

from grpc_stubs import model_grpc, service_grpc


class GrpcProxy:
    def __init__(self):
        self.records = []

    async def start(self, target):
        """Returns the address."""
        records = self.records
        channel = self.channel = grpc.aio.insecure_channel(target)

        class Generation(service_grpc.GenerationServiceServicer):
            async def StreamGenerate(self, request, context):
                arrived, messages = time.perf_counter(), []
                async for event in service_grpc.GenerationServiceStub(channel).StreamGenerate(request):
                    tokens = len(event.delta.token_ids) if event.WhichOneof("event") == "delta" else 0
                    if tokens:
                        messages.append((time.perf_counter(), tokens))
                    yield event
                records.append((arrived, messages, time.perf_counter()))

        class Model(model_grpc.ModelServiceServicer):
            async def GetServerInfo(self, request, context):
                return await model_grpc.ModelServiceStub(channel).GetServerInfo(request)

            async def ListModels(self, request, context):
                return await model_grpc.ModelServiceStub(channel).ListModels(request)

        self.server = grpc.aio.server()
        service_grpc.add_GenerationServiceServicer_to_server(Generation(), self.server)
        model_grpc.add_ModelServiceServicer_to_server(Model(), self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return f"127.0.0.1:{port}"

    async def stop(self):
        await self.server.stop(None)
        await self.channel.close()


class HttpProxy:
    """One request a connection. Bytes pass as they are; the lines of events are read on the way."""

    def __init__(self):
        self.records = []

    async def start(self, url):
        self.url = urllib.parse.urlsplit(url)
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return "http://127.0.0.1:%d%s" % (self.server.sockets[0].getsockname()[1], self.url.path)

    async def stop(self):
        self.server.close()

    async def serve(self, reader, writer):
        try:
            await self.forward(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def forward(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        arrived = time.perf_counter()
        lines = [line for line in head.split(b"\r\n") if line]
        length = next((int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")), 0)
        body = await reader.readexactly(length)
        lines = [line for line in lines if not line.lower().startswith((b"connection:", b"host:"))]
        lines += [b"Host: " + self.url.netloc.encode(), b"Connection: close"]
        answer, request = await asyncio.open_connection(self.url.hostname, self.url.port or 80)
        request.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        messages, partial, total = [], b"", 0
        while True:
            data = await answer.read(65536)
            if not data:
                break
            now = time.perf_counter()
            *whole, partial = (partial + data).split(b"\n")
            for line in whole:
                tokens = self.tokens(line, total)
                if tokens:
                    messages.append((now, tokens))
                    total += tokens
            writer.write(data)
            await writer.drain()
        if messages:
            self.records.append((arrived, messages, time.perf_counter()))
        request.close()

    @staticmethod
    def tokens(line, total):
        """Those that a line of the answer brings, after `total` of them."""
        if not line.startswith(b"data: {"):
            return 0
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RuntimeError(chunk["error"])
        if not chunk["choices"]:
            return 0
        usage = chunk.get("usage")
        return usage["completion_tokens"] - total if usage else int(bool(chunk["choices"][0]["text"]))
