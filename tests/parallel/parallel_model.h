#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/model/model_config.h"
#include "engine/rank_group.h"

namespace k3::testing {

// All ranks of a model on the CPU, as threads. `two_phases`: they mix attention residuals as TwoPhaseOps.
std::unique_ptr<RankGroup> LoadRanks(const std::string& dir, const ParallelLayout& layout,
                                     ExpertTransport transport = ExpertTransport::kAllGather, bool two_phases = false);

// 8 heads, 32 experts, and widths that divide by up to 8; 8 layers of both kinds, attention residuals, MXFP4 experts.
ModelConfig WideK3Config();

struct SequenceLogits {
  std::vector<float> logits;                  // [T, V]
  std::vector<std::vector<int32_t>> experts;  // of each MoE layer, [T, top_k]
};
// Logits of all positions of `tokens`, computed in chunks by group `data_rank`; on each rank of the group the same.
SequenceLogits RunSequence(RankGroup& ranks, int32_t data_rank, const std::vector<int32_t>& tokens, int64_t chunk);

// Norm of the difference over the norm of `expected`.
double RelativeError(const std::vector<float>& actual, const std::vector<float>& expected);

std::vector<int32_t> SomeTokens(uint64_t seed, int32_t count, int64_t vocab_size);

}  // namespace k3::testing
