#!/usr/bin/env bash
# Builds and runs the tests. Arguments go to ctest, e.g. scripts/test.sh -R kernels
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

scripts/setup.sh
scripts/check_includes.sh
scripts/build.sh build all -- -DCMAKE_BUILD_TYPE=Release -DK3_TESTS=ON
ctest --test-dir build --output-on-failure --no-tests=error -j 2 "$@"
