#include "engine/load_estimator.h"

#include <gtest/gtest.h>

namespace k3 {
namespace {

class LoadEstimatorTest : public ::testing::Test {
 protected:
  void Step(int32_t tokens, int32_t prefill, double seconds) {
    StepStats stats;
    stats.tokens = tokens;
    stats.prefill_tokens = prefill;
    stats.seconds = seconds;
    now_ += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    estimator_.OnStep(stats, backlog_, load_, now_);
  }
  Request Ask(size_t prompt) {
    Request request;
    request.prompt_tokens.assign(prompt, 1);
    request.sampling.max_new_tokens = 100;
    return request;
  }

  LoadEstimator estimator_;
  Scheduler::Backlog backlog_;
  EngineLoad load_;
  Clock::time_point now_{std::chrono::seconds(1)};
};

TEST_F(LoadEstimatorTest, KnowsNothingBeforeTheFirstStep) {
  EXPECT_EQ(estimator_.QueueSeconds(), 0);
  EXPECT_EQ(estimator_.SecondsNeeded(Ask(1000000)), 0);
}

TEST_F(LoadEstimatorTest, PromptAndBacklogAtThePrefillRate) {
  Step(1000, 1000, 0.5);  // 2,000 tokens a second
  EXPECT_NEAR(estimator_.SecondsNeeded(Ask(4000)), 2, 1e-6);
  backlog_.prompt_tokens = 6000;
  Step(1, 0, 0.01);
  EXPECT_NEAR(estimator_.QueueSeconds(), 3, 1e-6);
  EXPECT_NEAR(estimator_.SecondsNeeded(Ask(4000)), 5, 1e-6);
}

TEST_F(LoadEstimatorTest, TheBestRateOfLateCounts) {
  Step(1000, 1000, 0.5);
  Step(10, 10, 0.5);  // a small chunk says nothing about what is possible
  EXPECT_NEAR(estimator_.SecondsNeeded(Ask(2000)), 1, 0.05);
  for (int i = 0; i < 2000; ++i) Step(100, 100, 0.5);  // but in the end it does
  EXPECT_NEAR(estimator_.SecondsNeeded(Ask(2000)), 10, 0.1);
}

TEST_F(LoadEstimatorTest, WhatMustBeGeneratedCountsWithDecodeSteps) {
  Step(8, 0, 0.02);
  Request request = Ask(10);
  EXPECT_NEAR(estimator_.SecondsNeeded(request), 0, 1e-9);  // it may stop after its first token
  request.sampling.min_new_tokens = 51;
  EXPECT_NEAR(estimator_.SecondsNeeded(request), 1, 1e-6);
  request.sampling.min_new_tokens = 0;
  request.sampling.ignore_eos = true;
  EXPECT_NEAR(estimator_.SecondsNeeded(request), 99 * 0.02, 1e-6);
  request.sampling.stop_token_ids = {5};
  EXPECT_NEAR(estimator_.SecondsNeeded(request), 0, 1e-9);
}

TEST_F(LoadEstimatorTest, HitsShortenPrompts) {
  load_.prefix_query_tokens = 1000;
  load_.prefix_hit_tokens = 750;
  Step(1000, 1000, 1);
  EXPECT_NEAR(estimator_.SecondsNeeded(Ask(4000)), 1, 1e-6);
}

TEST_F(LoadEstimatorTest, AFullHouseEmptiesAsFastAsRequestsEnd) {
  backlog_.full = true;
  backlog_.queued = 9;
  for (int i = 0; i < 50; ++i) {
    ++backlog_.finished;
    Step(8, 0, 0.5);  // one ends with every step
  }
  EXPECT_NEAR(estimator_.QueueSeconds(), 5, 0.1);
  backlog_.full = false;
  Step(8, 0, 0.5);
  EXPECT_EQ(estimator_.QueueSeconds(), 0);
}

}  // namespace
}  // namespace k3
