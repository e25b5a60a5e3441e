#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/model_config.h"
#include "kernels/core/dtype.h"

namespace k3 {

// What a checkpoint tensor is for. Within one layer each value occurs at most once, except the three expert matrices.
// clang-format off
enum class TensorRole : uint8_t {
  // of the model
  kEmbedding, kLmHead, kFinalNorm, kOutputMixNorm, kOutputMixProj,
  // of every layer
  kInputNorm, kPostAttentionNorm, kAttentionMixNorm, kAttentionMixProj, kMlpMixNorm, kMlpMixProj,
  // KDA
  kQ, kK, kV, kGate, kGateA, kGateB, kQConv, kKConv, kVConv, kDecayA, kDecayB, kBeta, kALog, kDtBias, kONorm, kO,
  // MLA, which also has kQ, kGate and kO
  kQA, kQANorm, kQB, kKvA, kKvANorm, kKvB,
  // dense MLP
  kMlpGate, kMlpUp, kMlpDown,
  // MoE
  kRouter, kRouterBias, kLatentDown, kLatentNorm, kLatentUp, kSharedGate, kSharedUp, kSharedDown,
  kExpertW1, kExpertW2, kExpertW3,
  kCount
};
// clang-format on

// In which forms a tensor may lie in the file; see Matches in weights_loader.cc.
enum class TensorForm : uint8_t {
  kMatrix,    // exactly this shape
  kVector,    // this many elements, dimensions of 1 allowed beside them
  kALog,      // a vector, or a longer 1-D one whose rest is padding
  kConvTaps,  // [C, W] or [C, 1, W]
  kExpert,    // a matrix, or packed MXFP4: name_packed U8 [rows, cols/2] and name_scale U8 [rows, cols/32]
};

// How tensor parallelism cuts it (spec 2.6). Rows and columns are cut into equal contiguous parts, which for matrices
// made of heads means whole heads.
enum class TensorShard : uint8_t { kReplicated, kRows, kColumns, kExperts };

struct TensorSpec {
  TensorRole role = TensorRole::kCount;
  std::string name;            // with the model's prefix
  std::vector<int64_t> shape;  // logical: [rows, cols] or [n]
  TensorForm form = TensorForm::kMatrix;
  TensorShard shard = TensorShard::kReplicated;
  DType released = DType::kBF16;  // as in the released checkpoints; any of BF16, F16 and F32 is read
  bool required = true;
  int64_t padding = 0;  // elements that the released file has beyond the shape

  int64_t elements() const;
};

// The one table of tensors: every tensor of the model's text part, computed from its shape. All of it is ModelTensors,
// LayerTensors of each layer and, for MoE layers, ExpertTensors of each expert.
std::vector<TensorSpec> ModelTensors(const ModelConfig& config);
std::vector<TensorSpec> LayerTensors(const ModelConfig& config, int32_t layer);
// w1, w3, w2.
std::vector<TensorSpec> ExpertTensors(const ModelConfig& config, int32_t layer, int32_t expert);

// Scale blocks of packed MXFP4: weights per scale byte.
inline constexpr int64_t kMxfp4BlockSize = 32;

}  // namespace k3
