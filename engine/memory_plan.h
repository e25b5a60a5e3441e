#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/cache/cache_storage.h"
#include "engine/expert_balance.h"
#include "engine/model/checkpoint.h"
#include "engine/model/model_config.h"
#include "engine/model/workspace.h"
#include "kernels/ops.h"

namespace k3 {

// What decides how memory is used. Unset optionals are for the plan to choose. "Rank" is one GPU, or the machine when
// the model runs on the CPU.
struct MemoryRequest {
  bool is_cpu = true;
  int32_t tensor_parallel = 1;
  int32_t data_parallel = 1;
  ExpertTransport transport = ExpertTransport::kAllGather;
  DType activation = DType::kF32;
  DType page_dtype = DType::kF32;
  DType state_dtype = DType::kF32;

  // GPU: `memory_bytes` of one GPU times `utilization` holds weights, workspace and pools.
  // CPU: `pool_bytes` holds the pools (default: 4 GiB or half of what weights and workspace leave of `memory_bytes`,
  // whichever is less); all of it must fit `memory_bytes`, what is free before anything is loaded.
  uint64_t memory_bytes = 0;
  double utilization = 0.9;
  std::optional<uint64_t> pool_bytes;

  int64_t page_size = 64;  // tokens
  std::optional<int64_t> latent_pages;
  std::optional<int64_t> state_slots;
  std::optional<int64_t> snapshot_slots;
  std::optional<int64_t> max_num_seqs;  // over all ranks
  std::optional<int64_t> max_model_len;
  std::optional<int64_t> max_num_batched_tokens;  // of one rank
  bool prefix_caching = true;
  std::optional<BalanceOptions> balance;  // of experts over ranks

  // Measured instead of computed, where there is something to measure; not owned.
  const Checkpoint* checkpoint = nullptr;  // types of the tensors; else as in the released files
  const Ops* ops = nullptr;                // scratch sizes; else estimates
  std::optional<uint64_t> loaded_weights_bytes;
};

// Bytes of one rank's weights in the form of the checkpoint, by what they are for.
struct WeightBytes {
  uint64_t experts = 0;
  uint64_t embedding = 0;  // and output head
  uint64_t other = 0;
  uint64_t total() const { return experts + embedding + other; }
};

// How many sequences of a length the pools of all ranks hold at once, and the flag to change for more.
struct ContextFit {
  int64_t context = 0;  // tokens
  int64_t sequences = 0;
  std::string binding;
};

struct MemoryPlan {
  // Of the whole model and of the largest rank.
  uint64_t model_bytes = 0;
  WeightBytes rank_weights;
  uint64_t expert_bytes = 0;  // one routed expert, 0 without

  // Of one rank.
  uint64_t budget_bytes = 0;     // for everything below
  uint64_t weights_bytes = 0;    // loaded_weights_bytes, else rank_weights.total()
  uint64_t workspace_bytes = 0;  // with what a step's inputs and results take, without the residual bank
  uint64_t bank_bytes = 0;
  uint64_t closed_mix_bytes = 0;  // of workspace_bytes: mixes of the bank's closed blocks for sites to come
  bool workspace_estimated = false;
  uint64_t page_bytes = 0;  // one
  uint64_t slot_bytes = 0;  // one
  int64_t latent_pages = 0;
  int64_t state_slots = 0;
  int64_t snapshot_slots = 0;

  int64_t max_num_seqs = 0;
  int64_t max_model_len = 0;
  int64_t max_num_batched_tokens = 0;

  std::vector<ContextFit> fits;  // at 8K, 128K and 1M tokens

  // Weights, workspace and one sequence of --max-model-len (or of one page where that is not given) in the budget, and
  // all pools that flags ask for. `problem` says what is missing, with the numbers.
  bool fits_memory = false;
  std::string problem;

  CacheGeometry geometry;
  StepBounds bounds;

  uint64_t page_pool_bytes() const { return static_cast<uint64_t>(latent_pages) * page_bytes; }
  uint64_t state_pool_bytes() const { return static_cast<uint64_t>(state_slots + snapshot_slots) * slot_bytes; }
  uint64_t used_bytes() const {
    return weights_bytes + workspace_bytes + bank_bytes + page_pool_bytes() + state_pool_bytes();
  }
};

// Bytes of the weights of the rank that holds most. Vision tensors are not loaded and not counted.
WeightBytes RankWeightBytes(const ModelConfig& config, int32_t tensor_parallel, int32_t expert_ranks,
                            const Checkpoint* checkpoint);

// The configuration as one tensor-parallel rank computes with it: its share of heads and of the MLP widths.
ModelConfig RankConfig(const ModelConfig& config, int32_t tensor_parallel);

// InvalidArgument when the layout does not divide. A plan that does not fit is still a plan.
absl::StatusOr<MemoryPlan> PlanMemory(const ModelConfig& config, const MemoryRequest& request);

}  // namespace k3
