#include "engine/quantile_control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "engine/epoch_log.h"
#include "engine/epoch_slots.h"
#include "tests/testing/temp_dir.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;

// What a router's counts would be for made-up tokens.
struct Counts {
  explicit Counts(int32_t groups) : margins(static_cast<size_t>(groups * kMarginBins)), sums(kBalanceSums) {}
  void Add(int32_t group, float margin, uint32_t times = 1) {
    margins[static_cast<size_t>(group * kMarginBins + static_cast<int>((margin + 0.25f) * 256))] += times;
  }
  void Tokens(uint64_t tokens, float gap, uint64_t overrides = 0) {
    sums[0] += tokens;
    sums[1] += tokens * static_cast<uint64_t>(gap * (1 << kGapBits));
    sums[2] += overrides;
  }
  void Feed(QuantileControl& control, int32_t layer = 0) const {
    control.histogram(layer).Add(margins.data(), sums.data());
  }
  std::vector<uint32_t> margins;
  std::vector<uint64_t> sums;
};

// 1000 tokens of 16 choices on 4 ranks that all go to rank 0; `overrides` of the 16,000 choices were changed.
void FeedHotRank(QuantileControl& control, uint64_t overrides, float gap = 0.3f) {
  Counts counts(4);
  counts.Add(0, -0.2f, 16000);
  for (int32_t g = 1; g < 4; ++g) counts.Add(g, 0.05f, 5000);
  counts.Tokens(1000, gap, overrides);
  counts.Feed(control);
  control.Update();
}

TEST(QuantileOptionsTest, RangesAreChecked) {
  EXPECT_TRUE(QuantileOptions().Check().ok());
  const auto refuses = [](const char* field, auto change) {
    QuantileOptions options;
    change(options);
    EXPECT_THAT(std::string(options.Check().message()), HasSubstr(field));
  };
  refuses("kappa is 1", [](QuantileOptions& o) { o.kappa = 1; });
  refuses("window is 9", [](QuantileOptions& o) { o.window = 9; });
  refuses("update_steps is 17", [](QuantileOptions& o) { o.update_steps = 17; });
  refuses("decay_shift is 0", [](QuantileOptions& o) { o.decay_shift = 0; });
  refuses("eta is 2", [](QuantileOptions& o) { o.eta = 2; });
  refuses("max_delta is 0.3", [](QuantileOptions& o) { o.max_delta = 0.3; });
}

// A decode step counts one, a prompt's step is followed by an update; neither before its part of the window is full.
TEST(QuantileControlTest, UpdatesWhenStepsAndWindowSaySo) {
  QuantileControl control(1, 16, 16);  // window: 1024 tokens, an update at least a quarter of them
  for (int step = 0; step < 3; ++step) EXPECT_FALSE(control.StepEnds(64, false));
  EXPECT_TRUE(control.StepEnds(64, false));
  for (int step = 0; step < 31; ++step) EXPECT_FALSE(control.StepEnds(8, false)) << step;
  EXPECT_TRUE(control.StepEnds(8, false));
  EXPECT_FALSE(control.StepEnds(255, true));
  EXPECT_TRUE(control.StepEnds(1, true));
  EXPECT_TRUE(control.StepEnds(1024, true));
}

TEST(QuantileControlTest, SuppressesAsFarAsTheHistogramSays) {
  QuantileControl control(2, 4, 16);
  Counts counts(4);
  // Rank 0 gets 6000 of 16,000 choices: 4200 are 1.05 times its share, and its 4200th best margin is near -0.05.
  counts.Add(0, -0.10f, 4000);
  counts.Add(0, -0.05f, 1000);
  counts.Add(0, -0.02f, 1000);
  for (int32_t g = 1; g < 4; ++g) counts.Add(g, -0.03f, 3333);
  counts.Tokens(1000, 0.3f);
  counts.Feed(control, 1);
  control.Update();
  const auto epoch = control.current();
  EXPECT_EQ(epoch->number, 1u);
  EXPECT_EQ(std::vector<float>(epoch->layer(0).begin(), epoch->layer(0).end()), std::vector<float>(4));
  EXPECT_NEAR(epoch->layer(1)[0], -0.05f, 1.0f / 256);
  EXPECT_EQ(epoch->layer(1)[1], 0.0f);
  // Skew ends: the bias goes back as it leaves the window, and what has nothing to suppress is epoch 0.
  Counts even(4);
  for (int32_t g = 0; g < 4; ++g) even.Add(g, -0.10f, 4000);
  even.Tokens(1000, 0.3f);
  for (int update = 0; update < 12; ++update) {
    even.Feed(control, 1);
    control.Update();
  }
  EXPECT_EQ(control.current()->number, 0u);
}

