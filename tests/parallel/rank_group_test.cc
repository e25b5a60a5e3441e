#include "engine/rank_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tests/parallel/parallel_model.h"
#include "tests/testing/paths.h"

namespace k3::testing {
namespace {

using ::testing::HasSubstr;

TEST(RankThreadsTest, RunsOnAllAndReportsTheFirstFailure) {
  RankThreads threads(4);
  std::atomic<int> ran{0};
  EXPECT_TRUE(threads.Run([&](int) { return ++ran, absl::OkStatus(); }).ok());
  EXPECT_EQ(ran, 4);
  std::atomic<int> told{0};
  threads.on_failure = [&](int index, const absl::Status&) {
    ++told;
    EXPECT_EQ(index, 2);
  };
  const absl::Status status = threads.Run([&](int index) -> absl::Status {
    if (index == 2) throw DeviceError("the device of 2 is gone");
    while (told == 0) std::this_thread::yield();
    return index == 3 ? absl::InternalError("it follows from that") : absl::OkStatus();
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("the device of 2 is gone"));
  EXPECT_EQ(told, 1);
}

RankGroup::Options CpuOptions(int32_t tensor, int32_t data) {
  RankGroup::Options options;
  options.layout = {.tensor = tensor, .data = data};
  options.make_ops = [](int) { return MakeCpuOps({.threads = 1}); };
  return options;
}

TEST(RankGroupTest, ALostRankEndsTheStepOfAllWithItsReason) {
  const auto ranks = LoadRanks(SourcePath("configs/models/tiny-k3"), {.tensor = 2, .data = 2});
  const absl::Status status = ranks->ForEach([&](int local) -> absl::Status {
    if (local == 3) return absl::InternalError("device 3 fell off the bus");
    float value = 0;
    ranks->world(local).AllReduce(&value, 1, DType::kF32, nullptr);
    return absl::OkStatus();
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("device 3 fell off the bus"));
  // And nothing works afterwards, on any rank.
  const absl::Status later = ranks->ForEach([&](int local) -> absl::Status {
    ranks->world(local).Check();
    return absl::OkStatus();
  });
  EXPECT_THAT(std::string(later.message()), HasSubstr("rank 3 failed: device 3 fell off the bus"));
}

TEST(RankGroupTest, ADeviceThatDoesNotOpenEndsTheStart) {
  RankGroup::Options options = CpuOptions(2, 1);
  options.make_ops = [](int local) -> std::unique_ptr<Ops> {
    if (local == 1) throw DeviceError("no device 1");
    return MakeCpuOps({.threads = 1});
  };
  const auto ranks = RankGroup::Create(std::move(options));
  EXPECT_THAT(std::string(ranks.status().message()), HasSubstr("no device 1"));
}

TEST(RankGroupTest, RefusesLayoutsThatDoNotDivide) {
  RankGroup::Options outside = CpuOptions(2, 1);
  outside.first_rank = 1;
  outside.local_ranks = 2;
  EXPECT_FALSE(RankGroup::Create(std::move(outside)).ok());
  RankGroup::Options part = CpuOptions(2, 1);
  part.local_ranks = 1;
  EXPECT_THAT(std::string(RankGroup::Create(std::move(part)).status().message()), HasSubstr("1 of 2"));
  RankGroup::Options leaves = CpuOptions(3, 1);
  leaves.layout.expert_leaves = 4;
  EXPECT_FALSE(RankGroup::Create(std::move(leaves)).ok());

  auto ranks = RankGroup::Create(CpuOptions(3, 1));
  ASSERT_TRUE(ranks.ok());
  const std::string dir = SourcePath("configs/models/tiny-k3");
  LoadOptions load;
  load.print_progress = false;
  EXPECT_THAT(std::string((*ranks)->Load(dir, *LoadModelConfig(dir), load).message()),
              HasSubstr("tensor-parallel-size 3 does not divide num_attention_heads (2)"));
}

}  // namespace
}  // namespace k3::testing
