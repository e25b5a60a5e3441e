#!/usr/bin/env bash
# Fails when the wire contract lost or changed something that clients may use (proto/schema.txt holds what was there).
# With --update additions are recorded; a breaking change is refused then too: reserve what goes, or edit schema.txt by
# hand and say why in the commit. Usage: scripts/check_proto.sh [--update] [BUILD_DIR]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

if [ "${1:-}" = "--update" ]; then
  export K3_UPDATE_PROTO_SCHEMA=1
  shift
fi
build_dir=${1:-build}
scripts/build.sh "$build_dir" k3_proto_compat_tests
exec "$build_dir/tests/server/k3_proto_compat_tests" --gtest_brief=1
