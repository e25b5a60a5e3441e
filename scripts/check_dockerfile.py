#!/usr/bin/env python3
"""Carries out the steps of one stage of docker/Dockerfile without a container engine, so that its commands are known to
work: each base image is a debootstrap root, COPY copies, RUN runs there in a chroot. Then starts the entry point as the
image's user in a root that is mounted read-only, waits for the health check, stops it with the stop signal, and adds up
the bytes of the layers. Needs root, debootstrap and a Debian mirror (the machine's own).

  scripts/check_dockerfile.py --target cpu --root /var/tmp/k3-image [--keep]
      [--ccache ~/.cache/ccache] [--debs /var/cache/apt/archives]
  scripts/check_dockerfile.py --target cuda --package dist/k3serve      where the vendor's packages cannot be had: the final
      stage over a package made elsewhere; started with --device cpu, since there may be no GPU
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
MAX_BYTES = 2 << 30


def instructions():
    """Yields (word, rest) with continuation lines joined."""
    pending = ""
    for line in DOCKERFILE.read_text().splitlines():
        if line.lstrip().startswith("#") or (not line.strip() and not pending):
            continue
        pending += line.rstrip().removesuffix("\\").strip() + " "
        if line.rstrip().endswith("\\"):
            continue
        word, _, rest = pending.strip().partition(" ")
        yield word, rest.strip()
        pending = ""


def stages():
    """{name: (base, [(word, rest)])}, and the global arguments."""
    found, arguments, current = {}, {}, None
    for word, rest in instructions():
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()
            current = found[name] = (base, [])
        elif current is None:
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            current[1].append((word, rest))
    return found, arguments


def expand(text, values):
    return re.sub(r"\$\{?(\w+)\}?", lambda m: values.get(m.group(1), ""), text)


def mirror():
    listed = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)"],
                            capture_output=True, text=True).stdout
    match = re.search(r"^(https?://\S+?/debian)/?$", listed, re.M)
    if not match:
        sys.exit("check_dockerfile: apt knows no Debian mirror (apt-get indextargets)")
    return match.group(1)


def size(path):
    return int(subprocess.run(["du", "-sxb", path], capture_output=True, text=True, check=True).stdout.split()[0])


class Builder:
    def __init__(self, folder, ccache, debs, package):
        self.folder = folder
        self.package = package
        self.ccache = ccache
        self.debs = debs
        self.stages, self.arguments = stages()
        self.roots = {}
        self.layers = []

    def base_image(self, name):
        """A pristine Debian root, made once: the slim image differs from the full one by documentation only."""
        if not re.fullmatch(r"debian:12(-slim)?", name):
            sys.exit(f"check_dockerfile: the base image {name} is not known to this script")
        pristine = self.folder / "base"
        if not pristine.exists():
            print(f"# debootstrap for {name}", flush=True)
            partial = self.folder / "base.partial"
            shutil.rmtree(partial, ignore_errors=True)
            cache = [f"--cache-dir={self.debs}"] if self.debs else []
            subprocess.run(["debootstrap", "--variant=minbase", *cache, "bookworm", partial, mirror()], check=True,
                           stdout=subprocess.DEVNULL)
            subprocess.run(["umount", "-q", partial / "proc"], check=False)  # debootstrap may leave it mounted
            self.empty_apt_cache(partial)
            # So do the published images: an interrupted build begins anew anyway.
            (partial / "etc/dpkg/dpkg.cfg.d/docker-apt-speedup").write_text("force-unsafe-io\n")
            partial.rename(pristine)
        return pristine

    def fill_apt_cache(self, root):
        for deb in self.debs.glob("*.deb") if self.debs else ():
            shutil.copy(deb, f"{root}/var/cache/apt/archives/")

    @staticmethod
    def empty_apt_cache(root):
        """As the published images do after each use of apt."""
        shutil.rmtree(f"{root}/var/cache/apt/archives", ignore_errors=True)
        os.makedirs(f"{root}/var/cache/apt/archives/partial")

    def build(self, name):
        """Returns {root, env, workdir, user, entrypoint, healthcheck, stopsignal} of a stage."""
        base, steps = self.stages[name]
        base = expand(base, self.arguments)
        if base in self.stages:
            image = dict(self.build(base))
            image["env"] = dict(image["env"])
            parent = image["root"]
        else:
            image = {"env": {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, "workdir": "/",
                     "user": "0:0", "layers": []}
            parent = self.base_image(base)
            image["layers"] = [("FROM " + base, size(parent))]
        root = self.folder / ("stage-" + name)
        shutil.rmtree(root, ignore_errors=True)
        # Reflinks where the file system has them; the parent stays as it is either way.
        subprocess.run(["cp", "-a", "-x", "--reflink=auto", parent, root], check=True)
        image["root"] = root
        image["layers"] = list(image["layers"])
        for word, rest in steps:
            before = size(root)
            self.step(image, word, rest)
            grown = size(root) - before
            if word in ("RUN", "COPY"):
                image["layers"].append((f"{word} {rest}"[:70], max(grown, 0)))
        return image

    def step(self, image, word, rest):
        if word in ("RUN", "COPY", "ADD"):
            print(f"# {word} {rest}", flush=True)
        if word == "WORKDIR":
            image["workdir"] = rest
            os.makedirs(f"{image['root']}{rest}", exist_ok=True)
        elif word == "ENV":
            for item in shlex.split(rest):
                key, _, value = item.partition("=")
                image["env"][key] = expand(value, image["env"])
        elif word == "USER":
            image["user"] = rest
        elif word in ("ENTRYPOINT", "STOPSIGNAL"):
            image[word.lower()] = rest
        elif word == "HEALTHCHECK":
            image["healthcheck"] = json.loads(rest[rest.index("CMD") + 3:])
        elif word == "COPY":
            self.copy(image, rest)
        elif word == "RUN":
            self.run(image, rest)
        elif word not in ("ARG", "LABEL", "EXPOSE"):
            sys.exit(f"check_dockerfile: {word} is not known to this script")

    def copy(self, image, rest):
        words = shlex.split(rest)
        source_stage = next((w.split("=", 1)[1] for w in words if w.startswith("--from=")), None)
        *sources, target = [w for w in words if not w.startswith("--")]
        target = pathlib.Path(f"{image['root']}{target}" if target.startswith("/")
                              else f"{image['root']}{image['workdir']}/{target}")
        if source_stage and self.package:
            for source in sources:
                inside = pathlib.PurePath(source).relative_to("/opt/k3serve")
                shutil.copytree(self.package / inside, target, symlinks=True, dirs_exist_ok=True)
        elif source_stage:
            if source_stage not in self.roots:
                self.roots[source_stage] = self.build(source_stage)["root"]
            for source in sources:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(f"{self.roots[source_stage]}{source}", target, symlinks=True, dirs_exist_ok=True)
        elif sources == ["."]:
            # What .dockerignore leaves: everything that git does not ignore, and not .git itself.
            listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "-co", "--exclude-standard"],
                                    capture_output=True, check=True).stdout.decode().split("\0")
            for name in filter(None, listed):
                if (ROOT / name).is_file():
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, target / name)
        else:
            for source in sources:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / source, target)

    def run(self, image, command):
        root = image["root"]
        for name in ("resolv.conf", "hosts"):
            if pathlib.Path("/etc", name).exists():
                shutil.copy(f"/etc/{name}", f"{root}/etc/{name}")
        # The machine's own way to the mirror, so that apt inside reaches what debootstrap reached.
        inside = f"cd {shlex.quote(image['workdir'])} && {command}"
        environment = dict(image["env"])
        bind = ""
        # A proxy with an authority of its own, which pip inside must know; no part of the image.
        authority = pathlib.Path(root, "run", "pip-authority.pem")
        if os.environ.get("PIP_CERT"):
            shutil.copy(os.environ["PIP_CERT"], authority)
            environment |= {"PIP_CERT": "/run/pip-authority.pem"}
        environment |= {name: os.environ[name] for name in ("PIP_DEFAULT_TIMEOUT", "PIP_INDEX_URL") if name in os.environ}
        if self.ccache:
            environment |= {"CCACHE_DIR": "/mnt", "CCACHE_BASEDIR": image["workdir"], "CCACHE_NOHASHDIR": "1"}
            # The language is part of what the cache compares.
            environment |= {name: value for name, value in os.environ.items() if name == "LANG" or name.startswith("LC_")}
            bind = f"mount --bind {self.ccache} {root}/mnt && "
        script = (f"{bind}mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev && "
                  f"exec chroot {root} /usr/bin/env -i {' '.join(shlex.quote(f'{k}={v}') for k, v in environment.items())} "
                  f"HOME=/root /bin/sh -c {shlex.quote(inside)}")
        begin = time.monotonic()
        uses_apt = "setup.sh" in command or "apt-get" in command
        if uses_apt:
            self.fill_apt_cache(root)
        subprocess.run(["unshare", "--mount", "--propagation", "private", "sh", "-c", script], check=True)
        if uses_apt:
            self.empty_apt_cache(root)
        authority.unlink(missing_ok=True)
        print(f"#   {time.monotonic() - begin:.0f} s", flush=True)


def start_and_stop(image):
    """The container's life: start as its user in a read-only root, health check, stop signal."""
    root, env = image["root"], dict(image["env"])
    env.update(K3SERVE_PORT="18900", K3SERVE_GRPC_PORT="18901", K3SERVE_HOST="127.0.0.1", K3SERVE_DEVICE="cpu")
    entry = json.loads(image["entrypoint"])
    variables = " ".join(shlex.quote(f"{k}={v}") for k, v in env.items())

    def command(words):
        script = (f"mount --bind {root} {root} && mount -t proc proc {root}/proc && "
                  f"mount -t tmpfs tmpfs {root}/tmp && mount -o remount,ro,bind {root} && "
                  f"exec chroot --userspec={image['user']} {root} /usr/bin/env -i {variables} "
                  + " ".join(map(shlex.quote, words)))
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]

    refused = subprocess.run(command(["/bin/sh", "-c", "touch /model/x || touch /opt/k3serve/x || touch /x"]),
                             capture_output=True, text=True)
    if refused.returncode == 0 or "Read-only" not in refused.stderr:
        sys.exit("check_dockerfile: the root was not read-only: " + refused.stderr)
    server = subprocess.Popen(command(entry), stdout=subprocess.PIPE, text=True)
    line = server.stdout.readline()
    print("#", line.strip(), flush=True)
    if not line.startswith("k3serve ready "):
        sys.exit("check_dockerfile: no ready line")
    health = subprocess.run(command(image["healthcheck"])).returncode
    server.send_signal(getattr(signal, image.get("stopsignal", "SIGTERM")))
    code = server.wait(timeout=60)
    after = subprocess.run(command(image["healthcheck"]), stderr=subprocess.DEVNULL).returncode
    print(f"# health check {health} while running, {after} after; exit code {code}")
    if health != 0 or after == 0 or code != 0:
        sys.exit("check_dockerfile: the container's life is not as it should be")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path("/var/tmp/k3serve-image"))
    parser.add_argument("--ccache", type=pathlib.Path, help="this machine's compiler cache, to build faster")
    parser.add_argument("--debs", type=pathlib.Path, help="a folder of .deb files to take before the mirror's")
    parser.add_argument("--package", type=pathlib.Path, help="stands for /opt/k3serve of the build stage, which is not run")
    parser.add_argument("--keep", action="store_true", help="leave the roots there")
    args = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        sys.exit("check_dockerfile: needs root and debootstrap")
    args.root.mkdir(parents=True, exist_ok=True)
    image = Builder(args.root, args.ccache, args.debs and args.debs.resolve(), args.package).build(args.target)
    start_and_stop(image)
    total = 0
    for what, bytes_ in image["layers"]:
        total += bytes_
        print(f"{bytes_ / 1e6:10.1f} MB  {what}")
    print(f"{total / 1e6:10.1f} MB  in all, uncompressed")
    if total > MAX_BYTES:
        sys.exit("check_dockerfile: the image is larger than 2 GB")
    if not args.keep:
        shutil.rmtree(args.root)


if __name__ == "__main__":
    main()
