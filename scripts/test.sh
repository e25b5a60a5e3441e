#!/usr/bin/env bash
# Builds and runs the tests. Arguments go to ctest, e.g. scripts/test.sh -R kernels
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

scripts/setup.sh
scripts/check_includes.sh
# Without a package index the tests still run; those that need the packages are named while configuring.
python=$(scripts/python_env.sh "$root/build/python") || {
  python=$(command -v python3)
  echo "test: no Python packages: client tests whose modules are missing are left out" >&2
}
scripts/build.sh build all -- -DCMAKE_BUILD_TYPE=Release -DK3_TESTS=ON "-DPython3_EXECUTABLE=$python"
grep 'Structured output: OFF' build/configure.log >&2 || true
grep 'skipped, Python lacks' build/configure.log >&2 || true
ctest --test-dir build --output-on-failure --no-tests=error -j 2 "$@"
