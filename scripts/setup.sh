#!/usr/bin/env bash
# Installs the packages that k3serve builds and runs with, on Debian 12. Does nothing when all are there.
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache pkg-config git ca-certificates
  libgrpc++-dev libgrpc-dev libprotobuf-dev libprotoc-dev protobuf-compiler protobuf-compiler-grpc
  libabsl-dev libspdlog-dev nlohmann-json3-dev libtomlplusplus-dev
  libboost-dev libpcre2-dev libssl-dev prometheus-cpp-dev
  libgtest-dev libgmock-dev python3 python3-venv
)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi
echo "setup: installing ${missing[*]}" >&2
if [ "$(id -u)" -eq 0 ]; then
  sudo=()
elif command -v sudo >/dev/null; then
  sudo=(sudo)
else
  echo "setup: not root and no sudo: install these packages first: ${missing[*]}" >&2
  exit 1
fi
"${sudo[@]}" apt-get update -qq
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
