#!/usr/bin/env bash
# Builds the CPU tests with sanitizers and runs them. Usage: scripts/sanitize.sh [address|thread] [ctest arguments]
#   address   address and undefined-behaviour sanitizers, all tests (default)
#   thread    thread sanitizer, the engine's and the front ends' tests
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

kind=${1:-address}
[ $# -gt 0 ] && shift
case "$kind" in
  address)
    sanitizers=address,undefined
    # Limits on address space and descriptors and a preloaded library, which faults_client is about, stop the sanitizers
    # themselves (they look at memory through pipes); readme_tables would ask for their licences.
    filter=(-E '^(faults_client|readme_tables)$')
    ;;
  thread)
    sanitizers=thread
    # Debian's gRPC is not instrumented, so its callbacks look unordered: the tests over it are left out.
    export GTEST_FILTER=-Grpc*
    filter=(-R '^(thread_pool_test|k3_(engine|http|openai|server|metrics|metrics_flow|bench_run)_tests)$')
    ;;
  *)
    echo "sanitize: $kind: expected address or thread" >&2
    exit 2
    ;;
esac
scripts/setup.sh
scripts/build.sh "build-$kind" all -- -DCMAKE_BUILD_TYPE=RelWithDebInfo -DK3_TESTS=ON -DK3_CUDA=OFF "-DK3_SANITIZE=$sanitizers"
# Debian's gRPC and Abseil are not instrumented: container annotations at their border would be false alarms.
export ASAN_OPTIONS=detect_container_overflow=0:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS="suppressions=$root/tests/testing/tsan.supp:history_size=4"
ctest --test-dir "build-$kind" --output-on-failure --no-tests=error -j 2 --timeout 3600 "${filter[@]}" "$@"
