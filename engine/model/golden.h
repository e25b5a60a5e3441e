#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace k3 {

// Reference results of one prompt, as `k3serve verify` compares them.
struct GoldenPrompt {
  std::string name;
  std::vector<int32_t> tokens;  // [T]
  std::vector<int32_t> rows;    // [R] prompt positions whose logits are kept, ascending
  std::vector<float> logits;    // [R, V]
  int64_t vocab_size = 0;
  std::vector<int32_t> greedy;   // [G] continuation, stop tokens ignored
  std::vector<float> margin;     // [G] gap between the two best logits at each greedy step
  std::vector<int32_t> experts;  // [moe layers, T, top_k] ascending ids; empty for dense models
  int32_t moe_layers = 0;
  int32_t top_k = 0;
};

// Reads a golden file: safetensors with NAME.tokens, .rows, .greedy, .experts (I64) and .logits, .margin (F32) for each
// prompt. NotFound, DataLoss or InvalidArgument errors name the file and the tensor.
absl::StatusOr<std::vector<GoldenPrompt>> LoadGolden(const std::string& path);

}  // namespace k3
