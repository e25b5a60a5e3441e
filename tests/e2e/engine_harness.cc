#include "tests/e2e/engine_harness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>

#include "kernels/core/check.h"

namespace k3::testing {
namespace {

class RecordingSink : public TokenSink {
 public:
  explicit RecordingSink(std::shared_ptr<Outcome> outcome) : outcome_(std::move(outcome)) {}
  void OnAdmitted(int32_t cached_tokens) override {
    Note();
    ++outcome_->admitted;
    outcome_->cached_tokens = cached_tokens;
  }
  void OnPromptLogprob(int32_t index, const TokenLogprob& logprob) override {
    Note();
    EXPECT_EQ(index, static_cast<int32_t>(outcome_->prompt_logprobs.size()) + 1);
    outcome_->prompt_logprobs.push_back(logprob.logprob);
  }
  void OnToken(int32_t choice, int32_t token, const TokenLogprob* logprob) override {
    Note();
    ChoiceOutcome& out = outcome_->choices[static_cast<size_t>(choice)];
    EXPECT_EQ(out.finished, 0);
    out.tokens.push_back(token);
    ASSERT_NE(logprob, nullptr);
    out.logprobs.push_back(logprob->logprob);
  }
  void OnChoiceFinished(int32_t choice, FinishReason reason, int32_t) override {
    Note();
    ++outcome_->choices[static_cast<size_t>(choice)].finished;
    outcome_->choices[static_cast<size_t>(choice)].reason = reason;
  }
  void OnFinished(const absl::Status& status, const RequestUsage& usage) override {
    Note();
    ++outcome_->finished;
    outcome_->status = status;
    outcome_->usage = usage;
  }

