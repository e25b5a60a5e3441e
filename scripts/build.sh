#!/usr/bin/env bash
# Configures and builds what the other scripts need. Usage: scripts/build.sh BUILD_DIR TARGET... [-- cmake options]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

build_dir=$1
shift
targets=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
  targets+=("$1")
  shift
done
[ $# -gt 0 ] && shift

# So that clones in other folders share compiler results.
export CCACHE_BASEDIR="$root" CCACHE_NOHASHDIR=1
mkdir -p "$build_dir"
if [ ! -f "$build_dir/build.ninja" ] || [ $# -gt 0 ]; then
  cmake -S "$root" -B "$build_dir" -G Ninja "$@" >"$build_dir/configure.log" 2>&1 || {
    cat "$build_dir/configure.log" >&2
    exit 1
  }
fi
# Quiet unless it fails: a newcomer's first output is the ready line or the test results.
ninja -C "$build_dir" "${targets[@]}" >"$build_dir/build.log" 2>&1 || {
  tail -n 60 "$build_dir/build.log" >&2
  exit 1
}
