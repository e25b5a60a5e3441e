#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/testing/scheduler_harness.h"

namespace k3 {
namespace {

using testing::Endless;
using testing::RandomPrompt;
using testing::SchedulerHarness;
using Handle = SchedulerHarness::Handle;

TEST(SchedulerTest, OneRequestGivesTheModelsTokens) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  const Handle handle = harness.Submit(RandomPrompt(100, 1), 20);
  harness.Run();
  harness.ExpectAlone(handle);
  EXPECT_EQ(handle.sink->admissions(), 1);
  EXPECT_EQ(handle.sink->usage().prompt_tokens, 100);
  EXPECT_EQ(handle.sink->usage().completion_tokens, static_cast<int32_t>(handle.sink->tokens().size()));
  EXPECT_GT(handle.sink->usage().prefill_seconds, 0);
  EXPECT_GT(handle.sink->usage().decode_seconds, 0);
  harness.ExpectIdle();
}

TEST(SchedulerTest, ManyRequestsTogetherGiveWhatEachGivesAlone) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  std::vector<Handle> handles;
  for (uint64_t i = 0; i < 20; ++i) {
    handles.push_back(harness.Submit(RandomPrompt(1 + i * 13, i), 5 + static_cast<int32_t>(i)));
  }
  harness.Run();
  for (const Handle& handle : handles) harness.ExpectAlone(handle);
  harness.ExpectIdle();
}

TEST(SchedulerTest, NothingToDoIsNoStep) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  EXPECT_FALSE(harness.Step());
  harness.Submit(RandomPrompt(3, 1), 1);
  EXPECT_TRUE(harness.Step());
  EXPECT_FALSE(harness.Step());
}

TEST(SchedulerTest, DecodesComeFirstAndChunksFillTheBudget) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_batched_tokens = 40;
  config.prefill_chunk = 40;
  SchedulerHarness harness(config);
  std::vector<Handle> decoding;
  for (uint64_t i = 0; i < 5; ++i) decoding.push_back(harness.Submit(RandomPrompt(4, i), Endless(100)));
  while (decoding.back().sink->tokens().empty()) harness.Step();
  const Handle prompt = harness.Submit(RandomPrompt(100, 9), Endless(3));
  while (prompt.sink->tokens().empty()) {
    const size_t before = decoding[0].sink->tokens().size();
    harness.Step();
    EXPECT_EQ(decoding[0].sink->tokens().size(), before + 1);
    const RankPlan& plan = harness.plan.ranks[0];
    EXPECT_EQ(plan.num_sequences(), 6);
    for (size_t s = 0; s < 5; ++s) EXPECT_EQ(plan.token_begin[s + 1] - plan.token_begin[s], 1);  // packed first
    if (prompt.sink->tokens().empty()) {
      EXPECT_EQ(plan.num_tokens(), 40);  // the rest belongs to the prompt
    }
  }
}

TEST(SchedulerTest, SequencesPerRankNeverExceedTheTokenBudget) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_batched_tokens = 3;
  config.prefill_chunk = 3;
  SchedulerHarness harness(config);
  std::vector<Handle> handles;
  for (uint64_t i = 0; i < 8; ++i) handles.push_back(harness.Submit(RandomPrompt(2, i), Endless(20)));
  while (harness.Step()) EXPECT_LE(harness.Load().running, 3);
  for (const Handle& handle : handles) harness.ExpectAlone(handle);
}

TEST(SchedulerTest, ShortPromptsPassWaitingLongOnes) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_batched_tokens = 64;
  config.prefill_chunk = 32;
  config.long_prompt_tokens = 128;
  config.max_long_prefills = 2;
  SchedulerHarness harness(config);
  std::vector<Handle> longs;
  for (uint64_t i = 0; i < 4; ++i) longs.push_back(harness.Submit(RandomPrompt(600, i), 2));
  harness.Step();
  const Handle brief = harness.Submit(RandomPrompt(20, 9), 2);
  for (int step = 0; step < 3; ++step) harness.Step();
  EXPECT_TRUE(brief.sink->done());
  int admitted = 0;
  for (const Handle& handle : longs) admitted += handle.sink->admissions();
  EXPECT_EQ(admitted, 2);
  harness.Run();
  for (const Handle& handle : longs) harness.ExpectAlone(handle);
}

