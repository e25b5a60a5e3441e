#pragma once

#include "engine/model/golden.h"
#include "engine/model/sequence_runner.h"

namespace k3 {

struct GoldenCheckOptions {
  int64_t chunk = 4096;                         // prompt tokens per forward call
  bool golden_routing = false;                  // prompt positions take their expert ids from the golden
  std::function<void(int64_t)> before_forward;  // SequenceRunner::before_forward
};

struct GoldenResult {
  double rel_error = 0;    // norm of the difference over norm of the golden, over all kept rows
  int32_t worst_row = -1;  // prompt position
  double worst_row_error = 0;
  int32_t greedy_compared = 0;  // up to the first margin below 1e-2
  int32_t greedy_equal = 0;
  double experts_equal_share = 1;  // of the prompt's (layer, position, place) choices
  std::vector<float> logits;       // [R, V] as computed: for bit-for-bit comparison between chunk sizes
};

// Runs one golden prompt. InvalidArgument when the golden does not fit the model (vocabulary, layers, top-k, ids).
absl::StatusOr<GoldenResult> CheckGolden(const Model& model, Ops& ops, const GoldenPrompt& prompt,
                                         const GoldenCheckOptions& options);

}  // namespace k3