TEST(QuantileControlTest, KeepsTheLastEpochs) {
  QuantileControl control(2, 4, 16, {.guards = false});  // the second layer sees nothing
  const auto first = control.current();
  for (int step = 0; step < 20; ++step) {
    FeedHotRank(control, 0, 0.01f * static_cast<float>(1 + step % 7));  // the limit moves
  }
  const uint64_t last = control.current()->number;
  EXPECT_GE(last, 15u);
  EXPECT_EQ(control.Find(last - 8), nullptr);
  ASSERT_NE(control.Find(last - 7), nullptr);
  EXPECT_EQ(control.Find(last - 7)->number, last - 7);
  EXPECT_EQ(first->number, 0u);  // whoever holds one keeps it
}

TEST(QuantileControlTest, AnEpochStaysCurrentAsLongAsAskedFor) {
  QuantileControl control(1, 4, 16, {.epoch_updates = 5, .guards = false});
  int made_at = 0;
  for (int step = 1; step <= 40; ++step) {
    const uint64_t before = control.current()->number;
    FeedHotRank(control, 0, 0.01f * static_cast<float>(1 + step % 7));  // the limit moves
    if (control.current()->number == before) continue;
    EXPECT_EQ(control.current()->number, before + 1);
    EXPECT_GE(step - made_at, 5);
    made_at = step;
  }
  EXPECT_GE(control.current()->number, 4u);
}

// A rank that gets everything: suppressed to the limit; less when too many choices change; given up, and taken up
// again.
TEST(QuantileControlTest, GuardsHalveTheLimitAndGiveUp) {
  QuantileControl calm(1, 4, 16);
  FeedHotRank(calm, 0);
  EXPECT_FLOAT_EQ(calm.current()->delta[0], -0.1f);
  EXPECT_EQ(calm.current()->delta[1], 0.0f);
  EXPECT_EQ(calm.stats().halvings, 0u);

  QuantileControl strained(1, 4, 16);
  FeedHotRank(strained, 640);  // 4 % of all choices
  EXPECT_EQ(strained.stats().halvings, 1u);
  EXPECT_EQ(strained.stats().alarms, 0u);
  EXPECT_FLOAT_EQ(strained.current()->delta[0], -0.05f);
  for (int update = 0; update < 4; ++update) FeedHotRank(strained, 640);  // not for the same window
  EXPECT_EQ(strained.stats().halvings, 2u);

  QuantileControl unguarded(1, 4, 16, {.guards = false});
  FeedHotRank(unguarded, 1600);
  EXPECT_FLOAT_EQ(unguarded.current()->delta[0], -0.1f);

  QuantileControl broken(1, 4, 16);
  FeedHotRank(broken, 640);
  FeedHotRank(broken, 1600);
  FeedHotRank(broken, 1600);
  EXPECT_EQ(broken.stats().alarms, 1u);
  EXPECT_EQ(broken.current()->number, 0u);
  EXPECT_EQ(broken.current()->delta[0], 0.0f);
  for (int update = 0; update < 12; ++update) FeedHotRank(broken, 0);
  EXPECT_EQ(broken.stats().alarms, 1u);
  EXPECT_LT(broken.current()->delta[0], 0.0f);
  EXPECT_GT(broken.current()->delta[0], -0.1f);
  for (int update = 0; update < 200; ++update) FeedHotRank(broken, 0);
  EXPECT_FLOAT_EQ(broken.current()->delta[0], -0.1f);  // calm for long: the whole limit again
}

TEST(QuantileControlTest, TheMeanGapBoundsTheBiasToo) {
  QuantileControl control(1, 2, 1);
  Counts counts(2);
  counts.Add(0, -0.2f, 100);
  counts.Tokens(100, 0.02f);
  counts.Feed(control);
  control.Update();
  EXPECT_NEAR(control.current()->delta[0], -0.02f, 1e-4);
}

TEST(QuantileControlTest, OscillationDampsTheControl) {
  QuantileControl control(1, 2, 1);
  for (int step = 0; step < 24; ++step) {
    // All tokens to one rank, then all to the other, faster than the window and more each time.
    const uint32_t tokens = 1000u << std::min(step, 8);
    Counts counts(2);
    counts.Add(step % 2, -0.08f, tokens);
    counts.Tokens(tokens, 0.3f);
    counts.Feed(control);
    control.Update();
  }
  EXPECT_GT(control.stats().sign_changes, 4u);
  EXPECT_GT(control.stats().dampings, 0u);
}

TEST(QuantileControlTest, ARecordedEpochStays) {
  BiasEpoch epoch{.number = 9, .groups = 4, .delta = std::vector<float>(8, -0.01f)};
  QuantileControl control(16, epoch);
  EXPECT_EQ(control.layers(), 2);
  for (int update = 0; update < 5; ++update) FeedHotRank(control, 0);
  EXPECT_EQ(control.current()->number, 9u);
  EXPECT_EQ(control.current()->delta, epoch.delta);
}