TEST(SchedulerTest, PriorityDecidesWhoRunsNext) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_seqs = 1;
  SchedulerHarness harness(config);
  const Handle running = harness.Submit(RandomPrompt(5, 1), Endless(5));
  harness.Step();
  const Handle low = harness.Submit(RandomPrompt(5, 2), 1, [](Request& r) { r.priority = -1; });
  const Handle high = harness.Submit(RandomPrompt(5, 3), 1, [](Request& r) { r.priority = 1; });
  while (!high.sink->done()) {
    EXPECT_FALSE(low.sink->done());
    ASSERT_TRUE(harness.Step());
  }
  harness.Run();
  EXPECT_TRUE(low.sink->status().ok());
  EXPECT_TRUE(running.sink->status().ok());
}

TEST(SchedulerTest, SessionsTakeTurns) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_seqs = 1;
  SchedulerHarness harness(config);
  std::vector<Handle> flood;
  for (uint64_t i = 0; i < 20; ++i) {
    flood.push_back(harness.Submit(RandomPrompt(5, i), 2, [](Request& r) { r.session_id = "flood"; }));
  }
  harness.Step();
  const Handle other = harness.Submit(RandomPrompt(5, 99), 2, [](Request& r) { r.session_id = "other"; });
  while (!other.sink->done()) ASSERT_TRUE(harness.Step());
  const auto done = std::count_if(flood.begin(), flood.end(), [](const Handle& h) { return h.sink->done(); });
  EXPECT_LE(done, 3);
  harness.Run();
}

TEST(SchedulerTest, TheOldestIsNeverPreemptedAndEverybodyEnds) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.latent_pages = 12;
  config.max_model_len = 180;
  SchedulerHarness harness(config);
  std::vector<Handle> handles;
  for (uint64_t i = 0; i < 12; ++i) handles.push_back(harness.Submit(RandomPrompt(15, i), Endless(150)));
  for (uint64_t before = 0; harness.Step(); before = harness.Load().preemptions) {
    if (harness.Load().preemptions == before) continue;
    // Nobody is admitted in a step that took pages away from somebody.
    EXPECT_TRUE(harness.plan.ranks[0].zero_slots.empty() && harness.plan.ranks[0].state_copies.empty());
  }
  EXPECT_GT(harness.Load().preemptions, 5u);
  EXPECT_EQ(handles[0].sink->usage().preemptions, 0);
  for (const Handle& handle : handles) harness.ExpectAlone(handle);
  harness.ExpectIdle();
  EXPECT_EQ(harness.Load().pages_peak, 12);
}

TEST(SchedulerTest, DeadlinesEndRequestsInEveryPhase) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_seqs = 1;
  SchedulerHarness harness(config);
  const auto deadline = [&](int steps) {
    return [&harness, steps](Request& r) { r.deadline = harness.now + steps * harness.step_time; };
  };
  const Handle decoding = harness.Submit(RandomPrompt(5, 1), Endless(1000), deadline(20));
  const Handle queued = harness.Submit(RandomPrompt(5, 2), Endless(5), deadline(10));
  const Handle after = harness.Submit(RandomPrompt(5, 3), Endless(5), deadline(1000));
  EXPECT_EQ(harness.scheduler.NextDeadline(), harness.now + 10 * harness.step_time);
  harness.Run();
  EXPECT_EQ(queued.sink->status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(queued.sink->choice().reason, FinishReason::kCancelled);
  EXPECT_EQ(decoding.sink->status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NEAR(static_cast<double>(decoding.sink->tokens().size()), 20, 1);
  harness.ExpectAlone(after);
  harness.ExpectIdle();
}

TEST(SchedulerTest, DeadlinesOfEndedRequestsAreForgotten) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  const Clock::time_point far = harness.now + std::chrono::hours(1);
  for (int i = 0; i < 20000; ++i) {
    const Handle handle = harness.Submit({1, 2, 3}, 1, [far](Request& r) { r.deadline = far; });
    harness.Cancel(handle);
  }
  const Handle last =
      harness.Submit({1, 2, 3}, Endless(5), [&](Request& r) { r.deadline = harness.now + harness.step_time; });
  EXPECT_EQ(harness.scheduler.NextDeadline(), harness.now + harness.step_time);
  harness.Run();
  EXPECT_EQ(last.sink->status().code(), absl::StatusCode::kDeadlineExceeded);
}

// --- ranks ---

