#include "engine/cache/indexed_heap.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace k3 {
namespace {

TEST(IndexedHeapTest, EqualKeysAreAQueue) {
  IndexedHeap heap(5);
  for (int32_t id : {3, 1, 4, 0}) heap.Set(id, 1.0);
  heap.Set(1, 1.0);  // to the back
  std::vector<int32_t> order;
  while (!heap.empty()) {
    order.push_back(heap.Top());
    heap.Erase(heap.Top());
  }
  EXPECT_EQ(order, (std::vector<int32_t>{3, 4, 0, 1}));
}

TEST(IndexedHeapTest, RandomOperationsAgreeWithASortedMap) {
  constexpr int32_t kIds = 40;
  IndexedHeap heap(kIds);
  std::map<int32_t, double> keys;
  std::mt19937 random(3);
  for (int step = 0; step < 20000; ++step) {
    const int32_t id = static_cast<int32_t>(random() % kIds);
    if (random() % 3 == 0) {
      heap.Erase(id);
      keys.erase(id);
    } else {
      const double key = static_cast<double>(random() % 1000);
      heap.Set(id, key);
      keys[id] = key;
    }
    heap.CheckInvariants();
    ASSERT_EQ(heap.size(), static_cast<int32_t>(keys.size()));
    if (keys.empty()) continue;
    double least = keys.begin()->second;
    for (const auto& entry : keys) least = std::min(least, entry.second);
    ASSERT_EQ(heap.key(heap.Top()), least);
    ASSERT_EQ(keys.at(heap.Top()), least);
  }
}

}  // namespace
}  // namespace k3
