#!/usr/bin/env python3
"""Lints the deployment files as far as that goes without a container engine: the Dockerfile's instructions, stages and
copied paths, that its packages are those of setup.sh, the compose file, the Kubernetes manifests and how they refer to
each other, every YAML and JSON file below docker/. Prints each fault and exits 1 when there is one.

The dashboard's queries and the server's flags in these files are checked by tests/server/deploy_files_test.cc."""

import json
import pathlib
import re
import shlex
import sys

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
faults = []


def fault(where, what):
    faults.append(f"{where}: {what}")


# ---- Dockerfile ----

INSTRUCTIONS = {"ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN",
                "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}


def dockerfile_instructions(path):
    """Yields (line number, instruction, rest), continuation lines joined."""
    number, pending = 0, ""
    for i, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not pending):
            continue
        number = number if pending else i
        pending += line.rstrip().removesuffix("\\").strip() + " " if line.rstrip().endswith("\\") else line.strip()
        if line.rstrip().endswith("\\"):
            continue
        word, _, rest = pending.partition(" ")
        yield number, word, rest.strip()
        pending = ""
    if pending:
        fault(path.name, "ends in the middle of an instruction")


def check_dockerfile(path):
    stages, stage = {}, None
    for number, word, rest in dockerfile_instructions(path):
        where = f"{path.name}:{number}"
        if word not in INSTRUCTIONS:
            fault(where, f"unknown instruction {word}")
            continue
        if word == "FROM":
            match = re.fullmatch(r"(\S+) AS ([a-z][a-z0-9-]*)", rest)
            if not match:
                fault(where, "a stage needs a name")
                continue
            base, stage = match.groups()
            if stage in stages:
                fault(where, f"stage {stage} is there twice")
            if "$" not in base and base not in stages and ":" not in base:
                fault(where, f"base {base} is neither an earlier stage nor an image with a tag")
            stages[stage] = {"base": base, "instructions": []}
            continue
        if stage is None:
            if word != "ARG":
                fault(where, f"{word} before the first FROM")
            continue
        stages[stage]["instructions"].append((word, rest))
        if word in ("CMD", "ENTRYPOINT") or (word == "HEALTHCHECK" and "CMD" in rest):
            form = rest[rest.index("CMD") + 3:].strip() if word == "HEALTHCHECK" else rest
            try:
                if not all(isinstance(item, str) for item in json.loads(form)):
                    raise ValueError
            except ValueError:
                fault(where, f"{word} must be a JSON array of strings: a shell would not pass signals on")
        if word == "COPY":
            words = shlex.split(rest)
            source = next((w.split("=", 1)[1] for w in words if w.startswith("--from=")), None)
            paths = [w for w in words if not w.startswith("--")]
            if source is not None and source not in list(stages)[:-1]:
                fault(where, f"COPY from {source}, which is no earlier stage")
            if source is None:
                for copied in paths[:-1]:
                    if not (ROOT / copied).exists():
                        fault(where, f"{copied} does not exist")
        if word == "RUN":
            first = rest.split()[0]
            if first.startswith("scripts/") and not (ROOT / first).exists():
                fault(where, f"{first} does not exist")

    def lineage(name):
        while name in stages:
            yield name
            name = stages[name]["base"]

    for target in ("cpu", "cuda"):
        if target not in stages:
            fault(path.name, f"no stage {target}")
            continue
        found = {}
        for name in lineage(target):  # the nearest stage wins
            for word, rest in reversed(stages[name]["instructions"]):
                found.setdefault(word, rest)
                if word == "RUN" and "apt-get" in rest:
                    fault(path.name, f"stage {target} must stay slim: it installs packages in {name}")
        for word in ("USER", "HEALTHCHECK", "ENTRYPOINT", "LABEL", "EXPOSE"):
            if word not in found:
                fault(path.name, f"stage {target} has no {word}")
        if found.get("USER", "0").split(":")[0] in ("0", "root"):
            fault(path.name, f"stage {target} runs as root")
        period = re.search(r"--start-period=(\d+)s", found.get("HEALTHCHECK", ""))
        if not period or int(period.group(1)) < 3600:
            fault(path.name, f"stage {target}: a health check needs an hour's start period")
        for label in ("title", "version", "revision", "licenses"):
            if f"org.opencontainers.image.{label}=" not in found.get("LABEL", ""):
                fault(path.name, f"stage {target} has no label {label}")
    check_packages(path, stages)


