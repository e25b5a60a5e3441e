#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/cache/ids.h"

namespace k3 {

// Ids of KDA state slots (recurrent and convolution part together) under two budgets: live slots [0, live), each owned
// by one running sequence, and snapshot slots [live, live + snapshots), each written once and then read-only until
// freed. A fresh slot's contents are undefined: whoever takes a live slot zeroes or restores it before first use.
// Engine thread only.
class StatePool {
 public:
  StatePool(int32_t live, int32_t snapshots);

  int32_t live_total() const { return live_; }
  int32_t snapshot_total() const { return static_cast<int32_t>(used_.size()) - live_; }
  int32_t live_free() const { return static_cast<int32_t>(free_live_.size()); }
  int32_t snapshot_free() const { return static_cast<int32_t>(free_snapshots_.size()); }
  bool IsSnapshot(StateSlot slot) const { return slot.value >= live_; }
  bool IsFree(StateSlot slot) const { return !used_[static_cast<size_t>(slot.value)]; }

  // Invalid when none is left.
  StateSlot AllocateLive() { return Allocate(free_live_); }
  StateSlot AllocateSnapshot() { return Allocate(free_snapshots_); }
  void Release(StateSlot slot);

  void CheckInvariants() const;

 private:
  StateSlot Allocate(std::vector<int32_t>& free);

  int32_t live_;
  std::vector<bool> used_;
  std::vector<int32_t> free_live_;  // stacks
  std::vector<int32_t> free_snapshots_;
};

}  // namespace k3
