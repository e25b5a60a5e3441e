#!/usr/bin/env bash
# Includes go downwards only: server -> engine -> kernels. Besides, the scheduling side of the engine sees no devices.
set -euo pipefail
cd "$(dirname "$0")/.."
bad=0

# forbid WHERE-PATHSPEC... -- REGEX MESSAGE
forbid() {
  local paths=()
  while [ "$1" != "--" ]; do
    paths+=("$1")
    shift
  done
  local hits
  hits=$(git grep -nE "^#include \"$2" -- "${paths[@]}" || true)
  if [ -n "$hits" ]; then
    echo "check_includes: $3:" >&2
    echo "$hits" >&2
    bad=1
  fi
}

forbid kernels -- '(engine|server|k3serve)/' 'kernels/ must not include engine/, server/ or proto'
forbid engine -- '(server|k3serve)/' 'engine/ must not include server/ or proto'
forbid engine/scheduler* engine/sequence.* engine/step.* engine/request.h engine/sampler.* engine/engine* \
  engine/admission_queue.* engine/load_estimator.* engine/repetition_detector.* engine/cache/ids.h \
  engine/cache/indexed_heap.h engine/cache/page_pool.* engine/cache/state_pool.* engine/cache/prefix_cache.* \
  engine/cache/cache_manager.* -- \
  '(engine/model|kernels/(ops\.h|cuda|cpu|comm))' 'the scheduling side must not include model or device headers'
forbid server/text server/generation_service.* server/response_stream.* -- '(grpc|k3serve/inference)' \
  'text and the common generation path must stay free of gRPC and proto'
exit $bad
