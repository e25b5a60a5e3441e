#!/usr/bin/env bash
# Builds the server and puts it under mixed load for an hour (tests/clients/soak.py says what is checked). Arguments go
# to it, e.g. scripts/soak_server.sh --seconds 900 --drains 2
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

scripts/setup.sh
python=$(scripts/python_env.sh "$root/build/python")
scripts/build.sh build k3serve -- -DCMAKE_BUILD_TYPE=Release
exec "$python" tests/clients/soak.py --binary build/k3serve "$@"