def check_packages(path, stages):
    """The build stages install setup.sh's packages and, for CUDA, the vendor's; nothing else."""
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    block = re.search(r"^packages=\(\n(.*?)^\)", setup, re.M | re.S)
    listed = block.group(1).split() if block else []
    if len(listed) < 10 or len(set(listed)) != len(listed):
        fault("scripts/setup.sh", "its list of packages cannot be read, or names one twice")
    for name, stage in stages.items():
        runs = [rest for word, rest in stage["instructions"] if word == "RUN"]
        if name == "build" and "scripts/setup.sh" not in runs:
            fault(path.name, "stage build does not install the packages of scripts/setup.sh")
        for run in runs:
            if "apt-get install" not in run:
                continue
            words = shlex.split(run.split("apt-get install", 1)[1].split("&&")[0])
            extra = [w for w in words if not w.startswith("-")]
            odd = [w for w in extra if not re.match(r"(cuda|libcublas|libnccl)", w)]
            if odd:
                fault(path.name, f"stage {name} installs {' '.join(odd)}, which scripts/setup.sh does not")
            if "rm -rf /var/lib/apt/lists" not in run:
                fault(path.name, f"stage {name} leaves the package lists in its layer")


# ---- YAML and JSON ----


def parse_all():
    documents = {}
    for path in sorted(DOCKER.rglob("*")):
        name = str(path.relative_to(ROOT))
        try:
            if path.suffix in (".yaml", ".yml"):
                documents[name] = [d for d in yaml.safe_load_all(path.read_text()) if d is not None]
            elif path.suffix == ".json":
                documents[name] = [json.loads(path.read_text())]
        except (yaml.YAMLError, ValueError) as error:
            fault(name, f"does not parse: {error}")
    return documents


def check_compose(name, compose):
    for service, spec in compose.get("services", {}).items():
        where = f"{name}: {service}"
        if ":" not in spec.get("image", ""):
            fault(where, "needs an image with a tag")
        if "build" in spec:
            for key in ("read_only", "cap_drop", "security_opt", "stop_grace_period"):
                if key not in spec:
                    fault(where, f"lacks {key}")
            if not (DOCKER / spec["build"]["context"] / spec["build"]["dockerfile"]).exists():
                fault(where, "its Dockerfile does not exist")
        for port in spec.get("ports", []):
            if not str(port).startswith("127.0.0.1:"):
                fault(where, f"publishes {port} on every interface")
        for volume in spec.get("volumes", []):
            source = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", volume).split(":")[0]
            if not (DOCKER / source).exists():
                fault(where, f"mounts {source}, which does not exist")
        if "devices" in str(spec.get("deploy")) and "shm_size" not in spec:
            fault(where, "ranks on several GPUs need shm_size")


def pod_templates(documents):
    """Yields (where, labels, pod spec) of everything that makes pods."""
    for name, objects in documents.items():
        for item in objects:
            spec = item.get("spec", {}) if isinstance(item, dict) else {}
            if item.get("kind") in ("Deployment", "StatefulSet"):
                templates = [spec["template"]]
                for key, value in spec["selector"]["matchLabels"].items():
                    if templates[0]["metadata"]["labels"].get(key) != value:
                        fault(name, f"{item['kind']} does not select its own pods")
            elif item.get("kind") == "LeaderWorkerSet":
                parts = spec["leaderWorkerTemplate"]
                templates = [parts[k] for k in ("leaderTemplate", "workerTemplate") if k in parts]
            else:
                continue
            for template in templates:
                labels = template.get("metadata", {}).get("labels", {})
                yield f"{name}: {item['metadata']['name']}", labels, template["spec"]


