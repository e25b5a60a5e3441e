#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/scheduler.h"
#include "tests/testing/hash_model_runner.h"
#include "tests/testing/recording_sink.h"

namespace k3::testing {

// A scheduler over the hash model with a clock of its own, stepped by hand. After every step it checks the scheduler's
// invariants and fills every free page and slot with poison.
class SchedulerHarness {
 public:
  static constexpr int32_t kVocab = 97;
  static constexpr int32_t kEos = 96;

  // Small pools for tests; change what the test is about. kEos is an end-of-text id, and rare.
  static EngineConfig SmallConfig();

  explicit SchedulerHarness(EngineConfig config);

  struct Handle {
    RequestId id = 0;
    std::shared_ptr<RecordingSink> sink;
    std::vector<int32_t> prompt;
    SamplingParams sampling;
    int32_t choices = 1;
  };
  // Checks the request, then submits it.
  Handle Submit(std::vector<int32_t> prompt, const SamplingParams& sampling,
                const std::function<void(Request&)>& change = {});
  Handle Submit(std::vector<int32_t> prompt, int32_t max_new_tokens, const std::function<void(Request&)>& change = {});
  void Cancel(const Handle& handle) { scheduler.Cancel(handle.id, absl::CancelledError("cancelled"), now); }

  // One step; false when there was nothing to do. `in_flight` runs between plan and commit. With `plan_ahead` the next
  // step is planned before the open one is committed, wherever the scheduler allows it.
  bool Step(const std::function<void()>& in_flight = {});
  bool plan_ahead = false;
  // Until nothing is left to do.
  void Run(int64_t most_steps = 100000);
  // The running sequence of a request's choice, for looking inside; null when it is not running in the last plan.
  int32_t PlannedTokens(const Handle& handle) const;

  // What a request's answer must be that of: the model under the bias epoch that its usage names.
  HashModel ModelOf(const Handle& handle) const;
  // Tokens and finish reason of every choice against the model alone; only for requests that ended by themselves.
  void ExpectAlone(const Handle& handle) const;
  // Everything is given back: nothing runs or waits, no live slot and no page is used.
  void ExpectIdle() const;
  EngineLoad Load() const;

  EngineConfig config;
  HashModel model;
  HashModelRunner runner;
  Scheduler scheduler;
  Clock::time_point now{std::chrono::seconds(1000)};
  StepPlan plan;  // the last one
  StepResult result;
  int64_t steps_ahead = 0;
  Clock::duration step_time = std::chrono::milliseconds(10);

 private:
  void PoisonFree();
  void CheckWrites();
  // Puts in what the step before has drawn.
  void ResolveTokens(StepPlan* plan) const;
  void Commit();

  std::optional<StepPlan> open_;  // with plan_ahead: ran, not committed
  StepResult open_result_;
  RequestId next_id_ = 1;
};

SamplingParams Greedy(int32_t max_new_tokens);
// Greedy, and past the end of the text.
SamplingParams Endless(int32_t max_new_tokens);
// Tokens below `vocab`, a function of `seed` only.
std::vector<int32_t> RandomPrompt(size_t length, uint64_t seed, int32_t vocab = SchedulerHarness::kVocab - 1);
std::vector<int32_t> Join(std::vector<int32_t> a, const std::vector<int32_t>& b);

}  // namespace k3::testing
