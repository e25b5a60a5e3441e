#include "engine/cache/prefix_cache.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace k3 {
namespace {

constexpr int32_t kPageSize = 4;
constexpr int32_t kFirstSlot = 10;

PrefixCache::Sizes SmallSizes(int32_t pages = 16, int32_t snapshots = 6) {
  return {.pages = pages,
          .page_size = kPageSize,
          .first_snapshot_slot = kFirstSlot,
          .snapshot_slots = snapshots,
          .page_bytes = 100,
          .state_bytes = 1000};
}

// Page tokens from one letter, so that chains read as words.
std::vector<int32_t> Page(char letter) { return std::vector<int32_t>(kPageSize, letter); }

class PrefixCacheTest : public ::testing::Test {
 protected:
  PrefixCacheTest() : cache_(SmallSizes()) {}

  // Adds what is missing of the chain, with pages in use, and returns its last page.
  PageId Add(const std::string& word, const std::string& salt = "") {
    PageId parent;
    uint64_t hash = ChainRoot(salt);
    for (char letter : word) {
      hash = ChainHash(hash, Page(letter));
      PageId page = cache_.Find(parent, salt, hash, Page(letter));
      if (!page.valid()) {
        page = {next_page_++};
        cache_.Insert(parent, salt, hash, Page(letter), page, 1);
      }
      parent = page;
    }
    cache_.CheckInvariants();
    return parent;
  }
  int32_t Matched(const std::string& word, const std::string& salt = "") {
    PageId parent;
    uint64_t hash = ChainRoot(salt);
    int32_t matched = 0;
    for (char letter : word) {
      hash = ChainHash(hash, Page(letter));
      parent = cache_.Find(parent, salt, hash, Page(letter));
      if (!parent.valid()) break;
      ++matched;
    }
    return matched;
  }
  void Unuse(const std::string& word) {  // last page first, as a lease does
    std::vector<PageId> pages;
    PageId parent;
    uint64_t hash = ChainRoot("");
    for (char letter : word) {
      hash = ChainHash(hash, Page(letter));
      parent = cache_.Find(parent, "", hash, Page(letter));
      pages.push_back(parent);
    }
    for (auto page = pages.rbegin(); page != pages.rend(); ++page) cache_.SetInUse(*page, false);
    cache_.CheckInvariants();
  }
  void Snapshot(const std::string& word, int32_t slot) {
    uint64_t hash = ChainRoot("");
    for (char letter : word) hash = ChainHash(hash, Page(letter));
    cache_.AttachSnapshot(Add(word), {slot}, {hash, static_cast<int32_t>(word.size()) * kPageSize, 7});
    cache_.CheckInvariants();
  }

