#!/usr/bin/env bash
# The long form of the engine's random schedules: N schedules over the hash model (default 200,000), each request compared
# with the model alone. A failure prints K3_SCHEDULE_SEED=S; run with that in the environment to repeat it, and add the seed
# to kKeptSeeds in tests/engine/random_schedule_test.cc.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
scripts/build.sh build k3_engine_tests
K3_SCHEDULES=${1:-200000} build/tests/engine/k3_engine_tests --gtest_filter='RandomScheduleTest.*'