TEST(SchedulerRanksTest, SequencesGoWhereTheirPrefixIsOrLeastRuns) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.data_parallel = 3;
  SchedulerHarness harness(config);
  std::vector<Handle> handles;
  for (uint64_t i = 0; i < 6; ++i) handles.push_back(harness.Submit(RandomPrompt(50, i), Endless(10)));
  ASSERT_TRUE(harness.Step());
  ASSERT_EQ(harness.plan.ranks.size(), 3u);  // every rank is in every plan
  for (const RankPlan& rank : harness.plan.ranks) EXPECT_EQ(rank.num_sequences(), 2);
  harness.Run();
  for (const Handle& handle : handles) harness.ExpectAlone(handle);
  // Each again: it is resumed, hence on the rank that holds it.
  for (uint64_t i = 0; i < 6; ++i) {
    const Handle again = harness.Submit(RandomPrompt(50, i), Endless(10));
    harness.Run();
    EXPECT_EQ(again.sink->cached_tokens(), 48);
    harness.ExpectAlone(again);
  }
  const Handle lone = harness.Submit(RandomPrompt(5, 50), Endless(2));
  ASSERT_TRUE(harness.Step());
  int idle = 0;
  for (const RankPlan& rank : harness.plan.ranks) idle += rank.empty();
  EXPECT_EQ(idle, 2);
  harness.Run();
  harness.ExpectAlone(lone);
}

TEST(SchedulerRanksTest, MaxNumSeqsCountsOverAllRanks) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.data_parallel = 2;
  config.max_num_seqs = 3;
  SchedulerHarness harness(config);
  for (uint64_t i = 0; i < 9; ++i) harness.Submit(RandomPrompt(30, i), Endless(10));
  while (harness.Step()) EXPECT_LE(harness.Load().running, 3);
  harness.ExpectIdle();
}

TEST(SchedulerTest, WhatBindsIsCounted) {
  const auto bound = [](const std::function<void(EngineConfig&)>& change) {
    EngineConfig config = SchedulerHarness::SmallConfig();
    change(config);
    SchedulerHarness harness(config);
    for (uint64_t i = 0; i < 4; ++i) harness.Submit(RandomPrompt(60, i), Endless(20));
    harness.Run();
    const EngineLoad load = harness.Load();
    return std::vector<bool>{load.steps_bound_by_pages > 0, load.steps_bound_by_state_slots > 0,
                             load.steps_bound_by_max_seqs > 0};
  };
  EXPECT_EQ(bound([](EngineConfig&) {}), (std::vector<bool>{false, false, false}));
  EXPECT_EQ(bound([](EngineConfig& c) { c.latent_pages = 7; }), (std::vector<bool>{true, false, false}));
  EXPECT_EQ(bound([](EngineConfig& c) { c.state_slots = 2; }), (std::vector<bool>{false, true, false}));
  EXPECT_EQ(bound([](EngineConfig& c) { c.max_num_seqs = 2; }), (std::vector<bool>{false, false, true}));
}

// --- many waiting ---

TEST(SchedulerTest, AHundredThousandWaitWithoutHarm) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  ASSERT_TRUE(config.Resolve().ok());
  Scheduler scheduler(config);
  testing::HashModelRunner runner(testing::HashModel(config.vocab_size), config);
  class Quiet : public TokenSink {
    void OnToken(int32_t, int32_t, const TokenLogprob*) override {}
    void OnChoiceFinished(int32_t, FinishReason, int32_t) override {}
    void OnFinished(const absl::Status&, const RequestUsage&) override {}
  };
  const auto quiet = std::make_shared<Quiet>();
  Clock::time_point now{};
  constexpr int kRequests = 100000;
  for (int i = 1; i <= kRequests; ++i) {
    auto request = std::make_unique<Request>();
    request->prompt_tokens = {i % 90, 1, 2};
    request->sampling = Endless(1000);
    request->session_id = std::to_string(i % 100);
    request->priority = i % 7;
    request->sink = quiet;
    scheduler.Submit(static_cast<RequestId>(i), std::move(request), now);
  }
  StepPlan plan;
  StepResult result;
  for (int step = 0; step < 100; ++step) {
    now += std::chrono::milliseconds(1);
    ASSERT_TRUE(scheduler.PlanStep(now, &plan));
    EXPECT_EQ(plan.ranks[0].num_sequences(), 8);
    ASSERT_TRUE(runner.Run(plan, &result).ok());
    scheduler.CommitStep(plan, result, now);
  }
  EXPECT_EQ(scheduler.backlog().queued, kRequests - 8);
  for (int i = 1; i <= kRequests; ++i) scheduler.Cancel(static_cast<RequestId>(i), absl::CancelledError(""), now);
  EXPECT_FALSE(scheduler.HasWork());
  EXPECT_EQ(scheduler.backlog().queued, 0);
}

}  // namespace
}  // namespace k3