def check_kubernetes(documents):
    documents = {n: d for n, d in documents.items() if n.startswith(("docker/kubernetes", "docker/envoy/"))
                 and n != "docker/envoy/envoy.yaml"}
    for name, objects in documents.items():
        for item in objects:
            for key in ("apiVersion", "kind"):
                if not isinstance(item, dict) or key not in item:
                    fault(name, f"an object lacks {key}")
    maps = {o["metadata"]["name"] for d in documents.values() for o in d if o.get("kind") == "ConfigMap"}
    maps |= {g["name"] for d in documents.values() for o in d for g in o.get("configMapGenerator", [])}
    pods = list(pod_templates(documents))
    port_names = {}
    for where, labels, spec in pods:
        if spec.get("enableServiceLinks") is not False:
            fault(where, "service links would put K3SERVE_* variables into the environment")
        if spec.get("securityContext", {}).get("runAsNonRoot") is not True:
            fault(where, "may run as root")
        volumes = {v["name"] for v in spec.get("volumes", [])}
        for volume in spec.get("volumes", []):
            if "configMap" in volume and volume["configMap"]["name"] not in maps:
                fault(where, f"mounts the unknown config map {volume['configMap']['name']}")
        for container in spec["containers"]:
            security = container.get("securityContext", {})
            if security.get("readOnlyRootFilesystem") is not True or security.get("allowPrivilegeEscalation") is not False:
                fault(where, f"container {container['name']} is not locked down")
            ports = {p["name"]: p["containerPort"] for p in container.get("ports", [])}
            port_names.setdefault(labels.get("app.kubernetes.io/name"), {}).update(ports)
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                http = container.get(probe, {}).get("httpGet")
                if ports and not container.get(probe):
                    fault(where, f"container {container['name']} has no {probe}")
                elif http and http["port"] not in ports:
                    fault(where, f"{probe} asks the unknown port {http['port']}")
                elif http and not http["path"].startswith("/health/"):
                    fault(where, f"{probe} asks {http['path']}, which is no health route")
                other = container.get(probe, {}).get("grpc") or container.get(probe, {}).get("tcpSocket")
                if other and other["port"] not in [*ports, *ports.values()]:
                    fault(where, f"{probe} asks the unknown port {other['port']}")
            mounts = {m["name"] for m in container.get("volumeMounts", [])}
            for missing in mounts - volumes:
                fault(where, f"mounts {missing}, which is no volume")
            for unused in volumes - mounts:
                fault(where, f"volume {unused} is not mounted")
            if "nvidia.com/gpu" in str(container.get("resources")) and "/dev/shm" not in str(container["volumeMounts"]):
                fault(where, "NCCL needs a larger /dev/shm")
    for name, objects in documents.items():
        for item in objects:
            kind, spec = item.get("kind"), item.get("spec", {})
            if kind == "Service":
                ports = port_names.get(spec["selector"].get("app.kubernetes.io/name"), {})
                for port in spec["ports"]:
                    if port["targetPort"] not in ports:
                        fault(name, f"service {item['metadata']['name']} targets {port['targetPort']}, which no pod has")
            if kind == "PodMonitor":
                ports = port_names.get(spec["selector"]["matchLabels"].get("app.kubernetes.io/name"), {})
                for endpoint in spec["podMetricsEndpoints"]:
                    if endpoint["port"] not in ports:
                        fault(name, f"scrapes {endpoint['port']}, which no pod has")
            if kind == "Kustomization":
                files = [f for g in item.get("configMapGenerator", []) for f in g["files"]]
                for resource in item["resources"] + files:
                    if not (ROOT / name).parent.joinpath(resource).exists():
                        fault(name, f"{resource} does not exist")
            if kind == "InferencePool":
                ports = port_names.get(spec["selector"]["matchLabels"].get("app.kubernetes.io/name"), {})
                for port in spec["targetPorts"]:
                    if port["number"] not in ports.values():
                        fault(name, f"targets port {port['number']}, which no pod has")


def check_envoy(documents):
    """The clusters name a service and ports that exist, routes name clusters, every health check runs each second."""
    services = {(o["metadata"]["name"], p["port"]) for d in documents.values() for o in d
                if isinstance(o, dict) and o.get("kind") == "Service" for p in o["spec"]["ports"]}
    resources = documents["docker/envoy/envoy.yaml"][0]["static_resources"]
    clusters = {c["name"] for c in resources["clusters"]}
    for cluster in resources["clusters"]:
        where = f"docker/envoy/envoy.yaml: {cluster['name']}"
        for group in cluster["load_assignment"]["endpoints"]:
            for item in group["lb_endpoints"]:
                address = item["endpoint"]["address"]["socket_address"]
                if (address["address"], address["port_value"]) not in services:
                    fault(where, f"no service {address['address']} has port {address['port_value']}")
        for check in cluster.get("health_checks", [{}]):
            if check.get("no_traffic_interval") != check.get("interval") or not check:
                fault(where, "needs a health check that runs as often without traffic")
    for listener in resources["listeners"]:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        for host in manager["route_config"]["virtual_hosts"]:
            for route in host["routes"]:
                if route["route"]["cluster"] not in clusters:
                    fault("docker/envoy/envoy.yaml", f"routes to the unknown cluster {route['route']['cluster']}")


def main():
    check_dockerfile(DOCKER / "Dockerfile")
    documents = parse_all()
    compose = documents.get("docker/compose.yaml")
    if compose:
        check_compose("docker/compose.yaml", compose[0])
    else:
        fault("docker/compose.yaml", "is missing")
    check_kubernetes(documents)
    check_envoy(documents)
    for line in faults:
        print(line)
    print(f"check_deploy: {len(documents) + 1} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
