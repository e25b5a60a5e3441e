"""lm-evaluation-harness runs against k3serve through its local-completions model, with the server's own tokenizer:
multiple choice, perplexity and generation. What it computes is what the server's log-probabilities say. Needs lm_eval, which
is large: not among the packages of requirements.txt."""

import glob
import json
import os
import subprocess
import sys
import tempfile
import unittest
import urllib.request

from running_server import RunningServer, main

CONTEXTS = ["grep: print lines", "ls: list", "cat: concatenate", "tar: create", "find: search"]
UNLIKELY = " purple engines"
MAX_TOKENS = 16
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files: {test: %s}
test_split: test
"""
TASKS = {
    "k3_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "k3_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - {metric: byte_perplexity}
""",
    "k3_until": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{expected}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: %d, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""" % MAX_TOKENS,
}


def post(path, body):
    request = urllib.request.Request(SERVER.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def complete(prompt, max_tokens, **fields):
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **fields}
    return post("/v1/completions", body)["choices"][0]


def tokens(text):
    return post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]


def score(ids, context_length):
    """Sum of the log-probabilities behind the context and whether each is its position's best, by the server's echo."""
    logprobs = complete(ids, 0, echo=True, logprobs=1)["logprobs"]
    scores, tops = logprobs["token_logprobs"][context_length:], logprobs["top_logprobs"][context_length:]
    return sum(scores), all(s == max(top.values()) for s, top in zip(scores, tops))


def evaluate(documents, batch_size=1, **model_args):
    """Runs all tasks. Returns their results and each task's answers in the order of the documents."""
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "data.jsonl")
        with open(data, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(document) + "\n" for document in documents)
        for name, text in TASKS.items():
            with open(os.path.join(folder, name + ".yaml"), "w", encoding="utf-8") as file:
                file.write("task: " + name + COMMON % data + text)
        model_args = {"model": "tiny-k3", "base_url": SERVER.url + "/v1/completions", "tokenizer_backend": "remote",
                      **model_args}
        out = os.path.join(folder, "out")
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", ",".join(TASKS),
                   "--batch_size", str(batch_size),
                   "--model_args", ",".join("%s=%s" % item for item in model_args.items()),
                   "--include_path", folder, "--output_path", out, "--log_samples"]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": os.path.join(folder, "cache")}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
        if done.returncode != 0:
            raise AssertionError(done.stderr[-3000:])
        with open(glob.glob(out + "/**/results_*.json", recursive=True)[0], encoding="utf-8") as file:
            results = json.load(file)["results"]
        answers = {}
        for name in TASKS:
            with open(glob.glob(f"{out}/**/samples_{name}_*.jsonl", recursive=True)[0], encoding="utf-8") as file:
                samples = sorted((json.loads(line) for line in file), key=lambda sample: sample["doc_id"])
            answers[name] = [[one[0] for one in sample["resps"]] for sample in samples]
    return results, answers


class LmEvalTest(unittest.TestCase):
    def test_scores_are_the_servers(self):
        documents = []
        for context in CONTEXTS:
            greedy = complete(context, 4, ignore_eos=True)["text"]
            expected = complete(context, MAX_TOKENS, stop=["\n", "."])["text"]
            documents.append({"question": context, "choices": [UNLIKELY, greedy], "answer": 1, "expected": expected})
        with urllib.request.urlopen(SERVER.url + "/tokenizer_info") as reply:
            # The harness would look for the token by encoding its name, which is text to /tokenize.
            begin = json.load(reply)["bos_token_id"]
        results, answers = evaluate(documents, custom_prefix_token_id=begin)
        self.assertEqual(results["k3_until"]["exact_match,none"], 1.0)
        greedy_seen = right = 0
        for i, document in enumerate(documents):
            self.assertEqual(answers["k3_until"][i], [document["expected"]])
            context = tokens(document["question"])
            scores = []
            for choice, (total, is_greedy) in zip(document["choices"], answers["k3_choice"][i]):
                ids = tokens(document["question"] + choice)
                own, own_greedy = score(ids, len(context))
                self.assertAlmostEqual(float(total), own, delta=1e-4)
                self.assertEqual(is_greedy == "True", own_greedy)
                greedy_seen += own_greedy
                scores.append(own)
            right += scores[document["answer"]] == max(scores)
            own, _ = score([begin] + context, 1)
            self.assertAlmostEqual(float(answers["k3_rolling"][i][0]), own, delta=1e-4)
        self.assertEqual(results["k3_choice"]["acc,none"], right / len(documents))
        self.assertGreater(right, len(documents) // 2)
        self.assertGreaterEqual(greedy_seen, len(CONTEXTS) // 2)

        batched_results, batched = evaluate(documents, custom_prefix_token_id=begin, batch_size=4, num_concurrent=3)
        self.assertEqual(batched["k3_until"], answers["k3_until"])
        for mine, theirs in zip(answers["k3_choice"], batched["k3_choice"]):
            for (total, is_greedy), (other, other_greedy) in zip(mine, theirs):
                self.assertAlmostEqual(float(total), float(other), delta=1e-3)
                self.assertEqual(is_greedy, other_greedy)
        self.assertAlmostEqual(batched_results["k3_rolling"]["byte_perplexity,none"],
                               results["k3_rolling"]["byte_perplexity,none"], delta=1e-3)
        print(json.dumps({name: {key: value for key, value in result.items() if key.endswith(",none")}
                          for name, result in results.items()}), answers["k3_choice"][0], answers["k3_until"][0])


def configure(binary, model):
    global SERVER
    SERVER = RunningServer(binary, model, "--served-model-name", "tiny-k3")


def tearDownModule():
    code = SERVER.stop()
    assert code == 0, code


if __name__ == "__main__":
    main(configure)
