#!/usr/bin/env bash
# What takes too long for every commit: long random schedules of the engine, sanitizers, fuzzing.
# Usage: scripts/long_tests.sh [schedules] [fuzz seconds a target]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

schedules=${1:-20000}
fuzz_seconds=${2:-600}
scripts/build.sh build all -- -DCMAKE_BUILD_TYPE=Release -DK3_TESTS=ON
seed=$(date +%s)
echo "long_tests: $schedules random schedules from seed $seed" >&2
K3_EQUIVALENCE_SEED=$seed K3_EQUIVALENCE_SCHEDULES=$schedules build/tests/e2e/k3_e2e_tests --gtest_filter='EquivalenceTest.*'
# Over ranks a schedule takes ten times as long.
K3_EQUIVALENCE_SEED=$seed K3_EQUIVALENCE_SCHEDULES=$((schedules / 10 + 1)) build/tests/parallel/k3_schedule_tests
scripts/soak_engine.sh
scripts/sanitize.sh address
scripts/sanitize.sh thread
scripts/fuzz.sh "$fuzz_seconds"
