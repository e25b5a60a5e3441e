// The same answer always: thousands of random schedules over the hash model, each request compared with the model
// alone. Random pools (down to one sequence's worth), chunks, budgets, ranks and policies; shared prefixes, several
// choices, every sampling parameter; cancels and stops in every phase, deadlines, flushes, and states that turn to NaN.
// After each step all invariants are checked and all free pages and slots are poisoned (SchedulerHarness).
//
// K3_SCHEDULES=N runs N schedules instead of the short form (scripts/soak_engine.sh); K3_SCHEDULE_SEED=S only that one.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "tests/testing/scheduler_harness.h"

namespace k3 {
namespace {

using testing::ExpectedChoice;
using testing::RandomPrompt;
using testing::SchedulerHarness;
using Handle = SchedulerHarness::Handle;

// Allows ids whose value is at least the last token's modulo 50; depends on every token so far through `sum_`.
class RollingConstraint : public TokenConstraint {
 public:
  bool FillMask(std::span<uint32_t> mask) override {
    if (sum_ % 3 == 0) return false;
    for (size_t id = 0; id < mask.size() * 32; ++id) {
      const uint32_t bit = 1u << (id % 32);
      mask[id / 32] = (id + sum_) % 5 != 0 ? mask[id / 32] | bit : mask[id / 32] & ~bit;
    }
    return true;
  }
  bool Accept(int32_t token) override {
    sum_ = sum_ * 31 + static_cast<uint32_t>(token);
    return true;
  }
  std::unique_ptr<TokenConstraint> Fork() const override { return std::make_unique<RollingConstraint>(); }

 private:
  uint32_t sum_ = 1;
};

struct Totals {
  uint64_t requests = 0, completed = 0, cut = 0, failed = 0, preemptions = 0, prefill_preemptions = 0, hits = 0,
           partial_hits = 0, forks = 0, steps = 0, steps_ahead = 0, verified = 0, biased = 0, biased_hits = 0,
           biased_preemptions = 0;
};

class Schedule {
 public:
  // Every fifth schedule changes the routers' bias as it goes.
  Schedule(uint64_t seed, bool plan_ahead, Totals* totals)
      : random_(seed), totals_(*totals), bias_epochs_(seed % 5 == 0), harness_(RandomConfig()) {
    harness_.plan_ahead = plan_ahead;
  }

  void Run() {
    const int requests = Between(1, 16);
    int submitted = 0, poisonings = 0;
    int64_t steps = 0;
    while (submitted < requests || harness_.scheduler.HasWork()) {
      while (submitted < requests && (!harness_.scheduler.HasWork() || Chance(arrival_share_))) {
        Submit();
        ++submitted;
      }
      if (Chance(0.002)) harness_.scheduler.FlushCache();
      if (Chance(cancel_share_)) Interfere();
      const bool cancel_in_flight = Chance(cancel_share_);
      const bool poison = poisons_ && Chance(0.03);
      if (poison)
        harness_.runner.before_step = [&](const StepPlan& plan) {
          const RankPlan& rank = plan.ranks[Index(plan.ranks.size())];
          if (rank.state_slot.empty()) return absl::OkStatus();
          const int32_t slot = rank.state_slot[Index(rank.state_slot.size())];
          harness_.runner.PoisonSlot(static_cast<int32_t>(&rank - plan.ranks.data()), {slot});
          ++poisonings;
          return absl::OkStatus();
        };
      harness_.Step([&] {
        if (cancel_in_flight) Interfere();
      });
      harness_.runner.before_step = nullptr;
      NotePreemptions();
      ASSERT_LT(++steps, 20000) << "livelock";
    }
    totals_.steps += static_cast<uint64_t>(steps);
    totals_.steps_ahead += static_cast<uint64_t>(harness_.steps_ahead);
    int failures = 0;
    for (const Item& item : items_) {
      Check(item);
      failures += item.handle.sink->status().code() == absl::StatusCode::kInternal;
    }
    EXPECT_LE(failures, poisonings);
    EXPECT_EQ(harness_.Load().hit_disagreements <= static_cast<uint64_t>(poisonings), true);
    harness_.ExpectIdle();
    const EngineLoad load = harness_.Load();
    totals_.preemptions += load.preemptions;
    totals_.verified += load.verified_hits;
    uint64_t prompt = 0, generated = 0;
    for (const Item& item : items_) {
      prompt += static_cast<uint64_t>(item.handle.sink->usage().prompt_tokens);
      generated += static_cast<uint64_t>(item.handle.sink->usage().completion_tokens);
    }
    EXPECT_EQ(load.prompt_tokens, prompt);
    EXPECT_EQ(load.generated_tokens, generated);
    EXPECT_EQ(harness_.scheduler.fingerprint_mismatches(), 0u);
    harness_.scheduler.FlushCache();
    harness_.scheduler.CheckInvariants();
    EXPECT_EQ(harness_.Load().pages_cached, 0);
    EXPECT_EQ(harness_.Load().snapshots_used, 0);
  }

