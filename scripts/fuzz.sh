#!/usr/bin/env bash
# Builds the fuzz targets with clang and runs each for SECONDS (default 600), one after the other, at low priority.
#   scripts/fuzz.sh [SECONDS [TARGET...]]
# The corpus grows in build-fuzz/corpus/TARGET; a finding is kept in build-fuzz/findings and ends the run with an error.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds="${1:-600}"
shift || true
build="${K3_FUZZ_BUILD:-build-fuzz}"

cmake -S . -B "$build" -G Ninja -DK3_CUDA=OFF -DK3_FUZZ=ON -DK3_TESTS=OFF -DCMAKE_CXX_COMPILER=clang++ >/dev/null
if [ $# -gt 0 ]; then
  targets=("$@")
else
  mapfile -t targets < <(cd tests/fuzz && ls -- *_fuzz.cc | sed 's/\.cc$//')
fi
ninja -C "$build" "${targets[@]}"
mkdir -p "$build/findings"
for target in "${targets[@]}"; do
  corpus="$build/corpus/$target"
  mkdir -p "$corpus"
  if [ -d "tests/fuzz/seeds/$target" ]; then cp tests/fuzz/seeds/"$target"/* "$corpus"/; fi
  if [ "$target" = model_config_fuzz ]; then
    for config in configs/models/*/config.json tests/data/*/config.json; do
      cp "$config" "$corpus/seed-$(basename "$(dirname "$config")")"
    done
  fi
  options=(-max_total_time="$seconds" -max_len=8192 -rss_limit_mb=2048 -timeout=10 -print_final_stats=1
           -artifact_prefix="$build/findings/$target-")
  if [ -f "tests/fuzz/$target.dict" ]; then
    options+=(-dict="tests/fuzz/$target.dict")
  else
    options+=(-dict=tests/fuzz/json.dict)
  fi
  echo "== $target for $seconds s"
  nice -n 19 "$build/tests/fuzz/$target" "${options[@]}" "$corpus"
done
