#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/executor.h"
#include "engine/model/weights_loader.h"
#include "engine/rank_group.h"
#include "engine/scheduler.h"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/temp_dir.h"

namespace k3::testing {

// A model read from files: on one rank, on the CPU unless `ops` says otherwise, or on the ranks of a group.
class TestModel {
 public:
  explicit TestModel(const std::string& dir, std::unique_ptr<Ops> ops = MakeCpuOps({.threads = 1}));
  // Ranks that have loaded their weights. One harness at a time: the group's executors are the harness's.
  explicit TestModel(std::unique_ptr<RankGroup> ranks);
  // A random K3-format model of a few ten thousand weights, written to a temporary folder: thousands of schedules of it
  // are cheap. `eos` never ends a choice unless a test asks for it.
  static std::unique_ptr<TestModel> Micro();

  Ops& ops() { return ranks_ != nullptr ? ranks_->ops() : *ops_; }
  const Model& model() const { return ranks_ != nullptr ? ranks_->model() : *model_; }
  const ModelConfig& config() const { return ranks_ != nullptr ? ranks_->loaded().config : loaded_->config; }
  RankGroup* ranks() { return ranks_.get(); }  // null: one rank
  int32_t data_parallel() const { return ranks_ != nullptr ? ranks_->layout().data : 1; }

 private:
  std::unique_ptr<Ops> ops_;
  std::unique_ptr<LoadedModel> loaded_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<RankGroup> ranks_;
};

struct ChoiceOutcome {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;  // of the chosen tokens: equal bits mean equal logits as far as sampling sees them
  int finished = 0;             // how often OnChoiceFinished came
  FinishReason reason = FinishReason::kError;
};

struct Outcome {
  std::vector<ChoiceOutcome> choices;
  std::vector<float> prompt_logprobs;
  int admitted = 0;  // how often OnAdmitted came
  int32_t cached_tokens = 0;
  int finished = 0;  // how often OnFinished came; nothing may come after it
  bool late_event = false;
  absl::Status status;
  RequestUsage usage;
};

// What a test asks for; everything that decides the answer.
struct TestRequest {
  std::vector<int32_t> prompt;
  int32_t max_new_tokens = 8;
  float temperature = 0;
  float top_p = 1;
  uint64_t seed = 0;
  int32_t choices = 1;
  bool prompt_logprobs = false;
  float presence_penalty = 0;
  float repetition_penalty = 1;
  // These must not change it:
  int32_t priority = 0;
  std::string session;
  bool bypass_prefix_cache = false;
  // Ends the request, as a cancel does, when it is not done so many steps after it came.
  std::optional<int> deadline_steps;
};

// How steps are run; must not change any answer.
struct StepMode {
  bool plan_ahead = false;            // wherever the scheduler allows it
  std::vector<int32_t> decode_sizes;  // decode steps are padded to these
  // Not so: with an adaptive balance an answer is that of its bias epoch.
  std::optional<BalanceOptions> balance;
};

// A scheduler and real executors, driven step by step on the caller's thread, by a clock of its own: a step takes a
// millisecond. Before each step every free page and slot is filled with 0xFF (NaN), and after each the invariants are
// checked.
class EngineHarness {
 public:
  // `config` needs the policy and pool fields only; what follows from the model is filled in.
  EngineHarness(TestModel& model, EngineConfig config, StepMode mode = {});

  RequestId Submit(const TestRequest& request);
  void Cancel(RequestId id);
  // Plans, runs and commits one step; false when there was nothing to do.
  bool Step();
  // Until nothing is left. Aborts after `max_steps`: a livelock.
  void RunAll(int max_steps = 100000);

  const Outcome& outcome(RequestId id) const { return *outcomes_.at(id); }
  EngineLoad Load() const;
  Scheduler& scheduler() { return scheduler_; }
  Executor& executor() { return executor_ != nullptr ? *executor_ : model_.ranks()->executor(); }
  const EngineConfig& config() const { return config_; }
  // Between planning and running, e.g. to look at the plan or to damage a state.
  std::function<void(const StepPlan&)> before_run;
  // Between running and committing, e.g. to force tokens.
  std::function<void(const StepPlan&, StepResult*)> after_run;
  bool poison = true;
  int64_t steps_ahead = 0;

  static EngineConfig Complete(TestModel& model, EngineConfig config);

 private:
  void PoisonFree();
  // Of every rank that computes data-parallel group `group`.
  void ForCaches(int32_t group, const std::function<void(CacheStorage&)>& work);
  StepRunner& runner() { return executor_ != nullptr ? static_cast<StepRunner&>(*executor_) : *model_.ranks(); }
  // Waits for the oldest submitted step and commits it.
  void Commit();

  TestModel& model_;
  const StepMode mode_;
  EngineConfig config_;
  Scheduler scheduler_;
  std::unique_ptr<Executor> executor_;  // null: the ranks have theirs
  Clock::time_point now_ = Clock::now();
  StepPlan plans_[2];  // of step n in place n % 2
  int64_t submitted_ = 0;
  int64_t committed_ = 0;
  StepResult result_;
  struct Poisoned {
    std::vector<bool> pages;
    std::vector<bool> slots;
  };
  std::vector<Poisoned> poisoned_;  // by data-parallel group
  RequestId next_id_ = 1;
  std::map<RequestId, std::shared_ptr<Outcome>> outcomes_;
};

// The same request on a fresh engine, with no neighbour, no prefix cache and no deadline, in one chunk. `model` has one
// data-parallel group.
Outcome RunAlone(TestModel& model, const TestRequest& request);

// Tokens and log-probabilities, bit for bit. `prefix_ok`: `actual` may have been cut short (cancelled).
void ExpectSameAnswer(const Outcome& actual, const Outcome& alone, bool prefix_ok = false);

std::vector<int32_t> RandomTokens(uint64_t seed, int32_t count, int32_t vocab_size);

}  // namespace k3::testing
