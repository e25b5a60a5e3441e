#!/usr/bin/env bash
# Installs the packages that k3serve builds and runs with, on Debian 12, and fetches the sources of the grammar library,
# which is no Debian package. Does nothing when all are there.
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache pkg-config git ca-certificates
  libgrpc++-dev libgrpc-dev libprotobuf-dev libprotoc-dev protobuf-compiler protobuf-compiler-grpc
  libabsl-dev libspdlog-dev nlohmann-json3-dev libtomlplusplus-dev
  libboost-dev libpcre2-dev libssl-dev prometheus-cpp-dev
  libgtest-dev libgmock-dev python3 python3-pip python3-venv
)

# Structured output stands on this library. The release's source archive is pinned by version and hash; server/grammar
# builds it from the folder below.
grammar_version=0.2.8
grammar_sha256=8305646fd2b319d6c3003f51a1665e54cbbe9cba1fb636bc41d0b46434ccbb80
cache=${XDG_CACHE_HOME:-$HOME/.cache}/k3serve

install_packages() {
  local missing=() sudo=()
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  echo "setup: installing ${missing[*]}" >&2
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "setup: not root and no sudo: install these packages first: ${missing[*]}" >&2
      exit 1
    fi
    sudo=(sudo)
  fi
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
    >/dev/null
}

fetch_grammar_library() {
  local target=$cache/xgrammar-$grammar_version work
  [ ! -f "$target/include/xgrammar/matcher.h" ] || return 0
  echo "setup: fetching xgrammar $grammar_version" >&2
  mkdir -p "$cache"
  work=$(mktemp -d "$cache/fetch.XXXXXX")
  # shellcheck disable=SC2064  # the folder of this call
  trap "rm -rf '$work'" EXIT
  echo "xgrammar==$grammar_version --hash=sha256:$grammar_sha256" >"$work/requirements.txt"
  # The distribution's own pip, whatever else is in the path. Its dependencies are for Python and not needed.
  if ! /usr/bin/python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary xgrammar \
    --require-hashes -r "$work/requirements.txt" -d "$work" >"$work/log" 2>&1; then
    tail -n 20 "$work/log" >&2
    echo "setup: xgrammar could not be fetched: structured output will not be built" >&2
    return 0
  fi
  echo "$grammar_sha256  $work/xgrammar-$grammar_version.tar.gz" | sha256sum --check --quiet
  tar -xzf "$work/xgrammar-$grammar_version.tar.gz" -C "$work"
  # In one move: another clone's script may do the same at this moment.
  mv -T "$work/xgrammar-$grammar_version" "$target" 2>/dev/null || [ -f "$target/include/xgrammar/matcher.h" ]
}

install_packages
fetch_grammar_library
