"""The load generator guidellm completes a run against k3serve without a failed request. Needs guidellm, which is large:
not among the packages of requirements.txt."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

from running_server import RunningServer, main

REQUESTS = 20


class GuidellmTest(unittest.TestCase):
    def test_concurrent_run(self):
        server = RunningServer(BINARY, MODEL)
        with tempfile.TemporaryDirectory() as folder:
            prompts = os.path.join(folder, "prompts.jsonl")
            with open(prompts, "w", encoding="utf-8") as file:
                for i in range(2 * REQUESTS):
                    file.write(json.dumps({"prompt": "What does command %d do?" % i, "output_tokens_count": 24}) + "\n")
            report = os.path.join(folder, "report.json")
            command = [os.path.join(os.path.dirname(sys.executable), "guidellm"), "run",
                       "--backend", "kind=openai_http,target=" + server.url, "--profile", "kind=concurrent,streams=4",
                       "--constraint", "kind=max_requests,count=%d" % REQUESTS, "--data", "kind=json_file,path=" + prompts,
                       "--output", "kind=json,path=" + report, "--disable-progress"]
            done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
                                  timeout=200, check=False)
            self.assertEqual(done.returncode, 0, done.stderr[-2000:])
            with open(report, encoding="utf-8") as file:
                benchmark = json.load(file)["benchmarks"][0]
        self.assertEqual(server.stop(), 0)
        totals = benchmark["metrics"]["request_totals"]
        self.assertEqual((totals["successful"], totals["errored"]), (REQUESTS, 0))


def configure(binary, model):
    global BINARY, MODEL
    BINARY, MODEL = binary, model


if __name__ == "__main__":
    main(configure)