 private:
  void Note() { outcome_->late_event = outcome_->late_event || outcome_->finished > 0; }
  std::shared_ptr<Outcome> outcome_;
};

std::unique_ptr<LoadedModel> LoadOrDie(const std::string& dir, Ops& ops) {
  const auto config = LoadModelConfig(dir);
  K3_CHECK(config.ok());
  LoadOptions options;
  options.print_progress = false;
  auto loaded = LoadWeights(dir, *config, ops, options);
  K3_CHECK(loaded.ok());
  return *std::move(loaded);
}

}  // namespace

TestModel::TestModel(const std::string& dir, std::unique_ptr<Ops> ops)
    : ops_(std::move(ops)),
      loaded_(LoadOrDie(dir, *ops_)),
      model_(std::make_unique<Model>(loaded_->config, loaded_->weights, *ops_)) {}

TestModel::TestModel(std::unique_ptr<RankGroup> ranks) : ranks_(std::move(ranks)) {}

std::unique_ptr<TestModel> TestModel::Micro() {
  const TempDir dir;
  TestCheckpoint(SmallK3Config()).Write(dir.path());
  return std::make_unique<TestModel>(dir.path());  // the mapping outlives the files' names
}

EngineConfig EngineHarness::Complete(TestModel& model, EngineConfig config) {
  config.vocab_size = static_cast<int32_t>(model.config().vocab_size);
  config.data_parallel = model.data_parallel();
  if (config.max_model_len == 0) config.max_model_len = static_cast<int32_t>(config.pool_tokens());
  K3_CHECK(config.Resolve().ok());
  return config;
}

EngineHarness::EngineHarness(TestModel& model, EngineConfig config, StepMode mode)
    : model_(model), mode_(std::move(mode)), config_(Complete(model, std::move(config))), scheduler_(config_) {
  K3_CHECK(config_.bias_epochs == (mode_.balance.has_value() && mode_.balance->adaptive));
  CacheGeometry geometry;
  geometry.pages = config_.latent_pages;
  geometry.page_size = config_.page_size;
  geometry.slots = config_.state_slots + config_.snapshot_slots;
  geometry.page_dtype = model.ops().activation_dtype();
  geometry.conv_dtype = model.ops().activation_dtype();
  const StepBounds bounds{.tokens = config_.max_num_batched_tokens,
                          .sequences = std::min(config_.max_num_seqs, config_.state_slots),
                          .logits_rows = 8,
                          .context = config_.max_model_len};
  ExecutorOptions options;
  options.decode_sizes = mode_.decode_sizes;
  options.balance = mode_.balance;
  poisoned_.resize(static_cast<size_t>(config_.data_parallel));
  if (model.ranks() != nullptr) {
    const absl::Status made = model.ranks()->MakeExecutors(bounds, geometry, options);
    K3_CHECK(made.ok());
    return;
  }
  auto executor = Executor::Create(model.model(), model.ops(), bounds, geometry, std::move(options));
  K3_CHECK(executor.ok());
  executor_ = *std::move(executor);
  if (model.ops().can_capture() && !mode_.decode_sizes.empty()) {
    const absl::StatusOr<WarmUpReport> report = executor_->WarmUp();
    if (!report.ok()) throw std::runtime_error(std::string(report.status().message()));
    if (report->graphs == 0) throw std::runtime_error("warm-up captured no decode step");
  }
}

RequestId EngineHarness::Submit(const TestRequest& wanted) {
  auto request = std::make_unique<Request>();
  request->prompt_tokens = wanted.prompt;
  request->sampling.temperature = wanted.temperature;
  request->sampling.top_p = wanted.top_p;
  request->sampling.seed = wanted.seed;
  request->sampling.presence_penalty = wanted.presence_penalty;
  request->sampling.repetition_penalty = wanted.repetition_penalty;
  request->sampling.max_new_tokens = wanted.max_new_tokens;
  request->sampling.top_logprobs = 0;
  request->sampling.prompt_logprobs = wanted.prompt_logprobs;
  request->num_choices = wanted.choices;
  request->priority = wanted.priority;
  request->session_id = wanted.session;
  request->bypass_prefix_cache = wanted.bypass_prefix_cache;
  if (wanted.deadline_steps) request->deadline = now_ + std::chrono::milliseconds(*wanted.deadline_steps);
  auto outcome = std::make_shared<Outcome>();
  outcome->choices.resize(static_cast<size_t>(wanted.choices));
  request->sink = std::make_shared<RecordingSink>(outcome);
  const absl::Status fits = CheckRequest(config_, *request);
  if (!fits.ok()) ADD_FAILURE() << fits;
  const RequestId id = next_id_++;
  outcomes_[id] = std::move(outcome);
  scheduler_.Submit(id, std::move(request), now_);
  return id;
}

void EngineHarness::Cancel(RequestId id) { scheduler_.Cancel(id, absl::CancelledError("cancelled by the test"), now_); }

void EngineHarness::ForCaches(int32_t group, const std::function<void(CacheStorage&)>& work) {
  if (executor_ != nullptr) return work(executor_->cache());
  RankGroup& ranks = *model_.ranks();
  for (int local = 0; local < ranks.local_ranks(); ++local) {
    if (ranks.data_rank_of(local) == group) work(ranks.executor(local).cache());
  }
}

void EngineHarness::PoisonFree() {
  // What became free since the last step; the rest still holds its poison.
  for (int32_t group = 0; group < config_.data_parallel; ++group) {
    const CacheManager& cache = scheduler_.cache(group);
    Poisoned& poisoned = poisoned_[static_cast<size_t>(group)];
    poisoned.pages.resize(static_cast<size_t>(config_.latent_pages));
    poisoned.slots.resize(static_cast<size_t>(config_.state_slots + config_.snapshot_slots));
    for (size_t p = 0; p < poisoned.pages.size(); ++p) {
      const PageId page{static_cast<int32_t>(p)};
      const bool free = cache.pages().IsFree(page);
      if (free && !poisoned.pages[p]) ForCaches(group, [&](CacheStorage& storage) { storage.FillPage(page, 0xFF); });
      poisoned.pages[p] = free;
    }
    for (size_t s = 0; s < poisoned.slots.size(); ++s) {
      const StateSlot slot{static_cast<int32_t>(s)};
      const bool free = cache.states().IsFree(slot);
      if (free && !poisoned.slots[s]) ForCaches(group, [&](CacheStorage& storage) { storage.FillSlot(slot, 0xFF); });
      poisoned.slots[s] = free;
    }
  }
}

bool EngineHarness::Step() {
  now_ += std::chrono::milliseconds(1);
  if (submitted_ > committed_ && !scheduler_.CanPlanAhead()) Commit();
  if (poison) PoisonFree();
  StepPlan& plan = plans_[submitted_ % 2];
  if (!scheduler_.PlanStep(now_, &plan)) {
    if (submitted_ == committed_) return false;
    Commit();
    return true;
  }
  for (const RankPlan& rank : plan.ranks) K3_CHECK(rank.num_tokens() <= config_.max_num_batched_tokens);
  if (before_run) before_run(plan);
  const absl::Status status = runner().Submit(plan);
  K3_CHECK(status.ok());
  steps_ahead += submitted_ > committed_;
  ++submitted_;
  if (submitted_ - committed_ > 1) Commit();
  if (!mode_.plan_ahead || !scheduler_.CanPlanAhead()) Commit();
  return true;
}

void EngineHarness::Commit() {
  const StepPlan& plan = plans_[committed_ % 2];
  const absl::Status status = runner().Wait(&result_);
  K3_CHECK(status.ok());
  if (after_run) after_run(plan, &result_);
  ++committed_;
  scheduler_.CommitStep(plan, result_, now_);
  std::vector<Scheduler::Scrub> scrubs;
  if (scheduler_.TakeScrub(&scrubs)) {
    for (size_t group = 0; group < scrubs.size(); ++group) {
      runner().Scrub(static_cast<int32_t>(group), scrubs[group].pages, scrubs[group].slots);
    }
  }
  scheduler_.CheckInvariants();
}

void EngineHarness::RunAll(int max_steps) {
  for (int step = 0; Step(); ++step) K3_CHECK(step < max_steps);
}

EngineLoad EngineHarness::Load() const {
  EngineLoad load;
  scheduler_.FillLoad(&load);
  return load;
}

Outcome RunAlone(TestModel& model, const TestRequest& request) {
  EngineConfig config;
  config.page_size = 64;
  config.latent_pages =
      static_cast<int32_t>(request.choices * (request.prompt.size() + request.max_new_tokens + 64) / 64 + 1);
  config.state_slots = request.choices;
  config.max_num_seqs = request.choices;
  config.enable_prefix_caching = false;
  config.max_num_batched_tokens = static_cast<int32_t>(request.prompt.size()) + request.choices;
  EngineHarness harness(model, config);
  TestRequest unhurried = request;
  unhurried.deadline_steps.reset();
  const RequestId id = harness.Submit(unhurried);
  harness.RunAll();
  return harness.outcome(id);
}

void ExpectSameAnswer(const Outcome& actual, const Outcome& alone, bool prefix_ok) {
  ASSERT_EQ(actual.choices.size(), alone.choices.size());
  for (size_t c = 0; c < alone.choices.size(); ++c) {
    const ChoiceOutcome& a = actual.choices[c];
    const ChoiceOutcome& b = alone.choices[c];
    const size_t count = prefix_ok ? std::min(a.tokens.size(), b.tokens.size()) : b.tokens.size();
    ASSERT_EQ(std::vector(a.tokens.begin(), a.tokens.begin() + std::min(count, a.tokens.size())),
              std::vector(b.tokens.begin(), b.tokens.begin() + count))
        << "choice " << c;
    if (count > 0) {  // an empty vector may have no address
      EXPECT_EQ(std::memcmp(a.logprobs.data(), b.logprobs.data(), count * sizeof(float)), 0) << "choice " << c;
    }
    if (!prefix_ok) {
      EXPECT_EQ(a.tokens.size(), b.tokens.size());
      EXPECT_EQ(a.reason, b.reason);
    }
  }
  if (!prefix_ok) {
    EXPECT_EQ(actual.prompt_logprobs, alone.prompt_logprobs);
  }
}

std::vector<int32_t> RandomTokens(uint64_t seed, int32_t count, int32_t vocab_size) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab_size));
  return tokens;
}

}  // namespace k3::testing
