"""Mixed load for a long time against k3serve on the CPU: chat, tools, streams, log-probabilities, shared prefixes,
cancels, disconnects, slow and stopped readers, deadlines, bad input, and drains in the middle of it. Checks that

  every answer is the one that the same request gets alone on a fresh server without a prefix cache,
  no request takes longer than its limit (a stuck stream),
  memory and open files do not grow: the drains fall into the first quarter of the time, the last life of the server
    lasts the rest, and its memory must be flat from its sixth minute on (in lives shorter than ten, the second half),
  afterwards nothing runs, no page and no slot is held, and each accepted request has one outcome.

  tests/clients/soak.py --seconds 3600 --drains 6      an hour; scripts/soak_server.sh builds first
  tests/clients/soak.py --seconds 20 --drains 1        the short form, part of the tests

What the load consists of is in soak_load.py. Needs grpcio. Prints figures for each life of the server and a summary."""

import argparse
import os
import re
import signal
import sys
import time
import urllib.request

from running_server import ROOT, RunningServer
from soak_load import Failures, Load

FLAGS = ["--max-num-seqs", "8", "--max-queue", "64", "--latent-pages", "100", "--state-slots", "8", "--snapshot-slots",
         "16", "--snapshot-interval", "128", "--shutdown-timeout", "20", "--log-level", "info"]
DRAIN_SHARE = 0.25  # of the time, for the lives that end with a drain
WARM_UP = 300  # seconds of a life until its memory must be flat


def status(server):
    """Resident memory in MB, open files."""
    with open(f"/proc/{server.process.pid}/status") as file:
        rss = int(re.search(r"VmRSS:\s+(\d+) kB", file.read()).group(1)) / 1024
    return rss, len(os.listdir(f"/proc/{server.process.pid}/fd"))


def metric(server, name):
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.read().decode().splitlines()
                   if re.match(rf"k3serve_{name}(\{{| )", line))


class Soak:
    def __init__(self, args):
        self.args = args
        self.failures = Failures()
        self.addresses = {}
        self.load = Load(self.addresses, self.failures)

    def start(self):
        """A server at the addresses of the one before."""
        ports = []
        if self.addresses:
            ports = ["--port", self.addresses["http"].split(":")[1], "--grpc-port", self.addresses["grpc"].split(":")[1]]
        server = RunningServer(self.args.binary, self.args.model, *FLAGS, *ports)
        self.addresses.update(http=server.http, grpc=server.grpc)
        return server

    def learn(self):
        reference = RunningServer(self.args.binary, self.args.model, "--no-enable-prefix-caching")
        self.addresses.update(http=reference.http, grpc=reference.grpc)
        self.load.learn()
        reference.stop()
        reference.log.close()

    def watch(self, server, seconds):
        """Samples of (time, memory in MB, open files) while the load runs."""
        samples = []
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            if server.process.poll() is not None:
                raise SystemExit(f"soak: the server ended with {server.process.returncode}")
            samples.append((time.monotonic() - begin, *status(server)))
            self.load.look_for_stuck()
            time.sleep(min(1.0, seconds / 20))
        return samples

    def check_memory(self, samples):
        """The line of least squares through the samples after the warm-up must rise by less than the limit."""
        warm_up = min(WARM_UP, samples[-1][0] / 2)
        flat = [sample for sample in samples if sample[0] >= warm_up]
        mean_t = sum(t for t, _, _ in flat) / len(flat)
        mean_m = sum(m for _, m, _ in flat) / len(flat)
        spread = sum((t - mean_t) ** 2 for t, _, _ in flat)
        slope = sum((t - mean_t) * (m - mean_m) for t, m, _ in flat) / spread if spread else 0
        seconds = flat[-1][0] - flat[0][0]
        print(f"soak: {samples[-1][0]:.0f} s, memory {samples[0][1]:.0f} to {samples[-1][1]:.0f} MB, in the last "
              f"{seconds:.0f} s from {min(m for _, m, _ in flat):.0f} to {max(m for _, m, _ in flat):.0f} with a slope of "
              f"{slope * seconds:+.1f} MB, files {samples[0][2]} to {samples[-1][2]}", flush=True)
        if slope * seconds > self.args.max_rise_mb:
            self.failures.add(f"memory rose by {slope * seconds:.0f} MB in the last {seconds:.0f} s of a life")

    def check_idle(self, server):
        until = time.monotonic() + 20
        gauges = ("requests_running", "requests_waiting", "latent_pages_used", "state_slots_used")
        while any(metric(server, gauge) for gauge in gauges):
            if time.monotonic() > until:
                return self.failures.add(f"after the load: { {gauge: metric(server, gauge) for gauge in gauges} }")
            time.sleep(0.1)
        time.sleep(0.5)
        accepted, finished = metric(server, "requests_accepted_total"), metric(server, "requests_finished_total")
        print(f"soak: accepted {accepted:.0f}, finished {finished:.0f}, preemptions "
              f"{metric(server, 'preemptions_total'):.0f}, cache hits "
              f"{metric(server, 'prefix_cache_hit_tokens_total'):.0f} tokens", flush=True)
        if accepted != finished:
            self.failures.add(f"{accepted} requests were accepted, {finished} have an outcome")
        if status(server)[1] > self.idle_files + 40:
            self.failures.add(f"{status(server)[1]} files are open, {self.idle_files} at the start")

    def check_log(self, server):
        server.log.seek(0)
        for line in server.log.read().decode().splitlines():
            if re.search(r" (error|critical) ", line[:60]):
                self.failures.add("log: " + line)
        server.log.close()

    def drain(self, server):
        server.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        code = server.process.wait(timeout=60)
        seconds = time.monotonic() - begin
        print(f"soak: drained under load in {seconds:.1f} s", flush=True)
        if code != 0 or seconds > 25:
            self.failures.add(f"drain: exit code {code} after {seconds:.1f} s")
        server.process.stdout.close()
        self.check_log(server)

    def run(self):
        self.learn()
        server = self.start()
        self.idle_files = status(server)[1]
        self.load.start(self.args.workers, self.args.seed)
        try:
            short = self.args.seconds * DRAIN_SHARE / self.args.drains if self.args.drains else 0
            for _ in range(self.args.drains):
                self.check_memory(self.watch(server, short))
                self.drain(server)
                server = self.start()
            self.check_memory(self.watch(server, self.args.seconds - self.args.drains * short))
        finally:
            self.load.finish()
        self.check_idle(server)
        if server.stop() != 0:
            self.failures.add("the server did not end well")
        self.check_log(server)
        print("soak:", ", ".join(f"{count} {what}" for what, count in sorted(self.load.counts.items())))
        print(f"soak: {self.failures.count} failures")
        return 1 if self.failures.count or not self.load.counts["compared"] else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "k3serve"))
    parser.add_argument("--model", default=os.path.join(ROOT, "configs", "models", "tiny-k3"))
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--drains", type=int, default=6)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-rise-mb", type=float, default=24, help="of memory after the warm-up of a life")
    sys.exit(Soak(parser.parse_args()).run())


if __name__ == "__main__":
    main()
