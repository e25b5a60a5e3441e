#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/request.h"
#include "engine/step.h"

namespace k3 {

// The number in [0, 1) that decides the token at `position` (0 = first generated) of a choice: Philox 4x32-10 with the
// seed as key and (position, choice) as counter. A pure function, hence the same in every batch, on every rank and
// after any preemption.
float UniformAt(uint64_t seed, int32_t choice, int64_t position);

// One choice's part of sampling: turns its parameters and its own tokens into the rows, edits and masks of a step. The
// arithmetic on logits itself is Ops::Sample's. Counts are kept as the tokens come, so a row costs a copy of what is
// edited, not a walk over the text. Engine thread only.
class Sampler {
 public:
  // `eos` are the model's own stop ids. `params` must outlive the sampler.
  void Begin(const SamplingParams& params, int32_t choice, std::span<const int32_t> prompt,
             std::span<const int32_t> eos, int32_t vocab_size);
  // A generated token was accepted.
  void Count(int32_t token);
  // Appends the row that draws the next token from the logits of packed row `row`. `constraint` may be null. `unknown`
  // tokens were drawn by steps that are still running; there may be some only without counts_tokens() and constraint.
  void AppendDraw(int32_t row, TokenConstraint* constraint, RankPlan* plan, int32_t unknown = 0) const;
  // Appends a row that only yields the log-probability of `token`.
  void AppendScore(int32_t row, int32_t token, RankPlan* plan) const;

  bool IsStop(int32_t token) const;
  // Whether the next row depends on which tokens were generated so far, not only on how many.
  bool counts_tokens() const { return count_generated_; }
  int32_t generated() const { return generated_; }

 private:
  // The row of plan->allowed_mask that was added, or -1.
  int32_t AppendMask(TokenConstraint* constraint, RankPlan* plan) const;
  bool AllowsMoreThanStops(int32_t mask_row, const RankPlan& plan) const;

  const SamplingParams* params_ = nullptr;
  int32_t choice_ = 0;
  int32_t vocab_size_ = 0;
  int32_t generated_ = 0;
  bool count_generated_ = false;                      // some penalty is on
  std::vector<int32_t> stops_;                        // ids that end the choice
  std::vector<LogitEdit> penalties_;                  // one per distinct id
  absl::flat_hash_map<int32_t, int32_t> penalty_of_;  // id -> index in penalties_
  std::vector<LogitEdit> biases_;                     // logit_bias, then bans
  std::vector<uint32_t> allowed_;                     // [ceil(V/32)], empty = all
};

}  // namespace k3
