#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include "tests/testing/scheduler_harness.h"

namespace k3 {
namespace {

using testing::Greedy;
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
  harness.ExpectIdle();
}

TEST(SchedulerTest, ManyRequestsTogetherGiveWhatEachGivesAlone) {
  SchedulerHarness harness(SchedulerHarness::SmallConfig());
  std::vector<Handle> handles;
  for (uint64_t i = 0; i < 20; ++i)
    handles.push_back(harness.Submit(RandomPrompt(1 + i * 13, i), 5 + static_cast<int32_t>(i)));
  harness.Run();
  for (const Handle& handle : handles) harness.ExpectAlone(handle);
  harness.ExpectIdle();
}

}  // namespace
}  // namespace k3
