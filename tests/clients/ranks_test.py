"""One server over several processes: started by the variables of each launcher, and a process that is killed. The other
one ends with exit code 70 and says why, and clients hear of it; nothing hangs (B47, B48)."""

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request

from running_server import ROOT, RunningServer, main

DEVICE_FAULT = 70
LIMIT = 60  # seconds for an end that takes a few; the machine may be busy


def free_port():
    """One whose successor is free too: the ranks meet there."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise RuntimeError("no two free ports in a row")


def torchrun(rank, ranks, port):
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port)}


def open_mpi(rank, ranks, port):
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(ranks),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def slurm(rank, ranks, port):
    return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(ranks), "SLURM_LOCALID": str(rank),
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def leader_worker_set(rank, ranks, port):
    """The variables that our manifest sets from the controller's."""
    path = os.path.join(ROOT, "docker", "kubernetes-multi-node", "leaderworkerset.yaml")
    with open(path) as file:
        text = file.read()
    block = text[text.index("env: &env"):text.index("ports:")]
    controller = {"$(LWS_LEADER_ADDRESS)": "127.0.0.1", "$(LWS_GROUP_SIZE)": str(ranks)}
    env = {"MASTER_PORT": str(port)}  # the manifest takes the default, which another test may hold
    for name, value in re.findall(r"- name: (\w+)\n +value: (\S+)", block):
        env[name] = controller[value]
    index = re.search(r"- name: (\w+)\n +valueFrom:\n +fieldRef:\n +fieldPath: metadata.labels\['(\S+)'\]", block)
    assert index.group(2) == "leaderworkerset.sigs.k8s.io/worker-index", index.group(2)
    env[index.group(1)] = str(rank)
    return env


LAUNCHERS = {f.__name__: f for f in (torchrun, open_mpi, slurm, leader_worker_set)}