TEST(EpochLogTest, GoesOnBehindAnEarlierRun) {
  const testing::TempDir dir;
  const std::string path = dir.path() + "/epochs.log";
  for (const float delta : {-0.25f, -0.5f}) {
    auto log = EpochLog::Open(path);
    ASSERT_TRUE(log.ok());
    (*log)->Append(0, {.number = 1, .groups = 1, .delta = {delta}});
    if (delta == -0.25f) (*log)->Append(0, {.number = 2, .groups = 1, .delta = {-0.125f}});
  }
  EXPECT_EQ(EpochLog::Find(path, 0, 1)->delta[0], -0.5f);  // the last run counts
  EXPECT_EQ(EpochLog::Find(path, 0, 2)->delta[0], -0.125f);
}

TEST(EpochLogTest, GivesBackTheBits) {
  const testing::TempDir dir;
  const std::string path = dir.path() + "/epochs.log";
  std::mt19937 random(4);
  std::vector<BiasEpoch> epochs;
  {
    auto log = EpochLog::Open(path);
    ASSERT_TRUE(log.ok());
    for (uint64_t number = 1; number <= 5; ++number) {
      BiasEpoch epoch{.number = number, .groups = 8, .delta = {}};
      for (int i = 0; i < 24; ++i) epoch.delta.push_back(-static_cast<float>(random() % 1000) / 12345.0f);
      (*log)->Append(1, epoch);
      epochs.push_back(epoch);
    }
  }
  for (const BiasEpoch& epoch : epochs) {
    const auto found = EpochLog::Find(path, 1, epoch.number);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->groups, 8);
    EXPECT_EQ(found->delta, epoch.delta);
  }
  EXPECT_THAT(std::string(EpochLog::Find(path, 0, 1).status().message()), HasSubstr("no epoch 1 of rank 0"));
  EXPECT_THAT(std::string(EpochLog::Find(path, 1, 6).status().message()), HasSubstr("no epoch 6 of rank 1"));
  EXPECT_THAT(std::string(EpochLog::Find(dir.path() + "/none", 1, 6).status().message()), HasSubstr("cannot read"));
  EXPECT_FALSE(EpochLog::Open(dir.path() + "/none/log").ok());
  for (const char* line :
       {"rank 1 epoch 6 layers 1 groups 2 delta 00000000", "rank 1 epoch 6", "nonsense",
        "rank 1 epoch 6 layers 1 groups 1 delta 3f800000",  // a bias of 1
        "rank 1 epoch 6 layers 1 groups 1 delta 7fc00000", "rank 1 epoch 6 layers 1 groups 1 delta zzzzzzzz"}) {
    std::ofstream(path) << line << '\n';
    const auto found = EpochLog::Find(path, 1, 6);
    EXPECT_EQ(found.status().code(), absl::StatusCode::kDataLoss) << line;
    EXPECT_THAT(std::string(found.status().message()), HasSubstr("line 1")) << line;
  }
}

TEST(EpochSlotsTest, HoldsWhatRequestsArePinnedTo) {
  EpochSlots slots;
  EXPECT_EQ(slots.Refresh(), 0);
  EXPECT_FALSE(slots.upload().has_value());
  std::vector<int32_t> pinned;
  for (uint64_t number = 1; number <= 7; ++number) {
    slots.Offer(number);
    const int32_t slot = slots.Refresh();
    EXPECT_EQ(slots.number(slot), number);
    ASSERT_TRUE(slots.upload().has_value());
    EXPECT_EQ(slots.upload()->number, number);
    EXPECT_EQ(slots.upload()->slot, slot);
    EXPECT_EQ(std::count(pinned.begin(), pinned.end(), slot), 0);
    slots.Sent();
    slots.Pin(slot);
    pinned.push_back(slot);
  }
  EXPECT_EQ(slots.live(), 7);
  // All are taken: a new one waits, and the newest of several comes when there is room.
  slots.Offer(8);
  slots.Offer(9);
  EXPECT_EQ(slots.number(slots.Refresh()), 7u);
  EXPECT_FALSE(slots.upload().has_value());
  slots.Unpin(pinned[2]);
  EXPECT_EQ(slots.Refresh(), pinned[2]);
  EXPECT_EQ(slots.number(pinned[2]), 9u);
  ASSERT_TRUE(slots.upload().has_value());
  // Kept until a plan has carried it.
  EXPECT_EQ(slots.Refresh(), pinned[2]);
  EXPECT_TRUE(slots.upload().has_value());
  slots.Sent();
  slots.Offer(0);
  EXPECT_EQ(slots.Refresh(), 0);
  EXPECT_FALSE(slots.upload().has_value());
}

}  // namespace
}  // namespace k3