 private:
  struct Item {
    Handle handle;
    bool constrained = false;
    bool interfered = false;  // cancelled, stopped, or given a deadline
    int32_t preemptions_seen = 0;
  };

  int Between(int low, int high) { return low + static_cast<int>(random_() % static_cast<uint64_t>(high - low + 1)); }
  bool Chance(double share) { return static_cast<double>(random_() >> 11) * 0x1p-53 < share; }
  size_t Index(size_t size) { return static_cast<size_t>(random_() % size); }
  template <typename T>
  T OneOf(std::initializer_list<T> values) {
    return values.begin()[Index(values.size())];
  }

  EngineConfig RandomConfig() {
    EngineConfig config = SchedulerHarness::SmallConfig();
    config.page_size = OneOf({1, 2, 3, 4, 8, 16});
    config.snapshot_interval = config.page_size * Between(1, 6);
    longest_ = Between(8, 90);
    const int32_t own_pages = (longest_ + config.page_size - 1) / config.page_size;
    config.latent_pages = Chance(0.4) ? own_pages + Between(0, 6) : own_pages * Between(2, 6);
    config.max_model_len = longest_ + 1;
    config.max_num_seqs = Chance(0.2) ? 1 : Between(2, 8);
    config.state_slots = Chance(0.2) ? 1 : Between(2, 8);
    config.snapshot_slots = Chance(0.2) ? 0 : Between(1, 12);
    config.max_num_batched_tokens = Chance(0.2) ? Between(1, 8) : Between(8, 60);
    config.prefill_chunk = Chance(0.3) ? 0 : Between(1, config.max_num_batched_tokens);
    if (Chance(0.1)) {
      config.prefill_alignment = config.page_size;
      config.short_tail = Between(0, 3);
      const int32_t least = 2 * config.prefill_alignment + config.short_tail;
      if (config.prefill_chunk > 0) config.prefill_chunk = std::max(config.prefill_chunk, least);
      config.max_num_batched_tokens = std::max(config.max_num_batched_tokens, config.max_num_seqs + least);
    }
    config.long_prompt_tokens = Chance(0.5) ? 0 : Between(1, 40);
    config.max_long_prefills = Between(1, 2);
    config.enable_prefix_caching = Chance(0.85);
    config.data_parallel = Chance(0.7) ? 1 : Between(2, 3);
    config.verify_hits = Chance(0.2) ? 0.5 : 0;
    config.eos_token_ids = Chance(0.5) ? std::vector<int32_t>{SchedulerHarness::kEos} : std::vector<int32_t>{3, 77};
    cancel_share_ = Chance(0.4) ? 0.1 : 0;
    arrival_share_ = OneOf({0.02, 0.1, 0.5, 0.9});
    poisons_ = Chance(0.15);
    prefix_seed_ = random_();
    config.bias_epochs = bias_epochs_;
    return config;
  }