class RanksTest(unittest.TestCase):
    def launch(self, flags, launcher=torchrun):
        """Two processes; returns the leader and the follower's process, its log in `log`."""
        port = free_port()
        # Of the machine's own launcher, if there is one, nothing is left.
        clean = {name: "" for name in os.environ if name.startswith(("SLURM_", "OMPI_"))}
        log = tempfile.TemporaryFile()
        follower = subprocess.Popen([BINARY, "serve", MODEL, "--device", "cpu", "--threads", "1", *flags],
                                    stdout=subprocess.DEVNULL, stderr=log,
                                    env={**os.environ, **clean, **launcher(1, 2, port)})
        self.addCleanup(lambda: follower.poll() is None and follower.kill())
        follower.log = log
        self.addCleanup(log.close)
        leader = RunningServer(BINARY, MODEL, "--threads", "1", *flags, env={**clean, **launcher(0, 2, port)})
        self.addCleanup(lambda: leader.process.poll() is None and leader.process.kill())
        return leader, follower

    def complete(self, url):
        body = json.dumps({"prompt": "ls is", "max_tokens": 12, "temperature": 0, "ignore_eos": True}).encode()
        with urllib.request.urlopen(url + "/v1/completions", body, timeout=LIMIT) as reply:
            return json.load(reply)["choices"][0]["text"]

    @staticmethod
    def text(log):
        log.seek(0)
        return log.read().decode()

    def test_every_launcher_gives_the_answers_of_one_process(self):
        alone = RunningServer(BINARY, MODEL)
        expected = self.complete(alone.url)
        self.assertEqual(alone.stop(), 0)
        layouts = (["--tensor-parallel-size", "2"], ["--data-parallel-size", "2"],
                   ["--data-parallel-size", "2", "--expert-transport", "all-to-all"], ["--tensor-parallel-size", "2"])
        for (name, launcher), flags in zip(LAUNCHERS.items(), layouts):
            with self.subTest(name, flags=flags):
                leader, follower = self.launch(flags, launcher)
                self.assertEqual(self.complete(leader.url), expected)
                with urllib.request.urlopen(leader.url + "/metrics") as reply:
                    page = reply.read().decode()
                kind = ("all_reduce" if "--tensor-parallel-size" in flags else
                        "all_to_all" if "all-to-all" in flags else "all_gather")
                for metric in ("collectives_total", "collective_bytes_total", "collective_seconds_total"):
                    value = re.search(r'k3serve_%s{kind="%s"} (\S+)' % (metric, kind), page)
                    self.assertIsNotNone(value, metric)
                    self.assertGreater(float(value.group(1)), 0, metric)
                steps = re.search(r"k3serve_step_collective_seconds_count (\d+)", page)
                self.assertGreaterEqual(int(steps.group(1)), 11)  # the last of twelve is counted after its answer
                self.assertEqual(leader.stop(), 0)
                self.assertEqual(follower.wait(timeout=LIMIT), 0)
                self.assertIn("the first process has ended the server", self.text(follower.log))

    def kill_one(self, flags, leader_dies):
        leader, follower = self.launch(flags)
        begun = threading.Event()
        ends = []

        def stream():
            body = json.dumps({"prompt": [100] * 5, "max_tokens": 100000, "ignore_eos": True, "stream": True}).encode()
            try:
                with urllib.request.urlopen(leader.url + "/v1/completions", body, timeout=LIMIT) as reply:
                    for line in reply:
                        begun.set()
                        if b'"error"' in line:
                            ends.append(line.decode())
                ends.append("closed")
            except OSError as error:
                ends.append(repr(error))

        thread = threading.Thread(target=stream)
        thread.start()
        self.assertTrue(begun.wait(LIMIT))
        victim, other = (leader.process, follower) if leader_dies else (follower, leader.process)
        killed = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        code = other.wait(timeout=LIMIT)
        took = time.monotonic() - killed
        thread.join(LIMIT)
        self.assertFalse(thread.is_alive(), "the stream hangs")
        log = self.text(follower.log if leader_dies else leader.log)
        self.assertEqual(code, DEVICE_FAULT, log)
        self.assertLess(took, 30)
        # Whichever is noticed first: the end of the process, or of a collective under way with its rank.
        dead = 0 if leader_dies else 1
        self.assertRegex(log, "(process %d of 2 is lost|rank %d of 2: the connection is lost)" % (dead, dead))
        if not leader_dies:  # the client was told, and not only cut off
            self.assertIn("error", ends[0], ends)

    def test_a_killed_follower_ends_the_server(self):
        for flags in (["--tensor-parallel-size", "2"], ["--data-parallel-size", "2"],
                      ["--data-parallel-size", "2", "--expert-transport", "all-to-all"]):
            with self.subTest(flags=flags):
                self.kill_one(flags, leader_dies=False)

    def test_a_killed_leader_ends_the_follower(self):
        self.kill_one(["--tensor-parallel-size", "2"], leader_dies=True)

    def test_a_follower_that_dies_while_idle_is_noticed(self):
        leader, follower = self.launch(["--data-parallel-size", "2"])
        ready = leader.url + "/health/ready"
        with urllib.request.urlopen(ready) as reply:
            self.assertEqual(reply.status, 200)
        follower.send_signal(signal.SIGKILL)
        seen = set()
        while leader.process.poll() is None:
            try:
                with urllib.request.urlopen(ready, timeout=LIMIT) as reply:
                    seen.add(reply.status)
            except urllib.error.HTTPError as error:
                seen.add(error.code)
            except OSError:
                break
            time.sleep(0.02)
        self.assertEqual(leader.process.wait(timeout=LIMIT), DEVICE_FAULT)
        self.assertIn(503, seen)  # the server says so before it ends

    def test_a_frozen_follower_ends_the_server(self):
        leader, follower = self.launch(["--tensor-parallel-size", "2", "--rank-timeout", "2"])  # five times on the CPU
        follower.send_signal(signal.SIGSTOP)
        self.addCleanup(lambda: follower.poll() is None and follower.send_signal(signal.SIGCONT))
        with self.assertRaises(urllib.error.HTTPError) as error:
            self.complete(leader.url)
        self.assertEqual(error.exception.code, 500)
        self.assertEqual(leader.process.wait(timeout=LIMIT), DEVICE_FAULT)
        self.assertIn("a step has not ended within 10 s", self.text(leader.log))

    def test_processes_that_disagree_end_at_once(self):
        port = free_port()
        other = subprocess.Popen([BINARY, "serve", MODEL, "--device", "cpu", "--data-parallel-size", "2",
                                  "--expert-transport", "all-to-all"], stderr=subprocess.PIPE, text=True,
                                 env={**os.environ, **torchrun(1, 2, port)})
        own = subprocess.run([BINARY, "serve", MODEL, "--device", "cpu", "--data-parallel-size", "2", "--port", "0",
                              "--grpc-port", "0"], capture_output=True, text=True, timeout=LIMIT,
                             env={**os.environ, **torchrun(0, 2, port)})
        text = other.communicate(timeout=LIMIT)[1]
        self.assertNotEqual(own.returncode, 0)
        self.assertNotEqual(other.returncode, 0)
        for log in (own.stderr, text):
            self.assertIn("was started for something else", log)


def configure(binary, model_dir):
    global BINARY, MODEL
    BINARY, MODEL = binary, model_dir


if __name__ == "__main__":
    main(configure)
