"""Starts k3serve on free ports for client tests."""

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class RunningServer:
    """One server process; its addresses come from its ready line."""

    def __init__(self, binary, model, *flags, log=None, env=None, limits=None):
        """`log` takes stderr instead of a file of its own; `limits` are resource limits of the process."""
        self.log = log or tempfile.TemporaryFile()
        ports = [] if "--port" in flags else ["--port", "0", "--grpc-port", "0"]
        self.process = subprocess.Popen(
            [binary, "serve", model, "--device", "cpu", *ports, *flags],
            stdout=subprocess.PIPE, stderr=self.log, text=True, env={**os.environ, **(env or {})},
            # Python code in the child needs a fork, which gRPC's threads in this process do not survive: only where asked.
            preexec_fn=limits and (lambda: [resource.setrlimit(what, limit) for what, limit in limits.items()]))
        line = self.process.stdout.readline()
        match = re.match(r"k3serve ready http=(\S+) grpc=(\S+) admin=(\S+) model=(\S+)", line)
        if not match:
            self.process.kill()
            text = ""
            if log is None:
                self.log.seek(0)
                text = self.log.read().decode()
            raise RuntimeError("no ready line but %r\n%s" % (line, text))
        self.http, self.grpc, self.admin, self.model = match.groups()
        self.url = "http://" + self.http

    def stop(self):
        """Asks the server to end and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        return code


def main(configure):
    """Reads --binary and --model, hands them to `configure`, runs the tests of the calling module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "k3serve"))
    parser.add_argument("--model", default=os.path.join(ROOT, "configs", "models", "tiny-k3"))
    args, rest = parser.parse_known_args()
    configure(args.binary, args.model)
    unittest.main(module=sys.modules["__main__"], argv=[sys.argv[0], *rest])