  void Submit() {
    Item item;
    SamplingParams sampling;
    const int32_t room = static_cast<int32_t>(harness_.config.pool_tokens());
    const int32_t prompt_length = std::min(Between(1, Chance(0.5) ? longest_ - 1 : longest_ / 3), room);
    std::vector<int32_t> prompt = RandomPrompt(static_cast<size_t>(prompt_length), random_());
    if (Chance(0.85)) {  // begins as many others do
      const std::vector<int32_t> prefix = RandomPrompt(static_cast<size_t>(longest_), prefix_seed_ + random_() % 2);
      const size_t shared = Chance(0.4) ? prompt.size() : std::max(Index(prompt.size() + 1), Index(prompt.size() + 1));
      std::copy_n(prefix.begin(), shared, prompt.begin());
    }
    sampling.max_new_tokens = std::max(1, longest_ - prompt_length);
    if (Chance(0.6)) sampling.max_new_tokens = Between(1, sampling.max_new_tokens);
    sampling.temperature = Chance(0.5) ? 0.0f : 0.9f;
    sampling.seed = random_();
    sampling.ignore_eos = Chance(0.5);
    if (Chance(0.2)) sampling.top_k = Between(-1, 120);
    if (Chance(0.2)) sampling.top_p = 0.7f;
    if (Chance(0.1)) sampling.min_p = 0.1f;
    if (Chance(0.2)) sampling.presence_penalty = 1.5f;
    if (Chance(0.2)) sampling.frequency_penalty = 0.5f;
    if (Chance(0.2)) sampling.repetition_penalty = 1.3f;
    if (Chance(0.1)) sampling.logit_bias = {{5, 3.0f}, {6, -2.0f}};
    if (Chance(0.1)) sampling.banned_ids = {1, 2, 3};
    if (Chance(0.1)) sampling.allowed_ids = {1, 4, 9, 16, 25, 36, 49};
    if (Chance(0.2)) sampling.min_new_tokens = Between(1, 5);
    if (Chance(0.1)) sampling.stop_token_ids = {10, 20, 30, 40};
    if (Chance(0.1)) sampling.repetition_max_period = 4, sampling.repetition_count = 2;
    if (Chance(0.2)) sampling.top_logprobs = Between(0, 5);
    if (Chance(0.1)) sampling.prompt_logprobs = true;
    if (sampling.prompt_logprobs && Chance(0.3)) sampling.max_new_tokens = 0;
    const int32_t choices = Chance(0.15) ? Between(2, 5) : 1;
    item.constrained = Chance(0.15);
    // `logprobs` of a choice are compared by ExpectAlone only where there is one.
    item.handle = harness_.Submit(std::move(prompt), sampling, [&](Request& request) {
      request.num_choices = choices;
      request.priority = Between(-2, 2);
      request.session_id = OneOf<std::string>({"", "a", "b"});
      request.cache_salt = Chance(0.1) ? "tenant" : "";
      request.bypass_prefix_cache = Chance(0.1);
      if (item.constrained) {
        for (int32_t i = 0; i < choices; ++i) request.constraints.push_back(std::make_unique<RollingConstraint>());
      }
      if (Chance(0.05)) {
        request.deadline = harness_.now + harness_.step_time * Between(1, 30);
        item.interfered = true;
      }
    });
    items_.push_back(std::move(item));
    ++totals_.requests;
  }

  void Interfere() {
    if (items_.empty()) return;
    Item& item = items_[Index(items_.size())];
    if (item.handle.sink->done()) return;
    item.interfered = true;
    if (Chance(0.5)) {
      harness_.Cancel(item.handle);
    } else {
      harness_.scheduler.StopChoice(item.handle.id, Between(0, item.handle.choices - 1), harness_.now);
    }
  }

  void NotePreemptions() {
    const uint64_t preemptions = harness_.Load().preemptions;
    if (preemptions == preemptions_) return;
    preemptions_ = preemptions;
    for (const Item& item : items_) {
      if (item.handle.sink->admissions() == 1 && !item.handle.sink->done() && item.handle.sink->tokens().empty() &&
          harness_.PlannedTokens(item.handle) == 0) {
        ++totals_.prefill_preemptions;
      }
    }
  }

  void Check(const Item& item) {
    const Handle& handle = item.handle;
    const testing::RecordingSink& sink = *handle.sink;
    ASSERT_EQ(sink.finals(), 1);
    const absl::Status status = sink.status();
    if (sink.admissions() == 1 && sink.cached_tokens() > 0) ++totals_.hits;
    if (sink.usage().routing_epoch > 0) {
      ++totals_.biased;
      totals_.biased_hits += sink.cached_tokens() > 0;
      totals_.biased_preemptions += static_cast<uint64_t>(sink.usage().preemptions);
    }
    EXPECT_EQ(sink.usage().routing_rank >= 0, bias_epochs_ && sink.admissions() == 1);
    bool whole = status.ok() && !item.interfered;
    if (whole) {
      ++totals_.completed;
    } else if (status.code() == absl::StatusCode::kInternal) {
      ++totals_.failed;
    } else {
      EXPECT_TRUE(item.interfered) << status.ToString();
      ++totals_.cut;
    }
    const int32_t pool = static_cast<int32_t>(harness_.config.pool_tokens()) + 1;
    for (int32_t choice = 0; choice < handle.choices; ++choice) {
      RollingConstraint constraint;
      ExpectedChoice expected = ExpectedTokens(harness_.ModelOf(handle), handle.prompt, handle.sampling, choice,
                                               harness_.config.eos_token_ids, item.constrained ? &constraint : nullptr);
      const testing::RecordingSink::Choice got = sink.choice(choice);
      const size_t most = static_cast<size_t>(pool) - handle.prompt.size();
      if (expected.tokens.size() > most) {  // the pool is full before
        expected.tokens.resize(most);
        expected.reason = FinishReason::kLength;
      }
      if (whole) {
        EXPECT_EQ(got.tokens, expected.tokens) << "request " << handle.id << " choice " << choice;
        EXPECT_EQ(got.reason, expected.reason) << "request " << handle.id << " choice " << choice;
      } else {
        ASSERT_LE(got.tokens.size(), expected.tokens.size());
        EXPECT_TRUE(std::equal(got.tokens.begin(), got.tokens.end(), expected.tokens.begin()))
            << "request " << handle.id << " choice " << choice;
      }
      if (handle.sampling.top_logprobs >= 0) {
        EXPECT_TRUE(std::equal(got.logprobs.begin(), got.logprobs.end(), expected.logprobs.begin()));
      }
    }
    if (handle.choices > 1) ++totals_.forks;
    if (handle.sampling.prompt_logprobs) {
      const std::vector<float> expected = ExpectedPromptLogprobs(harness_.ModelOf(handle), handle.prompt);
      const std::vector<float> got = sink.prompt_logprobs();
      ASSERT_LE(got.size(), expected.size());
      if (whole) {
        EXPECT_EQ(got.size(), expected.size());
      }
      EXPECT_TRUE(std::equal(got.begin(), got.end(), expected.begin()));
    }
  }

