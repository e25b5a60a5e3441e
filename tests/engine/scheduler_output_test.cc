#include <gtest/gtest.h>

#include "engine/scheduler.h"
#include "tests/testing/scheduler_harness.h"

namespace k3 {
namespace {

using testing::Endless;
using testing::ExpectedPromptLogprobs;
using testing::ExpectedTokens;
using testing::Greedy;
using testing::RandomPrompt;
using testing::SchedulerHarness;
using Handle = SchedulerHarness::Handle;

// --- several choices ---

TEST(SchedulerChoicesTest, ChoicesShareThePromptAndDiffer) {
  for (size_t length : {1, 15, 16, 17, 40, 64}) {
    for (bool caching : {true, false}) {
      EngineConfig config = SchedulerHarness::SmallConfig();
      config.enable_prefix_caching = caching;
      SchedulerHarness harness(config);
      SamplingParams sampling = Endless(20);
      sampling.temperature = 1;
      const Handle handle = harness.Submit(RandomPrompt(length, 1), sampling, [](Request& r) { r.num_choices = 4; });
      int64_t prompt_tokens = 0;
      while (harness.Step()) {
        for (int32_t position : harness.plan.ranks[0].position)
          prompt_tokens += position < static_cast<int32_t>(length);
        if (!handle.sink->tokens().empty() && !handle.sink->done() && handle.sink->tokens().size() == 2) {
          // Full pages once, and one open page for each.
          EXPECT_LE(harness.Load().pages_used, static_cast<int64_t>(length / 16) + 4);
          EXPECT_EQ(harness.Load().state_slots_used, 4);
        }
      }
      EXPECT_EQ(prompt_tokens, static_cast<int64_t>(length));  // computed once
      harness.ExpectAlone(handle);
      EXPECT_NE(handle.sink->tokens(0), handle.sink->tokens(1));
      EXPECT_EQ(handle.sink->usage().completion_tokens, 80);
      harness.ExpectIdle();
    }
  }
}

TEST(SchedulerChoicesTest, MoreChoicesThanMayRunAtOnceTakeTurns) {
  EngineConfig config = SchedulerHarness::SmallConfig();
  config.max_num_seqs = 1;
  SchedulerHarness harness(config);
  SamplingParams sampling = Endless(12);
  sampling.temperature = 1;
  const Handle handle = harness.Submit(RandomPrompt(40, 1), sampling, [](Request& r) { r.num_choices = 5; });
  while (harness.Step()) EXPECT_LE(harness.plan.ranks[0].num_sequences(), 1);
  harness.ExpectAlone(handle);
  EXPECT_EQ(handle.sink->usage().preemptions, 0);
}

TEST(SchedulerChoicesTest, TheSourceMayEndFirst) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  SamplingParams sampling = Greedy(10);
  sampling.temperature = 1;
  const std::vector<int32_t> prompt = RandomPrompt(40, 1);
  // Choice 0 ends with its first token, the others do not.
  sampling.stop_token_ids = {ExpectedTokens(harness.model, prompt, sampling, 0, {}).tokens[0]};
  const Handle handle = harness.Submit(prompt, sampling, [](Request& r) { r.num_choices = 3; });
  harness.Run();
  harness.ExpectAlone(handle);
  EXPECT_EQ(handle.sink->tokens(0).size(), 1u);
  EXPECT_GT(handle.sink->tokens(1).size() + handle.sink->tokens(2).size(), 2u);
  harness.ExpectIdle();
}

TEST(SchedulerChoicesTest, AllMayEndWithTheirFirstToken) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  const Handle handle = harness.Submit(RandomPrompt(40, 1), Greedy(1), [](Request& r) { r.num_choices = 3; });
  harness.Run();
  harness.ExpectAlone(handle);
  harness.ExpectIdle();
}

TEST(SchedulerChoicesTest, ANonFiniteChoiceEndsItsRequestOnce) {
  for (size_t poisoned = 0; poisoned < 3; ++poisoned) {
    SchedulerHarness harness(SchedulerHarness::SmallConfig());
    SamplingParams sampling = Endless(40);
    sampling.temperature = 1;
    const std::vector<int32_t> prompt = RandomPrompt(40, 1);
    const Handle handle = harness.Submit(prompt, sampling, [](Request& r) { r.num_choices = 3; });
    const Handle other = harness.Submit(RandomPrompt(30, 2), Endless(40));
    while (handle.sink->tokens(2).size() < 5) ASSERT_TRUE(harness.Step());
    // Find the choice's slot by what it fed last.
    const RankPlan& plan = harness.plan.ranks[0];
    const std::vector<int32_t> tokens = handle.sink->tokens(static_cast<int32_t>(poisoned));
    for (size_t s = 0; s < plan.context.size(); ++s) {
      const size_t position = static_cast<size_t>(plan.context[s]);
      if (position == prompt.size() + tokens.size() - 2 && plan.tokens[s] == tokens[tokens.size() - 2]) {
        harness.runner.PoisonSlot(0, {plan.state_slot[s]});
      }
    }
    ASSERT_TRUE(harness.Step());
    EXPECT_EQ(handle.sink->status().code(), absl::StatusCode::kInternal);
    EXPECT_EQ(harness.Load().nonfinite_rows, 1u);
    harness.Run();
    harness.ExpectAlone(other);
    harness.ExpectIdle();
    const Handle again = harness.Submit(prompt, sampling);
    harness.Run();
    EXPECT_EQ(again.sink->cached_tokens(), 0);
    harness.ExpectAlone(again);
  }
}

