#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/engine_config.h"
#include "engine/step.h"
#include "tests/testing/hash_model.h"

namespace k3::testing {

// A StepRunner over HashModel whose pages and slots really hold what a step writes there, so that every mistake in
// bookkeeping shows in the tokens. Aborts on a plan that breaks the contract of step.h. Memory starts poisoned.
class HashModelRunner : public StepRunner {
 public:
  HashModelRunner(const HashModel& model, const EngineConfig& config);

  absl::Status Run(const StepPlan& plan, StepResult* result) override;
  void Scrub(int32_t rank, const std::vector<PageId>& pages, const std::vector<StateSlot>& slots) override;
  int32_t vocab_size() const override { return model_.vocab_size(); }

  // Fills with 0xFF.
  void PoisonSlot(int32_t rank, StateSlot slot);
  void PoisonPage(int32_t rank, PageId page);
  // The model that stands for one computed under a bias epoch of a rank's routers: nothing of another one may be met.
  static HashModel UnderEpoch(const HashModel& model, int32_t rank, uint64_t epoch);
  HashState& Slot(int32_t rank, StateSlot slot) {
    return ranks_[static_cast<size_t>(rank)].slots[static_cast<size_t>(slot.value)];
  }

  // Called before each step runs; a status that is not OK is what Run returns, and it may throw or wait.
  std::function<absl::Status(const StepPlan&)> before_step;
  int64_t steps = 0;
  int64_t scrubbed_pages = 0;
  int64_t scrubbed_slots = 0;

 private:
  struct Memory {
    std::vector<HashState> slots;
    std::vector<uint64_t> lines;  // [pages, page_size]
    uint64_t epochs[kEpochSlots] = {};
    uint64_t newest_epoch = 0;
  };

  void CheckPlan(const RankPlan& plan) const;
  void RunRank(const RankPlan& plan, int32_t rank, Memory* memory, RankResult* result);

  HashModel model_;
  EngineConfig config_;
  std::vector<Memory> ranks_;
  std::vector<uint64_t> outputs_;  // [T]
  std::vector<float> logits_;
};

}  // namespace k3::testing