  std::mt19937_64 random_;
  Totals& totals_;
  const bool bias_epochs_;
  int32_t longest_ = 0;
  double cancel_share_ = 0;
  double arrival_share_ = 0;
  bool poisons_ = false;
  uint64_t prefix_seed_ = 0;
  SchedulerHarness harness_;
  std::vector<Item> items_;
  uint64_t preemptions_ = 0;
};

// Seeds of failures are added here and run for ever after. None has failed yet; those listed have many preemptions.
constexpr uint64_t kKeptSeeds[] = {2003, 2333, 2486};

// A broken invariant aborts: then the seed must still be known.
uint64_t running_seed = 0;
void NameSeed(int) {
  char line[64];
  const int length = std::snprintf(line, sizeof(line), "aborted in K3_SCHEDULE_SEED=%lu\n", running_seed);
  if (write(STDERR_FILENO, line, static_cast<size_t>(length)) < 0) return;
}

uint64_t EnvironmentNumber(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
}

void RunSchedules(bool plan_ahead) {
  Totals totals;
  const uint64_t only = EnvironmentNumber("K3_SCHEDULE_SEED", 0);
  const uint64_t schedules = EnvironmentNumber("K3_SCHEDULES", 2000);
  std::vector<uint64_t> seeds(std::begin(kKeptSeeds), std::end(kKeptSeeds));
  for (uint64_t seed = 1; seed <= schedules; ++seed) seeds.push_back(seed);
  if (only > 0) seeds = {only};
  const auto before = std::signal(SIGABRT, NameSeed);
  for (uint64_t seed : seeds) {
    running_seed = seed;
    SCOPED_TRACE("K3_SCHEDULE_SEED=" + std::to_string(seed));
    Schedule(seed, plan_ahead, &totals).Run();
    if (::testing::Test::HasFailure()) break;
  }
  std::signal(SIGABRT, before);
  std::printf(
      "requests %lu completed %lu cut %lu failed %lu preemptions %lu (in prefill %lu) hits %lu forks %lu steps %lu "
      "(planned ahead %lu) verified %lu; under a bias %lu, hits %lu, preemptions %lu\n",
      totals.requests, totals.completed, totals.cut, totals.failed, totals.preemptions, totals.prefill_preemptions,
      totals.hits, totals.forks, totals.steps, totals.steps_ahead, totals.verified, totals.biased, totals.biased_hits,
      totals.biased_preemptions);
  if (only > 0 || schedules < 1000) return;
  // The schedules reach what they are meant to reach.
  EXPECT_GT(totals.preemptions, schedules / 4);
  EXPECT_GT(totals.prefill_preemptions, 0u);
  EXPECT_GT(totals.hits, schedules / 4);
  EXPECT_GT(totals.cut, schedules / 10);
  EXPECT_GT(totals.failed, 0u);
  EXPECT_GT(totals.forks, schedules / 10);
  EXPECT_GT(totals.verified, 0u);
  EXPECT_GT(totals.biased, schedules / 4);
  EXPECT_GT(totals.biased_hits, schedules / 400);
  EXPECT_GT(totals.biased_preemptions, schedules / 100);
  if (plan_ahead) {
    EXPECT_GT(totals.steps_ahead, totals.steps / 3);
  }
}

TEST(RandomScheduleTest, SameAnswerAlways) { RunSchedules(/*plan_ahead=*/false); }

// The next step is planned while one is open, wherever that is allowed.
TEST(RandomScheduleTest, SameAnswerPlannedAhead) { RunSchedules(/*plan_ahead=*/true); }

}  // namespace
}  // namespace k3
