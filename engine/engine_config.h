#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "engine/engine_interface.h"
#include "engine/request.h"

namespace k3 {

// Everything the engine decides by: budgets, pools, policy. Filled by the server from its flags and the memory plan,
// resolved and validated once, then immutable. Pool sizes are per rank.
struct EngineConfig {
  // The model.
  int32_t vocab_size = 0;
  std::vector<int32_t> eos_token_ids;  // end a choice unless it ignores them
  int32_t max_model_len = 0;           // prompt plus generated tokens of one sequence

  // Budgets.
  int32_t max_num_seqs = 256;             // admitted sequences (choices) over all ranks, from first chunk to last token
  int32_t max_num_batched_tokens = 2048;  // per rank and step
  int32_t prefill_chunk = 0;              // most tokens of one sequence in a step; 0 = max_num_batched_tokens
  // Prompts are cut at multiples of this position only, and not so that `short_tail` tokens or fewer are left: then
  // what is computed for a prompt does not depend on how much of it fitted a step. 1 = anywhere.
  int32_t prefill_alignment = 1;
  int32_t short_tail = 0;
  int32_t max_queue = 256;    // requests waiting for their first admission
  int32_t data_parallel = 1;  // ranks with caches of their own

  // Pools of one rank.
  int32_t page_size = 64;
  int32_t latent_pages = 0;
  int32_t state_slots = 0;
  int32_t snapshot_slots = 0;
  int64_t page_bytes = 1;  // the two sizes weigh what is evicted: tokens saved per byte
  int64_t state_bytes = 1;

  // Prefix cache.
  bool enable_prefix_caching = true;
  int32_t snapshot_interval = 1024;  // a multiple of page_size
  // Names the layer set and the dtypes of a stored state; part of every snapshot's fingerprint.
  uint64_t layout_tag = 0;
  double verify_hits = 0;          // share of prefix hits that are recomputed from scratch and compared, [0, 1]
  float verify_tolerance = 1e-3f;  // largest difference of the first token's log-probability that still agrees

  // The routers' bias changes (`--moe-routing local-quantile`): requests are pinned to the epoch of their rank that is
  // current when they are first admitted.
  bool bias_epochs = false;
  uint64_t first_epoch = 0;  // what ranks begin with: a recorded one, in a replay

  // Policy.
  double ageing_seconds = 10;      // this long in the queue weighs as much as one step of priority
  int32_t max_long_prefills = 2;   // long prompts (over long_prompt_tokens) being prefilled on one rank at once
  int32_t long_prompt_tokens = 0;  // 0 = 4 * prefill_chunk

  // Fills in what 0 stands for, then checks. Every message names the field, its value and what is allowed.
  absl::Status Resolve();

  int64_t pool_tokens() const { return static_cast<int64_t>(latent_pages) * page_size; }
  int64_t PagesFor(int64_t tokens) const { return (tokens + page_size - 1) / page_size; }
  EngineLimits Limits() const;
};

// Whether a request could run on an idle engine: INVALID_ARGUMENT or FAILED_PRECONDITION with the numbers otherwise.
absl::Status CheckRequest(const EngineConfig& config, const Request& request);

}  // namespace k3