TEST(SchedulerChoicesTest, StoppingTheSourceDuringThePromptPassesItOn) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  const std::vector<int32_t> prompt = RandomPrompt(200, 1);
  SamplingParams sampling = Endless(10);
  sampling.temperature = 1;
  sampling.prompt_logprobs = true;
  const Handle handle = harness.Submit(prompt, sampling, [](Request& r) { r.num_choices = 3; });
  harness.Step();
  harness.scheduler.StopChoice(handle.id, 0, harness.now);
  harness.Step([&] { harness.scheduler.StopChoice(handle.id, 1, harness.now); });
  harness.Run();
  EXPECT_TRUE(handle.sink->status().ok());
  EXPECT_TRUE(handle.sink->tokens(0).empty());
  EXPECT_TRUE(handle.sink->tokens(1).empty());
  EXPECT_EQ(handle.sink->choice(1).reason, FinishReason::kStop);
  EXPECT_EQ(handle.sink->tokens(2), ExpectedTokens(harness.model, prompt, sampling, 2, {}).tokens);
  EXPECT_EQ(handle.sink->prompt_logprobs(), ExpectedPromptLogprobs(harness.model, prompt));
  harness.ExpectIdle();
}

// --- log-probabilities ---

TEST(SchedulerLogprobsTest, PromptTokensAreScoredOnceInOrder) {
  for (int32_t max_new : {0, 5}) {
    for (size_t length : {1, 2, 17, 150}) {
      EngineConfig config = SchedulerHarness::SmallConfig();
      config.latent_pages = 12;
      config.max_model_len = 180;
      SchedulerHarness harness(config);
      const std::vector<int32_t> prompt = RandomPrompt(length, 1);
      harness.Submit(prompt, 1);  // the second request does not resume from what this one leaves
      harness.Run();
      SamplingParams sampling = Endless(max_new);
      sampling.prompt_logprobs = true;
      sampling.top_logprobs = 3;
      const Handle handle = harness.Submit(prompt, sampling);
      harness.Run();
      EXPECT_TRUE(handle.sink->status().ok());
      EXPECT_EQ(handle.sink->cached_tokens(), 0);
      EXPECT_EQ(handle.sink->prompt_logprobs(), ExpectedPromptLogprobs(harness.model, prompt));
      EXPECT_EQ(handle.sink->tokens().size(), static_cast<size_t>(max_new));
      EXPECT_EQ(handle.sink->choice().reason, FinishReason::kLength);
      harness.ExpectIdle();
    }
  }
}

TEST(SchedulerLogprobsTest, ChosenAndTopTokens) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  std::vector<Handle> handles;
  for (int32_t top : {-1, 0, 3, 20}) {
    SamplingParams sampling = Endless(6);
    sampling.top_logprobs = top;
    handles.push_back(harness.Submit(RandomPrompt(20, 1), sampling));
  }
  harness.Run();
  EXPECT_TRUE(handles[0].sink->choice().logprobs.empty());
  for (size_t i = 1; i < handles.size(); ++i) {
    const testing::RecordingSink::Choice got = handles[i].sink->choice();
    ASSERT_EQ(got.logprobs.size(), 6u);
    for (size_t t = 0; t < 6; ++t) {
      ASSERT_EQ(got.tops[t].size(), static_cast<size_t>(handles[i].sampling.top_logprobs));
      if (got.tops[t].empty()) continue;
      EXPECT_EQ(got.tops[t][0].token, got.tokens[t]);  // greedy
      EXPECT_EQ(got.tops[t][0].logprob, got.logprobs[t]);
      for (size_t k = 1; k < got.tops[t].size(); ++k) EXPECT_LE(got.tops[t][k].logprob, got.tops[t][k - 1].logprob);
    }
  }
}

// --- ends ---

TEST(SchedulerEndsTest, StopsMinimaAndRepetition) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  const std::vector<int32_t> prompt = RandomPrompt(20, 1);
  const std::vector<int32_t> plain = ExpectedTokens(harness.model, prompt, Endless(10), 0, {}).tokens;

  SamplingParams stopped = Endless(10);
  stopped.stop_token_ids = {plain[3]};
  const Handle stop = harness.Submit(prompt, stopped);
  SamplingParams late = stopped;
  late.min_new_tokens = 6;
  const Handle minimum = harness.Submit(prompt, late);
  SamplingParams looping = Endless(20);
  looping.allowed_ids = {7};
  looping.repetition_max_period = 2;
  looping.repetition_count = 4;
  const Handle loop = harness.Submit(prompt, looping);
  harness.Run();
  harness.ExpectAlone(stop);
  EXPECT_EQ(stop.sink->choice().stop_token, plain[3]);
  EXPECT_EQ(stop.sink->tokens().size(), 4u);
  harness.ExpectAlone(minimum);
  EXPECT_GE(minimum.sink->tokens().size(), 6u);
  harness.ExpectAlone(loop);
  EXPECT_EQ(loop.sink->choice().reason, FinishReason::kRepetition);
  EXPECT_EQ(loop.sink->tokens(), std::vector<int32_t>(4, 7));
}

TEST(SchedulerEndsTest, ARowWithNothingAllowedIsAnError) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  SamplingParams sampling = Endless(5);
  sampling.allowed_ids = {4};
  sampling.banned_ids = {4};
  const Handle bad = harness.Submit(RandomPrompt(20, 1), sampling);
  const Handle good = harness.Submit(RandomPrompt(20, 2), Endless(5));
  harness.Run();
  EXPECT_EQ(bad.sink->status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(bad.sink->tokens().empty());
  EXPECT_EQ(harness.Load().nonfinite_rows, 0u);
  harness.ExpectAlone(good);
}

}  // namespace
}  // namespace k3
