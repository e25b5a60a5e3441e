#!/usr/bin/env bash
# Installs packages, builds Release and serves the shipped model on the CPU. Arguments go to `k3serve serve`; a first
# argument that is a folder replaces the model. Example: scripts/serve.sh --port 8080
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

scripts/setup.sh
if [ ! -x build/k3serve ]; then
  echo "serve: building build/k3serve (the first time takes some minutes)" >&2
fi
scripts/build.sh build k3serve -- -DCMAKE_BUILD_TYPE=Release

model=configs/models/tiny-k3
if [ $# -gt 0 ] && [ -d "$1" ]; then
  model=$1
  shift
fi
exec build/k3serve serve "$model" --device cpu "$@"
