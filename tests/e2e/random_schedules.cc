#include "tests/e2e/random_schedules.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <vector>

namespace k3::testing {
namespace {

int64_t EnvOr(const char* name, int64_t value) {
  const char* text = std::getenv(name);
  return text == nullptr ? value : std::atoll(text);
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int32_t In(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(engine_); }
  bool Chance(double p) { return std::uniform_real_distribution<>(0, 1)(engine_) < p; }

 private:
  std::mt19937_64 engine_;
};

EngineConfig RandomConfig(Random& random, int32_t groups) {
  EngineConfig config;
  config.page_size = 1 << random.In(1, 5);
  // Few pages, so that sequences push each other out; enough for the longest request below.
  config.latent_pages = (110 + random.In(0, 120)) / config.page_size + 2;
  config.state_slots = random.In(2, 6);
  config.max_num_seqs = groups * random.In(2, 6);
  config.snapshot_slots = random.In(0, 6);
  config.snapshot_interval = config.page_size * random.In(1, 4);
  config.max_num_batched_tokens = random.In(6, 70);
  config.prefill_chunk = random.Chance(0.3) ? random.In(1, std::min(9, config.max_num_batched_tokens)) : 0;
  config.enable_prefix_caching = random.Chance(0.85);
  config.verify_hits = random.Chance(0.2) ? 0.5 : 0;
  return config;
}

TestRequest RandomRequest(Random& random, int32_t vocab_size) {
  TestRequest request;
  // Three families of prompts: prefixes of one text, sometimes with another ending, so that pages and snapshots are hit
  // at many places.
  const uint64_t family = static_cast<uint64_t>(random.In(1, 3));
  request.prompt = RandomTokens(family, random.In(1, 60), vocab_size);
  if (random.Chance(0.5)) {
    const std::vector<int32_t> tail =
        RandomTokens(100 + static_cast<uint64_t>(random.In(0, 5)), random.In(1, 20), vocab_size);
    request.prompt.insert(request.prompt.end(), tail.begin(), tail.end());
  }
  request.max_new_tokens = random.In(1, 25);
  if (random.Chance(0.3)) {
    request.temperature = 0.9f;
    request.top_p = 0.9f;
    request.seed = static_cast<uint64_t>(random.In(0, 3));
  }
  if (random.Chance(0.15)) request.choices = 2;
  if (random.Chance(0.1)) request.prompt_logprobs = true;
  if (random.Chance(0.1)) request.presence_penalty = 1.5f;
  if (random.Chance(0.1)) request.repetition_penalty = 1.3f;
  request.priority = random.In(0, 2);
  request.session = random.Chance(0.5) ? "" : std::string(1, static_cast<char>('a' + random.In(0, 2)));
  request.bypass_prefix_cache = random.Chance(0.1);
  if (random.Chance(0.1)) request.deadline_steps = random.In(1, 60);
  return request;
}

}  // namespace

std::string AnswerKey(const TestRequest& r) {
  std::string key(reinterpret_cast<const char*>(r.prompt.data()), r.prompt.size() * sizeof(int32_t));
  return key + "|" + std::to_string(r.max_new_tokens) + "|" + std::to_string(r.temperature) + "|" +
         std::to_string(r.top_p) + "|" + std::to_string(r.seed) + "|" + std::to_string(r.choices) + "|" +
         std::to_string(r.prompt_logprobs) + "|" + std::to_string(r.presence_penalty) + "|" +
         std::to_string(r.repetition_penalty);
}

void RunSchedule(TestModel& model, uint64_t seed, const StepMode& mode,
                 const std::function<void(const TestRequest&, const Outcome&, bool cut)>& check,
                 ScheduleTotals* totals) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  EngineHarness harness(model, RandomConfig(random, model.data_parallel()), mode);
  struct Submitted {
    RequestId id;
    TestRequest request;
    int cancel_step;
    bool cancelled = false;
  };
  std::vector<Submitted> submitted;
  int to_come = model.data_parallel() * random.In(4, 14);
  bool busy = true;
  for (int step = 0; busy || to_come > 0; ++step) {
    ASSERT_LT(step, 20000) << "livelock";
    while (to_come > 0 && (!busy || random.Chance(0.4))) {
      TestRequest request = RandomRequest(random, static_cast<int32_t>(model.config().vocab_size));
      if (request.choices > harness.config().state_slots || request.choices > harness.config().max_num_seqs) {
        request.choices = 1;
      }
      const int cancel_step = random.Chance(0.2) ? step + random.In(0, 30) : -1;
      submitted.push_back({harness.Submit(request), std::move(request), cancel_step});
      --to_come;
      busy = true;
    }
    for (Submitted& s : submitted) {
      if (s.cancel_step == step && harness.outcome(s.id).finished == 0) {
        harness.Cancel(s.id);
        s.cancelled = true;
        ++totals->cancelled;
        // Cancelled and asked again: the retry must not notice.
        if (random.Chance(0.3)) {
          to_come = 0;
          submitted.push_back({harness.Submit(s.request), s.request, -1});
          break;
        }
      }
    }
    busy = harness.Step();
  }

  for (const Submitted& s : submitted) {
    const Outcome& outcome = harness.outcome(s.id);
    ASSERT_EQ(outcome.finished, 1);
    EXPECT_FALSE(outcome.late_event);
    for (const ChoiceOutcome& choice : outcome.choices) EXPECT_EQ(choice.finished, 1);
    const bool overdue = absl::IsDeadlineExceeded(outcome.status);
    const bool cut = overdue || absl::IsCancelled(outcome.status);
    EXPECT_TRUE(outcome.status.ok() || (overdue ? s.request.deadline_steps.has_value() : cut && s.cancelled))
        << outcome.status;
    totals->overdue += overdue;
    check(s.request, outcome, cut);
  }
  const EngineLoad load = harness.Load();
  EXPECT_EQ(load.pages_used, 0);
  EXPECT_EQ(load.state_slots_used, 0);
  EXPECT_EQ(load.running, 0);
  EXPECT_EQ(load.waiting, 0);
  EXPECT_EQ(load.hit_disagreements, 0u);
  EXPECT_EQ(load.nonfinite_rows, 0u);
  EXPECT_EQ(harness.scheduler().fingerprint_mismatches(), 0u);
  totals->preemptions += load.preemptions;
  totals->hit_tokens += load.prefix_hit_tokens;
  totals->verified_hits += load.verified_hits;
  totals->steps_ahead += harness.steps_ahead;
}

ScheduleTotals RunSchedules(TestModel& model, const StepMode& mode, int64_t schedules,
                            const std::function<void(const TestRequest&, const Outcome&, bool cut)>& check) {
  ScheduleTotals totals;
  const uint64_t first = static_cast<uint64_t>(EnvOr("K3_EQUIVALENCE_SEED", 1));
  schedules = EnvOr("K3_EQUIVALENCE_SCHEDULES", schedules);
  for (uint64_t seed = first; seed < first + static_cast<uint64_t>(schedules); ++seed) {
    RunSchedule(model, seed, mode, check, &totals);
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_GT(totals.preemptions, static_cast<uint64_t>(schedules) / 40);
  EXPECT_GT(totals.hit_tokens, static_cast<uint64_t>(schedules));
  EXPECT_GT(totals.verified_hits, 0u);
  EXPECT_GT(totals.cancelled, 0);
  EXPECT_GT(totals.overdue, 0);
  return totals;
}

}  // namespace k3::testing
