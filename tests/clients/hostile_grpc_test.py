"""Strangers who begin large gRPC messages and never end them: memory stays bounded and the server goes on."""

import select
import socket
import struct
import subprocess
import time
import unittest

from running_server import RunningServer, main

MESSAGE_MIB = 8  # 256 MiB of buffers
CONNECTIONS, STREAMS = 2, 70
SIZE = 7 << 20
PATH = "/k3serve.inference.v1.GenerationService/Generate"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name, value):
    """A literal header field that is not indexed, in HPACK."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


class Flood:
    """One HTTP/2 connection that sends all of many messages but their last kilobyte."""

    def __init__(self, address):
        host, port = address.split(":")
        self.socket = socket.create_connection((host, int(port)))
        self.window = 65535
        self.initial = 65535
        self.windows, self.left = {}, {}
        self.input = b""
        self.over = False
        fields = b"".join(header(*field) for field in ((":method", "POST"), (":scheme", "http"), (":path", PATH),
                                                       (":authority", "x"), ("te", "trailers"),
                                                       ("content-type", "application/grpc")))
        begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)
        for stream in range(1, 2 * STREAMS, 2):
            begin += frame(HEADERS, 4, stream, fields) + frame(DATA, 0, stream, b"\0" + struct.pack(">I", SIZE))
            self.window -= 5
            self.windows[stream], self.left[stream] = self.initial - 5, SIZE - 1024
        self.socket.sendall(begin)
        self.socket.setblocking(False)

    def read(self):
        try:
            piece = self.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        self.over = self.over or not piece
        self.input += piece
        while len(self.input) >= 9:
            size = int.from_bytes(self.input[:3], "big")
            if len(self.input) < 9 + size:
                return
            kind, flags, stream = struct.unpack(">BBI", self.input[3:9])
            payload, self.input = self.input[9:9 + size], self.input[9 + size:]
            if kind == WINDOW_UPDATE and stream == 0:
                self.window += struct.unpack(">I", payload)[0]
            elif kind == WINDOW_UPDATE and stream in self.windows:
                self.windows[stream] += struct.unpack(">I", payload)[0]
            elif kind == SETTINGS and not flags:
                for at in range(0, size, 6):
                    key, value = struct.unpack(">HI", payload[at:at + 6])
                    if key == 4:
                        self.windows = {one: window + value - self.initial for one, window in self.windows.items()}
                        self.initial = value
                self.send(frame(SETTINGS, 1, 0))
            elif kind == PING and not flags:
                self.send(frame(PING, 1, 0, payload))
            elif kind == RST_STREAM:
                self.left.pop(stream, None)
            elif kind == GOAWAY:
                self.over = True

    def send(self, data):
        try:
            self.socket.setblocking(True)
            self.socket.settimeout(10)
            self.socket.sendall(data)
            self.socket.setblocking(False)
        except OSError:
            self.over = True

    def write(self):
        """How many bytes of messages the server's windows took."""
        sent = 0
        for stream in list(self.left):
            size = min(16384, self.window, self.windows[stream], self.left[stream])
            if size <= 0 or self.over:
                continue
            self.send(frame(DATA, 0, stream, bytes(size)))
            self.window -= size
            self.windows[stream] -= size
            self.left[stream] -= size
            sent += size
        return sent


def peak_mib():
    with open(f"/proc/{SERVER.process.pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) / 1024


class UnfinishedMessagesTest(unittest.TestCase):
    def ask(self):
        return subprocess.run([BINARY, "generate", "hi", "--max-tokens", "4", "--target", SERVER.grpc], timeout=60,
                              capture_output=True, text=True).returncode

    def test_memory_stays_bounded(self):
        self.assertEqual(self.ask(), 0)
        before = peak_mib()
        floods = [Flood(SERVER.grpc) for _ in range(CONNECTIONS)]
        progress, sent = time.monotonic(), 0
        while time.monotonic() - progress < 3 and any(flood.left and not flood.over for flood in floods):
            now = sum(flood.write() for flood in floods)
            select.select([flood.socket for flood in floods if not flood.over], [], [], 0 if now else 0.05)
            for flood in floods:
                flood.read()
            sent += now
            if now:
                progress = time.monotonic()
            if not any(any(flood.left.values()) for flood in floods):
                break
        # Calls are ended while more comes in, so there is some overshoot.
        self.assertGreater(sent, 200 << 20, "the flood came through")
        self.assertLess(peak_mib() - before, 850, f"{sent >> 20} MiB were sent")
        self.assertTrue(any(flood.over or len(flood.left) < STREAMS for flood in floods), "some were ended")
        for flood in floods:
            flood.socket.close()
        self.assertEqual(self.ask(), 0)


def configure(binary, model):
    global SERVER, BINARY
    BINARY = binary
    SERVER = RunningServer(binary, model, "--max-message-mib", str(MESSAGE_MIB))


def tearDownModule():
    code = SERVER.stop()
    assert code == 0, code


if __name__ == "__main__":
    main(configure)
