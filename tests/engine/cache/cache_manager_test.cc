#include "engine/cache/cache_manager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/testing/scheduler_harness.h"

namespace k3 {
namespace {

using testing::RandomPrompt;

constexpr int32_t kPage = 4;

EngineConfig SmallConfig() {
  EngineConfig config;
  config.page_size = kPage;
  config.latent_pages = 12;
  config.state_slots = 4;
  config.snapshot_slots = 4;
  config.snapshot_interval = kPage;
  config.layout_tag = 5;
  return config;
}

// A sequence as the scheduler would keep it.
struct Text {
  std::vector<int32_t> tokens;
  std::vector<uint64_t> hashes;
  std::string salt;
  CacheLease lease;

  explicit Text(std::vector<int32_t> t, std::string s = "") : tokens(std::move(t)), salt(std::move(s)) {
    uint64_t hash = ChainRoot(salt);
    for (size_t at = 0; at + kPage <= tokens.size(); at += kPage) {
      hash = ChainHash(hash, std::span(tokens).subspan(at, kPage));
      hashes.push_back(hash);
    }
  }
  PrefixKey Key() const { return {tokens, hashes, salt}; }
};

class CacheManagerTest : public ::testing::Test {
 protected:
  CacheManagerTest() : cache_(SmallConfig()) {}

  PrefixMatch Match(const Text& text) { return cache_.Match(text.Key(), static_cast<int32_t>(text.tokens.size()) - 1); }
  // Runs the whole text through: match, compute, snapshot at `snapshots`, publish. The lease is kept.
  int32_t Compute(Text& text, const std::vector<int32_t>& snapshots, uint64_t publisher = 1) {
    const PrefixMatch match = Match(text);
    cache_.Acquire(match, &text.lease);
    EXPECT_GE(cache_.Extend(&text.lease, static_cast<int64_t>(text.tokens.size())),
              static_cast<int64_t>(text.tokens.size()));
    for (int32_t position : snapshots) {
      if (position > match.resume_pages * kPage) cache_.ReserveSnapshot(&text.lease, position, false);
    }
    cache_.LetGoOfRestores();
    cache_.SnapshotsTaken(&text.lease);
    cache_.Publish(text.Key(), static_cast<int32_t>(text.tokens.size()) / kPage, publisher, &text.lease);
    return match.resume_pages * kPage;
  }
  void Check(std::vector<const CacheLease*> leases) { cache_.CheckInvariants(leases); }

