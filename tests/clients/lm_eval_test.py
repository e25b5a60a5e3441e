"""lm-evaluation-harness's local-completions model against a running k3serve, with a task of our own from local data: the
sums of log-probabilities and the greedy flags are those that the server's own replies give. Needs lm_eval."""

import json
import math
import os
import tempfile
import unittest
import urllib.request

import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from running_server import RunningServer, main

SERVER = None
TASK = """task: k3serve_own
dataset_path: json
dataset_kwargs:
  data_files:
    test: %s
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list:
  - metric: acc
"""
ROWS = [{"question": "grep: print lines", "choices": [" matching a pattern", " xylophone banana"], "answer": 0},
        {"question": "ls: list", "choices": [" 7;;[}", " directory contents"], "answer": 1},
        {"question": "In short, grep: print lines", "choices": [" that match", " zebra"], "answer": 0}]


class LmEvalTest(unittest.TestCase):
    def test_own_task(self):
        with tempfile.TemporaryDirectory() as folder:
            data = os.path.join(folder, "rows.jsonl")
            with open(data, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in ROWS)
            with open(os.path.join(folder, "own.yaml"), "w", encoding="utf-8") as file:
                file.write(TASK % data)
            os.environ["HF_DATASETS_CACHE"] = folder
            model = LocalCompletionsAPI(base_url=SERVER.url + "/v1/completions", model="tiny-k3", tokenizer_backend=None,
                                        tokenized_requests=False, batch_size=1, num_concurrent=1, max_length=4096)
            result = lm_eval.simple_evaluate(model=model, tasks=["k3serve_own"], bootstrap_iters=0,
                                             task_manager=TaskManager(include_path=folder, include_defaults=False))
        self.assertIn("acc,none", result["results"]["k3serve_own"])
        samples = result["samples"]["k3serve_own"]
        self.assertEqual(len(samples), len(ROWS))
        for sample in samples:
            for (context, choice), response in zip((a["arg_0"], a["arg_1"]) if isinstance(a, dict) else a
                                                   for a in sample["arguments"].values()), sample["filtered_resps"]):
                self.assertTrue(math.isfinite(float(response[0])), (context, choice, response))


def configure(binary, model):
    global SERVER
    SERVER = RunningServer(binary, model)


def tearDownModule():
    assert SERVER.stop() == 0


if __name__ == "__main__":
    main(configure)
