"""Bodies that ask for stack or memory (cases B29 and B30), against a server whose threads have 256 kB of stack."""

import http.client
import json
import resource
import time
import unittest

from running_server import RunningServer, main

STACK = 256 << 10
CHAT = "/v1/chat/completions"
USER = '"messages":[{"role":"user","content":"a"}]'


def resident():
    with open(f"/proc/{SERVER.process.pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:")) << 10


def connect():
    host, port = SERVER.http.split(":")
    return http.client.HTTPConnection(host, int(port), timeout=60)


def post(body):
    """Status, whole reply and seconds of one chat request."""
    connection = connect()
    start = time.monotonic()
    connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    return reply.status, json.loads(text), time.monotonic() - start


class HostileBodyTest(unittest.TestCase):
    def healthy(self):
        status, reply, _ = post("{" + USER + ',"max_tokens":8,"temperature":0}')
        self.assertEqual(status, 200)
        return reply["choices"][0]["message"]

    def test_deep_nesting_on_a_small_stack(self):
        before = self.healthy()
        for depth in (100, 1000, 10_000, 100_000):
            nested = "[" * depth + "]" * depth
            objects = '{"a":' * depth + "1" + "}" * depth
            for body in ('{%s,"unknown":%s}' % (USER, nested), '{%s,"tools":%s}' % (USER, nested),
                         '{"messages":[{"role":"user","content":%s}]}' % nested, '{%s,"response_format":%s}' % (USER, nested),
                         '{%s,"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}' % (USER, objects),
                         '{%s,"unknown":%s' % (USER, "[" * depth)):
                status, reply, seconds = post(body)
                self.assertEqual(status, 400, (depth, body[:100]))
                self.assertEqual(reply["error"]["type"], "invalid_request_error")
                self.assertLess(seconds, 1)
            self.assertEqual(self.healthy(), before)
        fine = '{"a":' * 20 + "1" + "}" * 20
        status, _, _ = post('{%s,"max_tokens":1,"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}' %
                            (USER, fine))
        self.assertEqual(status, 200)

    def test_numbers_allocate_nothing(self):
        self.healthy()
        before = resident()
        for field, param in (('"n":100000', "n"), ('"max_tokens":2147483648', "max_tokens"), ('"max_tokens":1e18', "max_tokens"),
                             ('"top_logprobs":1000000000,"logprobs":true', "top_logprobs"),
                             ('"min_tokens":2147483647', "min_tokens"), ('"top_k":1e300', "top_k")):
            status, reply, _ = post("{%s,%s}" % (USER, field))
            self.assertEqual((status, reply["error"]["param"]), (400, param))
        self.assertLess(resident() - before, 16 << 20)

    def test_a_large_body_is_not_kept(self):
        before_answer = self.healthy()
        before, most = resident(), 0
        connection = connect()
        connection.putrequest("POST", CHAT)
        connection.putheader("Content-Length", str(200 << 20))
        connection.endheaders()
        piece = b" " * (1 << 20)
        for _ in range(200):
            connection.send(piece)
            most = max(most, resident())
        reply = connection.getresponse()
        self.assertEqual(reply.status, 413)
        self.assertEqual(json.loads(reply.read())["error"]["type"], "invalid_request_error")
        connection.close()
        self.assertLess(most - before, (BODY_MIB + 64) << 20)
        self.assertEqual(self.healthy(), before_answer)


def configure(binary, model):
    global SERVER, BODY_MIB
    BODY_MIB = 16
    SERVER = RunningServer(binary, model, "--max-body-mib", str(BODY_MIB), limits={resource.RLIMIT_STACK: (STACK, STACK)})


def tearDownModule():
    code = SERVER.stop()
    assert code == 0, code


if __name__ == "__main__":
    main(configure)
