"""Tool calls through the real `openai` package, whole and streamed, against the HTTP front end over a scripted engine."""

import argparse
import json
import subprocess
import sys
import unittest

import openai

SERVER = None
PORT = 0
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
         for name in ("get_weather", "now")]
CALLS = ("plan⟨/think⟩⟨response⟩Let me look.⟨/response⟩⟨tools⟩⟨call tool=\"get_weather\" index=\"1\"⟩"
         "⟨argument key=\"city\" type=\"string\"⟩Os\"lo 😀⟨/argument⟩⟨argument key=\"days\" type=\"number\"⟩3⟨/argument⟩⟨/call⟩"
         "⟨call tool=\"now\" index=\"2\"⟩⟨/call⟩⟨/tools⟩⟨/message⟩")


def force(text):
    SERVER.stdin.write(text + "\n")
    SERVER.stdin.flush()
    assert SERVER.stdout.readline() == "ok\n"


def api():
    return openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0).chat.completions


class ToolsTest(unittest.TestCase):
    def check(self, choice):
        self.assertEqual(choice.finish_reason, "tool_calls")
        self.assertEqual(choice.message.content, "Let me look.")
        calls = choice.message.tool_calls
        self.assertEqual([(c.id, c.type, c.function.name) for c in calls],
                         [("get_weather_0", "function", "get_weather"), ("now_1", "function", "now")])
        self.assertEqual(json.loads(calls[0].function.arguments), {"city": "Os\"lo 😀", "days": 3})
        self.assertEqual(json.loads(calls[1].function.arguments), {})

    def setUp(self):
        force(CALLS)

    def test_whole(self):
        reply = api().create(model="tiny-k3", messages=[{"role": "user", "content": "w"}], tools=TOOLS)
        self.check(reply.choices[0])
        self.assertEqual(reply.choices[0].message.reasoning_content, "plan")

    def test_stream_accumulator(self):
        with api().stream(model="tiny-k3", messages=[{"role": "user", "content": "w"}], tools=TOOLS) as stream:
            for _ in stream:
                pass
            self.check(stream.get_final_completion().choices[0])

    def test_a_whole_agent_turn(self):
        messages = [{"role": "user", "content": "w"}]
        first = api().create(model="tiny-k3", messages=messages, tools=TOOLS)
        messages.append(first.choices[0].message.model_dump(exclude_none=True))
        for call in first.choices[0].message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
        force("good⟨/think⟩⟨response⟩All done.⟨/response⟩⟨/message⟩")
        second = api().create(model="tiny-k3", messages=messages, tools=TOOLS)
        self.assertEqual(second.choices[0].message.content, "All done.")
        self.assertEqual(second.choices[0].finish_reason, "stop")
        force(CALLS)
        third = api().create(model="tiny-k3", messages=messages, tools=TOOLS)
        self.assertEqual([c.id for c in third.choices[0].message.tool_calls], ["get_weather_2", "now_3"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True, help="the program forced_server")
    args, rest = parser.parse_known_args()
    SERVER = subprocess.Popen([args.server], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True)
    PORT = int(SERVER.stdout.readline().split()[1])
    try:
        program = unittest.main(argv=[sys.argv[0], *rest], exit=False)
    finally:
        SERVER.stdin.close()
        SERVER.wait(timeout=20)
        SERVER.stdout.close()
    sys.exit(not program.result.wasSuccessful())