  PrefixCache cache_;
  int32_t next_page_ = 0;
};

TEST_F(PrefixCacheTest, FindsExactChainsOnly) {
  Add("abc");
  EXPECT_EQ(Matched("abc"), 3);
  EXPECT_EQ(Matched("abd"), 2);
  EXPECT_EQ(Matched("bc"), 0);  // the same pages elsewhere are other nodes
  Add("abd");
  EXPECT_EQ(cache_.nodes(), 4);
  EXPECT_EQ(Matched("abd"), 3);
}

TEST_F(PrefixCacheTest, SaltsAreApart) {
  Add("ab", "x");
  EXPECT_EQ(Matched("ab"), 0);
  EXPECT_EQ(Matched("ab", "y"), 0);
  EXPECT_EQ(Matched("ab", "x"), 2);
}

TEST_F(PrefixCacheTest, EqualHashesDoNotMakeEqualPages) {
  // Two different pages filed under one hash: the tokens decide.
  cache_.Insert({}, "", 42, Page('a'), {0}, 1);
  cache_.Insert({}, "", 42, Page('b'), {1}, 1);
  EXPECT_EQ(cache_.Find({}, "", 42, Page('a')), PageId{0});
  EXPECT_EQ(cache_.Find({}, "", 42, Page('b')), PageId{1});
  EXPECT_FALSE(cache_.Find({}, "", 42, Page('c')).valid());
  EXPECT_FALSE(cache_.Find({}, "other", 42, Page('a')).valid());
  EXPECT_FALSE(cache_.Find({0}, "", 42, Page('b')).valid());
  // Even where hashes meet, what was computed under another bias epoch is another node.
  EXPECT_FALSE(cache_.Find({}, "", 42, Page('a'), /*epoch=*/7).valid());
  std::vector<int32_t> removed;
  cache_.RemoveSubtree({0}, [&](const PrefixCache::Evicted& gone) { removed.push_back(gone.page.value); });
  EXPECT_EQ(cache_.Find({}, "", 42, Page('b')), PageId{1});
  EXPECT_EQ(removed, (std::vector<int32_t>{0}));
}

TEST_F(PrefixCacheTest, PagesInUseAndInnerPagesStay) {
  Add("ab");
  Add("ac");
  EXPECT_FALSE(cache_.EvictPage().page.valid());
  cache_.SetInUse({1}, false);  // whoever read "ab" has ended; "ac" is still being read
  const PrefixCache::Evicted evicted = cache_.EvictPage();
  EXPECT_EQ(evicted.page, PageId{1});  // b
  EXPECT_FALSE(cache_.EvictPage().page.valid());
}

TEST_F(PrefixCacheTest, LeavesWithoutSnapshotGoFirst) {
  Add("ab");
  Snapshot("ab", kFirstSlot);
  Unuse("ab");
  Add("cd");
  Unuse("cd");
  EXPECT_EQ(cache_.EvictPage().page, PageId{3});  // d, though it is newer
  EXPECT_EQ(cache_.EvictPage().page, PageId{2});  // c
  const PrefixCache::Evicted last = cache_.EvictPage();
  EXPECT_EQ(last.page, PageId{1});
  EXPECT_EQ(last.snapshot, StateSlot{kFirstSlot});  // goes with its page
  EXPECT_EQ(cache_.snapshots(), 0);
}

TEST_F(PrefixCacheTest, TheSnapshotThatSavesFewestTokensGoesFirst) {
  Snapshot("abcdef", kFirstSlot);   // alone on its way: saves 24 tokens
  Snapshot("gh", kFirstSlot + 1);   // saves 8
  Snapshot("ghi", kFirstSlot + 2);  // saves 4 beyond the one before
  EXPECT_EQ(cache_.EvictSnapshot(), StateSlot{kFirstSlot + 2});
  EXPECT_EQ(cache_.EvictSnapshot(), StateSlot{kFirstSlot + 1});
  cache_.Pin({kFirstSlot});
  EXPECT_FALSE(cache_.EvictSnapshot().valid());  // being read
  cache_.Unpin({kFirstSlot});
  EXPECT_EQ(cache_.EvictSnapshot(), StateSlot{kFirstSlot});
  cache_.CheckInvariants();
}

TEST_F(PrefixCacheTest, UsesAndRecencyCount) {
  Snapshot("ab", kFirstSlot);
  Snapshot("cd", kFirstSlot + 1);
  const std::vector<PageId> path = {{0}, {1}};
  cache_.RecordHit(path);  // "ab" was resumed from
  EXPECT_EQ(cache_.EvictSnapshot(), StateSlot{kFirstSlot + 1});
  // Later entries start at the clock of what was evicted: "ab" does not live on its old glory for ever.
  for (int round = 0; round < 3; ++round) {
    Snapshot("ef", kFirstSlot + 1);
    const StateSlot evicted = cache_.EvictSnapshot();
    if (evicted == StateSlot{kFirstSlot}) return;
  }
  FAIL() << "the old entry was never evicted";
}

TEST_F(PrefixCacheTest, LosingAnEarlierSnapshotRaisesALaterOnesValue) {
  Snapshot("ab", kFirstSlot);          // saves 8
  Snapshot("abc", kFirstSlot + 1);     // saves 4 beyond it
  Snapshot("defghi", kFirstSlot + 2);  // saves 24
  cache_.DetachSnapshot({kFirstSlot});
  // Now "abc" saves 12; the stale key says 4, so it comes up first, is weighed again, and still is the least.
  Snapshot("jk", kFirstSlot + 3);  // saves 8
  EXPECT_EQ(cache_.EvictSnapshot(), StateSlot{kFirstSlot + 3});
  EXPECT_EQ(cache_.EvictSnapshot(), StateSlot{kFirstSlot + 1});
}

TEST_F(PrefixCacheTest, SubtreesLeaveWhole) {
  Snapshot("abcd", kFirstSlot);
  Add("abce");
  Add("f");
  std::vector<int32_t> pages;
  int snapshots = 0;
  cache_.RemoveSubtree({1}, [&](const PrefixCache::Evicted& gone) {
    pages.push_back(gone.page.value);
    snapshots += gone.snapshot.valid();
  });
  std::sort(pages.begin(), pages.end());
  EXPECT_EQ(pages, (std::vector<int32_t>{1, 2, 3, 4}));
  EXPECT_EQ(snapshots, 1);
  EXPECT_EQ(Matched("abc"), 1);
  EXPECT_EQ(Matched("f"), 1);
  cache_.CheckInvariants();
}

TEST(PrefixCacheRandomTest, AgreesWithAMapOfWords) {
  constexpr int32_t kPages = 24, kSlots = 5;
  PrefixCache cache(SmallSizes(kPages, kSlots));
  std::mt19937 random(4);
  std::map<std::string, int32_t> nodes;  // word -> page
  std::map<std::string, int32_t> snapshots;
  std::vector<int32_t> free_pages, free_slots;
  for (int32_t i = 0; i < kPages; ++i) free_pages.push_back(i);
  for (int32_t i = 0; i < kSlots; ++i) free_slots.push_back(kFirstSlot + i);
  const auto word_of = [&](int32_t page) {
    for (const auto& [word, id] : nodes) {
      if (id == page) return word;
    }
    return std::string();
  };
  const auto forget = [&](const PrefixCache::Evicted& gone) {
    const std::string word = word_of(gone.page.value);
    ASSERT_FALSE(word.empty());
    EXPECT_EQ(gone.snapshot.valid(), snapshots.count(word) == 1);
    if (gone.snapshot.valid()) {
      EXPECT_EQ(snapshots[word], gone.snapshot.value);
      free_slots.push_back(gone.snapshot.value);
      snapshots.erase(word);
    }
    free_pages.push_back(gone.page.value);
    nodes.erase(word);
  };
  for (int step = 0; step < 20000; ++step) {
    std::string word;
    for (size_t length = 1 + random() % 5; word.size() < length;) word += static_cast<char>('a' + random() % 3);
    switch (random() % 6) {
      case 0:
      case 1: {  // publish the word, all of it unused afterwards
        PageId parent;
        uint64_t hash = ChainRoot("");
        std::vector<PageId> path;
        for (size_t i = 0; i < word.size(); ++i) {
          hash = ChainHash(hash, Page(word[i]));
          PageId page = cache.Find(parent, "", hash, Page(word[i]));
          const auto known = nodes.find(word.substr(0, i + 1));
          ASSERT_EQ(page.valid(), known != nodes.end());
          if (page.valid()) {
            ASSERT_EQ(page.value, known->second);
            cache.SetInUse(page, true);
          } else {
            if (free_pages.empty()) break;
            page = {free_pages.back()};
            free_pages.pop_back();
            cache.Insert(parent, "", hash, Page(word[i]), page, 1);
            nodes[word.substr(0, i + 1)] = page.value;
          }
          path.push_back(page);
          parent = page;
        }
        if (!path.empty() && !free_slots.empty() && path.size() == word.size() && snapshots.count(word) == 0) {
          cache.AttachSnapshot(path.back(), {free_slots.back()},
                               {hash, static_cast<int32_t>(word.size()) * kPageSize, 7});
          snapshots[word] = free_slots.back();
          free_slots.pop_back();
        } else if (random() % 2 == 0) {
          cache.RecordHit(path);
        }
        for (auto page = path.rbegin(); page != path.rend(); ++page) cache.SetInUse(*page, false);
        break;
      }
      case 2: {
        const PrefixCache::Evicted gone = cache.EvictPage();
        ASSERT_EQ(gone.page.valid(), !nodes.empty());
        if (gone.page.valid()) {
          const std::string evicted = word_of(gone.page.value);
          for (const auto& entry : nodes) {  // a leaf
            ASSERT_FALSE(entry.first.size() > evicted.size() && entry.first.compare(0, evicted.size(), evicted) == 0);
          }
          forget(gone);
        }
        break;
      }
      case 3: {
        const StateSlot gone = cache.EvictSnapshot();
        ASSERT_EQ(gone.valid(), !snapshots.empty());
        if (!gone.valid()) break;
        for (auto it = snapshots.begin(); it != snapshots.end(); ++it) {
          if (it->second == gone.value) {
            snapshots.erase(it);
            break;
          }
        }
        free_slots.push_back(gone.value);
        break;
      }
      case 4: {
        const auto found = nodes.find(word);
        if (found != nodes.end() && random() % 4 == 0) cache.RemoveSubtree({found->second}, forget);
        break;
      }
      default: {
        int32_t matched = 0;
        PageId parent;
        uint64_t hash = ChainRoot("");
        for (char letter : word) {
          hash = ChainHash(hash, Page(letter));
          parent = cache.Find(parent, "", hash, Page(letter));
          if (!parent.valid()) break;
          ++matched;
        }
        int32_t expected = 0;
        while (expected < static_cast<int32_t>(word.size()) &&
               nodes.count(word.substr(0, static_cast<size_t>(expected) + 1)) == 1) {
          ++expected;
        }
        ASSERT_EQ(matched, expected);
      }
    }
    cache.CheckInvariants();
    ASSERT_EQ(cache.nodes(), static_cast<int32_t>(nodes.size()));
    ASSERT_EQ(cache.unused_nodes(), static_cast<int32_t>(nodes.size()));
    ASSERT_EQ(cache.snapshots(), static_cast<int32_t>(snapshots.size()));
  }
}

}  // namespace
}  // namespace k3
