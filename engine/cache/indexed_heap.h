#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/core/check.h"

namespace k3 {

// A min-heap over the ids 0..capacity-1, each in it at most once, whose keys can be changed and removed. Equal keys
// leave in the order in which they were set, so a heap of equal values is a queue. Memory is allocated once.
class IndexedHeap {
 public:
  explicit IndexedHeap(int32_t capacity)
      : place_(static_cast<size_t>(capacity), -1), key_(static_cast<size_t>(capacity)), tick_(key_.size()) {
    heap_.reserve(static_cast<size_t>(capacity));
  }

  bool empty() const { return heap_.empty(); }
  int32_t size() const { return static_cast<int32_t>(heap_.size()); }
  bool Contains(int32_t id) const { return place_[static_cast<size_t>(id)] >= 0; }
  int32_t Top() const { return heap_.front(); }
  double key(int32_t id) const { return key_[static_cast<size_t>(id)]; }

  void Set(int32_t id, double key) {
    if (!Contains(id)) {
      place_[static_cast<size_t>(id)] = size();
      heap_.push_back(id);
    }
    key_[static_cast<size_t>(id)] = key;
    tick_[static_cast<size_t>(id)] = ++now_;
    SiftDown(SiftUp(place_[static_cast<size_t>(id)]));
  }

  void Erase(int32_t id) {
    const int32_t hole = place_[static_cast<size_t>(id)];
    if (hole < 0) return;
    const int32_t last = heap_.back();
    heap_.pop_back();
    place_[static_cast<size_t>(id)] = -1;
    if (last == id) return;
    Put(hole, last);
    SiftDown(SiftUp(hole));
  }

  void CheckInvariants() const {
    for (int32_t i = 0; i < size(); ++i) {
      K3_CHECK(place_[static_cast<size_t>(heap_[static_cast<size_t>(i)])] == i);
      if (i > 0) K3_CHECK(!Less(heap_[static_cast<size_t>(i)], heap_[static_cast<size_t>((i - 1) / 2)]));
    }
  }

 private:
  bool Less(int32_t a, int32_t b) const {
    const size_t x = static_cast<size_t>(a), y = static_cast<size_t>(b);
    return key_[x] != key_[y] ? key_[x] < key_[y] : tick_[x] < tick_[y];
  }
  void Put(int32_t place, int32_t id) {
    heap_[static_cast<size_t>(place)] = id;
    place_[static_cast<size_t>(id)] = place;
  }
  int32_t SiftUp(int32_t place) {
    const int32_t id = heap_[static_cast<size_t>(place)];
    while (place > 0) {
      const int32_t above = (place - 1) / 2;
      if (!Less(id, heap_[static_cast<size_t>(above)])) break;
      Put(place, heap_[static_cast<size_t>(above)]);
      place = above;
    }
    Put(place, id);
    return place;
  }
  void SiftDown(int32_t place) {
    const int32_t id = heap_[static_cast<size_t>(place)];
    for (;;) {
      int32_t below = 2 * place + 1;
      if (below >= size()) break;
      if (below + 1 < size() && Less(heap_[static_cast<size_t>(below + 1)], heap_[static_cast<size_t>(below)])) ++below;
      if (!Less(heap_[static_cast<size_t>(below)], id)) break;
      Put(place, heap_[static_cast<size_t>(below)]);
      place = below;
    }
    Put(place, id);
  }

  std::vector<int32_t> heap_;
  std::vector<int32_t> place_;  // by id; -1 = not in the heap
  std::vector<double> key_;
  std::vector<uint64_t> tick_;
  uint64_t now_ = 0;
};

}  // namespace k3
