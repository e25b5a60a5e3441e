#include "engine/cache/page_pool.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace k3 {
namespace {

TEST(PagePoolTest, GivesEveryPageOnceThenNone) {
  PagePool pool(3);
  std::map<int32_t, int> seen;
  for (int i = 0; i < 3; ++i) ++seen[pool.Allocate().value];
  EXPECT_EQ(seen.size(), 3u);
  EXPECT_FALSE(pool.Allocate().valid());
  EXPECT_EQ(pool.free_count(), 0);
}

TEST(PagePoolTest, APageIsFreeAfterItsLastReference) {
  PagePool pool(1);
  const PageId page = pool.Allocate();
  pool.AddRef(page);
  EXPECT_EQ(pool.Release(page), 1);
  EXPECT_FALSE(pool.IsFree(page));
  EXPECT_EQ(pool.Release(page), 0);
  EXPECT_TRUE(pool.IsFree(page));
  EXPECT_EQ(pool.Allocate(), page);
}

TEST(PagePoolTest, RandomOperationsAgreeWithCounting) {
  constexpr int32_t kPages = 17;
  PagePool pool(kPages);
  std::map<int32_t, int32_t> refs;
  std::mt19937 random(1);
  for (int step = 0; step < 20000; ++step) {
    const int what = static_cast<int>(random() % 3);
    if (what == 0) {
      const PageId page = pool.Allocate();
      EXPECT_EQ(page.valid(), refs.size() < kPages);
      if (page.valid()) {
        EXPECT_EQ(refs.count(page.value), 0u);
        refs[page.value] = 1;
      }
    } else if (!refs.empty()) {
      auto it = std::next(refs.begin(), static_cast<ptrdiff_t>(random() % refs.size()));
      if (what == 1) {
        pool.AddRef({it->first});
        ++it->second;
      } else {
        EXPECT_EQ(pool.Release({it->first}), it->second - 1);
        if (--it->second == 0) refs.erase(it);
      }
    }
    ASSERT_EQ(pool.free_count(), kPages - static_cast<int32_t>(refs.size()));
    for (const auto& [id, count] : refs) ASSERT_EQ(pool.refs({id}), count);
    pool.CheckInvariants();
  }
}

TEST(PagePoolDeathTest, OwnMistakesAbort) {
  PagePool pool(2);
  EXPECT_DEATH(pool.Release({0}), "check failed");
  EXPECT_DEATH(pool.AddRef({1}), "check failed");
  EXPECT_DEATH(pool.Release({-1}), "check failed");
}

}  // namespace
}  // namespace k3
