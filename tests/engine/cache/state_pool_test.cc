#include "engine/cache/state_pool.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace k3 {
namespace {

TEST(StatePoolTest, TwoBudgetsShareOneIdSpace) {
  StatePool pool(2, 3);
  EXPECT_EQ(pool.live_total(), 2);
  EXPECT_EQ(pool.snapshot_total(), 3);
  std::set<int32_t> live, snapshots;
  for (StateSlot slot = pool.AllocateLive(); slot.valid(); slot = pool.AllocateLive()) live.insert(slot.value);
  for (StateSlot slot = pool.AllocateSnapshot(); slot.valid(); slot = pool.AllocateSnapshot()) {
    snapshots.insert(slot.value);
  }
  EXPECT_EQ(live, (std::set<int32_t>{0, 1}));
  EXPECT_EQ(snapshots, (std::set<int32_t>{2, 3, 4}));
  for (int32_t id : snapshots) EXPECT_TRUE(pool.IsSnapshot({id}));
  // One budget never borrows from the other.
  pool.Release({3});
  EXPECT_FALSE(pool.AllocateLive().valid());
  EXPECT_EQ(pool.AllocateSnapshot(), StateSlot{3});
}

TEST(StatePoolTest, NoSnapshotsAtAll) {
  StatePool pool(1, 0);
  EXPECT_FALSE(pool.AllocateSnapshot().valid());
  EXPECT_TRUE(pool.AllocateLive().valid());
  pool.CheckInvariants();
}

TEST(StatePoolTest, RandomOperationsKeepTheInvariants) {
  StatePool pool(5, 7);
  std::vector<StateSlot> held;
  std::mt19937 random(2);
  for (int step = 0; step < 20000; ++step) {
    const int what = static_cast<int>(random() % 4);
    if (what < 2) {
      const StateSlot slot = what == 0 ? pool.AllocateLive() : pool.AllocateSnapshot();
      if (slot.valid()) held.push_back(slot);
    } else if (!held.empty()) {
      const size_t at = random() % held.size();
      pool.Release(held[at]);
      EXPECT_TRUE(pool.IsFree(held[at]));
      held.erase(held.begin() + static_cast<ptrdiff_t>(at));
    }
    pool.CheckInvariants();
    ASSERT_EQ(12 - pool.live_free() - pool.snapshot_free(), static_cast<int32_t>(held.size()));
  }
}

TEST(StatePoolDeathTest, OwnMistakesAbort) {
  StatePool pool(1, 1);
  EXPECT_DEATH(pool.Release({0}), "check failed");
  EXPECT_DEATH(pool.Release({2}), "check failed");
}

}  // namespace
}  // namespace k3
