"""local-quantile routing in a running server: epochs in log and metrics, and an answer again from a recorded epoch."""

import json
import os
import re
import tempfile
import unittest
import urllib.request

from running_server import ROOT, RunningServer, main

FLAGS = ["--moe-routing", "local-quantile", "--routing-virtual-ranks", "8", "--max-num-seqs", "4"]


def complete(server, text, number):
    body = {"prompt": text, "max_tokens": 24, "temperature": 0, "logprobs": 0}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(),
                                     {"x-request-id": "routing-%d" % number})
    with urllib.request.urlopen(request) as reply:
        choice = json.load(reply)["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def metrics(server):
    with urllib.request.urlopen(server.url + "/metrics") as reply:
        return dict(re.findall(r"^k3serve_((?:routing|expert)\S*) (\S+)$", reply.read().decode(), re.M))


class RoutingTest(unittest.TestCase):
    def start(self, *flags):
        server = RunningServer(BINARY, MODEL, *flags)
        self.addCleanup(lambda: server.process.poll() is None and server.process.kill())
        return server

    def stop(self, server):
        self.assertEqual(server.stop(), 0)
        server.log.seek(0)
        return server.log.read().decode()

    def test_epochs_are_told_logged_and_replayed(self):
        with open(os.path.join(ROOT, "LICENSE")) as file:
            text = file.read()
        prompts = [text[at:at + 700] for at in range(0, len(text) - 700, 400)][:20]
        with tempfile.TemporaryDirectory() as folder:
            epochs = os.path.join(folder, "epochs.log")
            server = self.start(*FLAGS, "--routing-log", epochs)
            answers = [complete(server, prompt, i) for i, prompt in enumerate(prompts)]
            figures = metrics(server)
            log = self.stop(server)
            used = {int(number): epoch for number, epoch in
                    re.findall(r"request=routing-(\d+) .* routing_epoch=0\.(\d+)", log)}
            self.assertEqual(len(used), len(prompts))
            self.assertEqual(used[0], "0")  # nothing was known yet
            last = max(number for number, epoch in used.items() if epoch != "0")
            self.assertGreaterEqual(float(figures["routing_epoch"]), float(used[last]))
            self.assertGreater(float(figures["routing_updates_total"]), 0)
            self.assertTrue(any(name.startswith("expert_load_max_over_mean{") for name in figures), figures)
            self.assertIn("routing_override_ratio", figures)

            server = self.start(*FLAGS, "--routing-replay", "%s:0.%s" % (epochs, used[last]))
            for number in (n for n, epoch in used.items() if epoch == used[last]):
                self.assertEqual(complete(server, prompts[number], number), answers[number])
            self.assertEqual(metrics(server).get("routing_epoch", used[last]), used[last])
            self.stop(server)

            # Epoch 0 is exact routing.
            server = self.start("--measure-routing", "--routing-virtual-ranks", "8")
            self.assertEqual(complete(server, prompts[0], 0), answers[0])
            self.assertEqual(metrics(server)["routing_override_ratio"], "0")
            self.assertNotIn("routing_epoch=", self.stop(server))

    def test_what_cannot_be_replayed_ends_the_start(self):
        with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
            file.write("rank 0 epoch 1 layers 2 groups 8 delta " + "00000000" * 16 + "\n")
            file.flush()
            for replay, why in (("nothing", "must be FILE:RANK.EPOCH"), (file.name + ":0.2", "no epoch 2 of rank 0"),
                                (file.name + ":0.1", "the recorded epoch is of 2 layers")):
                with self.assertRaisesRegex(RuntimeError, why):
                    RunningServer(BINARY, MODEL, *FLAGS, "--routing-replay", replay)


if __name__ == "__main__":
    def configure(binary, model):
        global BINARY, MODEL
        BINARY, MODEL = binary, model
    main(configure)