  CacheManager cache_;
};

TEST_F(CacheManagerTest, ResumesOnlyWherePagesAndSnapshotMeet) {
  Text first(RandomPrompt(11, 1));
  Compute(first, {4});
  Check({&first.lease});
  cache_.Release(&first.lease);
  Text again(RandomPrompt(11, 1));
  const PrefixMatch match = Match(again);
  EXPECT_EQ(match.pages.size(), 2u);  // both full pages are there
  EXPECT_EQ(match.resume_pages, 1);   // but a state for four tokens only
  EXPECT_EQ(match.idle_pages, 1);
  Check({});
}

TEST_F(CacheManagerTest, AHitLeavesSomethingToCompute) {
  Text first(RandomPrompt(9, 1));
  Compute(first, {4, 8});
  cache_.Release(&first.lease);
  Text same(RandomPrompt(9, 1)), shorter(RandomPrompt(8, 1));
  EXPECT_EQ(Match(same).resume_pages, 2);
  std::vector<int32_t> eight = same.tokens;
  eight.resize(8);
  EXPECT_EQ(Match(Text(eight)).resume_pages, 1);  // its eighth token must be computed for its logits
}

TEST_F(CacheManagerTest, AdoptsWhatIsAlreadyCached) {
  Text first(RandomPrompt(9, 1)), second(RandomPrompt(9, 1));
  // Both are computed at the same time.
  cache_.Acquire(Match(first), &first.lease);
  cache_.Acquire(Match(second), &second.lease);
  cache_.Extend(&first.lease, 9);
  cache_.Extend(&second.lease, 9);
  const PageId own = second.lease.pages[0];
  cache_.ReserveSnapshot(&first.lease, 8, false);
  cache_.ReserveSnapshot(&second.lease, 8, false);
  cache_.LetGoOfRestores();
  cache_.SnapshotsTaken(&first.lease);
  cache_.SnapshotsTaken(&second.lease);
  cache_.Publish(first.Key(), 2, 1, &first.lease);
  cache_.Publish(second.Key(), 2, 2, &second.lease);
  EXPECT_EQ(second.lease.pages[0], first.lease.pages[0]);
  EXPECT_TRUE(cache_.pages().IsFree(own));
  EXPECT_EQ(cache_.Usage().snapshots_used, 1);
  EXPECT_EQ(cache_.Usage().pages_used, 4);  // two shared, one open page each
  Check({&first.lease, &second.lease});
}

TEST_F(CacheManagerTest, SaltsAndOtherLayoutsDoNotMeet) {
  Text first(RandomPrompt(9, 1), "a");
  Compute(first, {8});
  cache_.Release(&first.lease);
  EXPECT_EQ(Match(Text(RandomPrompt(9, 1), "b")).pages.size(), 0u);
  EXPECT_EQ(Match(Text(RandomPrompt(9, 1), "a")).resume_pages, 2);
}

TEST_F(CacheManagerTest, AWrongFingerprintIsAMissAndIsCounted) {
  Text first(RandomPrompt(9, 1));
  Compute(first, {4, 8});
  cache_.Release(&first.lease);
  const PrefixMatch match = Match(Text(RandomPrompt(9, 1)));
  ASSERT_EQ(match.resume_pages, 2);
  cache_.cache_for_test().CorruptFingerprintForTest(match.snapshot);
  EXPECT_EQ(Match(Text(RandomPrompt(9, 1))).resume_pages, 1);  // the earlier one is sound
  EXPECT_EQ(cache_.fingerprint_mismatches(), 1u);
  EXPECT_EQ(cache_.Usage().snapshots_used, 1);
  EXPECT_EQ(Match(Text(RandomPrompt(9, 1))).resume_pages, 1);
  EXPECT_EQ(cache_.fingerprint_mismatches(), 1u);  // it is gone
  Check({});
}

TEST_F(CacheManagerTest, ForksShareFullPagesAndCopyThePartialOne) {
  Text text(RandomPrompt(10, 1));
  Compute(text, {});
  RankPlan plan;
  CacheLease copy;
  ASSERT_TRUE(cache_.Fork(text.lease, 10, &copy, &plan));
  EXPECT_EQ(copy.pages[0], text.lease.pages[0]);
  EXPECT_EQ(copy.pages[1], text.lease.pages[1]);
  EXPECT_NE(copy.pages[2], text.lease.pages[2]);
  ASSERT_EQ(plan.page_copies.size(), 1u);
  EXPECT_EQ(plan.page_copies[0].from, text.lease.pages[2]);
  EXPECT_EQ(plan.page_copies[0].to, copy.pages[2]);
  ASSERT_EQ(plan.state_copies.size(), 1u);
  EXPECT_EQ(plan.state_copies[0].from, text.lease.state);
  Check({&text.lease, &copy});
  cache_.Release(&text.lease);
  Check({&copy});
  cache_.Release(&copy);
  EXPECT_EQ(cache_.Usage().pages_used, 0);
  EXPECT_EQ(cache_.Usage().pages_cached, 2);
}

TEST_F(CacheManagerTest, AFailedForkLeavesNoTrace) {
  Text text(RandomPrompt(46, 1));  // all twelve pages
  Compute(text, {});
  RankPlan plan;
  CacheLease copy;
  EXPECT_FALSE(cache_.Fork(text.lease, 46, &copy, &plan));  // no page for the copy of the last one
  EXPECT_FALSE(copy.held());
  EXPECT_TRUE(plan.page_copies.empty() && plan.state_copies.empty());
  Check({&text.lease});
}

TEST_F(CacheManagerTest, EvictsCachedPagesWhenFreeOnesRunOut) {
  Text first(RandomPrompt(24, 1));
  Compute(first, {20});
  cache_.Release(&first.lease);
  EXPECT_EQ(cache_.available_pages(), 12);
  Text second(RandomPrompt(44, 2));
  Compute(second, {});
  EXPECT_EQ(cache_.Usage().pages_used, 11);
  EXPECT_EQ(cache_.Usage().pages_cached, 1);  // the others made room
  Check({&second.lease});
  EXPECT_EQ(cache_.Extend(&second.lease, 100), 48);  // no more than the pool
  Check({&second.lease});
}

TEST_F(CacheManagerTest, APinnedSnapshotOutlivesThePlanThatReadsIt) {
  Text first(RandomPrompt(9, 1));
  Compute(first, {8});
  cache_.Release(&first.lease);
  Text again(RandomPrompt(9, 1));
  const PrefixMatch match = Match(again);
  cache_.Acquire(match, &again.lease);
  // Four more snapshots are wanted in the same plan; three slots are free.
  Text other(RandomPrompt(17, 2));
  cache_.Acquire(Match(other), &other.lease);
  cache_.Extend(&other.lease, 17);
  for (int32_t position : {4, 8, 12}) EXPECT_TRUE(cache_.ReserveSnapshot(&other.lease, position, false).valid());
  EXPECT_FALSE(cache_.ReserveSnapshot(&other.lease, 16, false).valid());
  cache_.LetGoOfRestores();
  EXPECT_TRUE(cache_.ReserveSnapshot(&again.lease, 12, false).valid());  // evicted now
  Check({&again.lease, &other.lease});
}

TEST_F(CacheManagerTest, ALongPromptGivesUpItsOwnSnapshotsBeforeOthers) {
  Text valued(RandomPrompt(5, 1));
  Compute(valued, {4});
  cache_.Release(&valued.lease);
  Text longest(RandomPrompt(40, 2));
  cache_.Acquire(Match(longest), &longest.lease);
  for (int32_t position = 4; position <= 36; position += 4) {
    cache_.Extend(&longest.lease, position);
    EXPECT_TRUE(cache_.ReserveSnapshot(&longest.lease, position, false).valid());
    cache_.SnapshotsTaken(&longest.lease);
    Check({&longest.lease});
  }
  EXPECT_EQ(longest.lease.snapshots.size(), 3u);
  EXPECT_EQ(longest.lease.snapshots.back().position, 36);
  EXPECT_EQ(Match(Text(RandomPrompt(5, 1))).resume_pages, 1);
}

TEST_F(CacheManagerTest, CondemnedContentsLeaveTheCacheAndAreNamed) {
  Text bad(RandomPrompt(9, 1));
  Compute(bad, {4, 8}, /*publisher=*/1);
  // Somebody else continues from it and publishes below.
  std::vector<int32_t> longer = bad.tokens;
  longer.resize(13, 3);
  Text child(longer);
  EXPECT_EQ(Compute(child, {12}, /*publisher=*/2), 8);
  std::vector<PageId> pages;
  std::vector<StateSlot> slots;
  const StateSlot state = bad.lease.state;
  const PageId open = bad.lease.pages[2];
  cache_.Condemn(1, &bad.lease, &pages, &slots);
  EXPECT_EQ(pages, (std::vector<PageId>{open}));  // the shared ones are still being read
  EXPECT_NE(std::find(slots.begin(), slots.end(), state), slots.end());
  EXPECT_EQ(slots.size(), 4u);  // the state and the snapshots at 4, 8 and, below, 12
  EXPECT_TRUE(Match(Text(longer)).pages.empty());
  Check({&child.lease});
  // The reader goes on, but publishes nothing below what is gone.
  child.tokens.resize(16, 3);
  cache_.Extend(&child.lease, 16);
  cache_.Publish(Text(child.tokens).Key(), 4, 2, &child.lease);
  EXPECT_TRUE(child.lease.unpublishable);
  Check({&child.lease});
  cache_.Release(&child.lease);
  EXPECT_EQ(cache_.Usage().pages_used + cache_.Usage().pages_cached, 0);
}

TEST_F(CacheManagerTest, FlushKeepsWhatIsInUse) {
  Text used(RandomPrompt(9, 1)), idle(RandomPrompt(9, 2));
  Compute(used, {8});
  Compute(idle, {8});
  cache_.Release(&idle.lease);
  cache_.Flush();
  EXPECT_EQ(cache_.Usage().pages_cached, 0);
  EXPECT_TRUE(Match(Text(RandomPrompt(9, 2))).pages.empty());
  EXPECT_EQ(Match(Text(RandomPrompt(9, 1))).resume_pages, 2);
  Check({&used.lease});
}

TEST_F(CacheManagerTest, RandomOperationsKeepTheInvariants) {
  std::mt19937 random(5);
  std::vector<std::unique_ptr<Text>> live;
  for (int step = 0; step < 30000; ++step) {
    const int what = static_cast<int>(random() % 8);
    if (what < 3 && cache_.live_free() > 0) {
      // Few distinct beginnings, so that there are hits, and prompts of at most half the pool.
      std::vector<int32_t> tokens = RandomPrompt(1 + random() % 24, random() % 3);
      if (random() % 2 == 0) tokens.back() = static_cast<int32_t>(random() % 50);
      auto text = std::make_unique<Text>(tokens, random() % 5 == 0 ? "salt" : "");
      const PrefixMatch match = Match(*text);
      const int64_t needs = (static_cast<int64_t>(tokens.size()) + kPage - 1) / kPage - match.resume_pages;
      if (cache_.available_pages() - match.idle_pages < needs) continue;
      cache_.Acquire(match, &text->lease);
      ASSERT_GE(cache_.Extend(&text->lease, static_cast<int64_t>(tokens.size())), static_cast<int64_t>(tokens.size()));
      for (int32_t position = (match.resume_pages + 1) * kPage; position <= static_cast<int32_t>(tokens.size());
           position += kPage) {
        if (random() % 3 == 0) cache_.ReserveSnapshot(&text->lease, position, random() % 4 == 0);
      }
      live.push_back(std::move(text));
    } else if (!live.empty()) {
      const size_t at = random() % live.size();
      Text& text = *live[at];
      if (what == 3 || what == 4) {
        cache_.LetGoOfRestores();
        cache_.SnapshotsTaken(&text.lease);
        cache_.Publish(text.Key(), static_cast<int32_t>(text.tokens.size()) / kPage, 1 + random() % 2, &text.lease);
      } else if (what == 5) {
        RankPlan plan;
        auto copy = std::make_unique<Text>(text.tokens, text.salt);
        const int32_t tokens = static_cast<int32_t>(text.tokens.size());
        // Only what is published or full may be shared; the scheduler forks right after publishing.
        cache_.LetGoOfRestores();
        cache_.SnapshotsTaken(&text.lease);
        cache_.Publish(text.Key(), tokens / kPage, 1, &text.lease);
        if (cache_.Fork(text.lease, tokens, &copy->lease, &plan)) live.push_back(std::move(copy));
      } else if (what == 6) {
        cache_.LetGoOfRestores();
        std::vector<PageId> pages;
        std::vector<StateSlot> slots;
        if (random() % 4 == 0) {
          cache_.Condemn(1, &text.lease, &pages, &slots);
        } else {
          cache_.Release(&text.lease);
        }
        for (PageId page : pages) ASSERT_TRUE(cache_.pages().IsFree(page));
        for (StateSlot slot : slots) ASSERT_TRUE(cache_.states().IsFree(slot));
        live.erase(live.begin() + static_cast<ptrdiff_t>(at));
      } else if (random() % 10 == 0) {
        cache_.Flush();
      }
    }
    std::vector<const CacheLease*> leases;
    for (const auto& text : live) leases.push_back(&text->lease);
    Check(leases);
  }
  cache_.LetGoOfRestores();
  for (const auto& text : live) cache_.Release(&text->lease);
  cache_.Flush();
  Check({});
  EXPECT_EQ(cache_.pages().free_count(), 12);
  EXPECT_EQ(cache_.states().snapshot_free(), 4);
}

}  // namespace
}  // namespace k3
