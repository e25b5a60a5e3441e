#include "engine/cache/state_pool.h"

#include "kernels/core/check.h"

namespace k3 {

StatePool::StatePool(int32_t live, int32_t snapshots) : live_(live), used_(static_cast<size_t>(live + snapshots)) {
  free_live_.reserve(static_cast<size_t>(live));
  free_snapshots_.reserve(static_cast<size_t>(snapshots));
  for (int32_t id = live - 1; id >= 0; --id) free_live_.push_back(id);
  for (int32_t id = live + snapshots - 1; id >= live; --id) free_snapshots_.push_back(id);
}

StateSlot StatePool::Allocate(std::vector<int32_t>& free) {
  if (free.empty()) return {};
  const int32_t id = free.back();
  free.pop_back();
  K3_CHECK(!used_[static_cast<size_t>(id)]);
  used_[static_cast<size_t>(id)] = true;
  return {id};
}

void StatePool::Release(StateSlot slot) {
  K3_CHECK(slot.valid() && slot.value < static_cast<int32_t>(used_.size()) && !IsFree(slot));
  used_[static_cast<size_t>(slot.value)] = false;
  (IsSnapshot(slot) ? free_snapshots_ : free_live_).push_back(slot.value);
}

void StatePool::CheckInvariants() const {
  std::vector<bool> seen(used_.size(), false);
  for (const std::vector<int32_t>* free : {&free_live_, &free_snapshots_}) {
    for (int32_t id : *free) {
      K3_CHECK(id >= 0 && id < static_cast<int32_t>(used_.size()));
      K3_CHECK((id < live_) == (free == &free_live_));
      K3_CHECK(!seen[static_cast<size_t>(id)] && !used_[static_cast<size_t>(id)]);
      seen[static_cast<size_t>(id)] = true;
    }
  }
  for (size_t id = 0; id < used_.size(); ++id) K3_CHECK(used_[id] || seen[id]);
}

}  // namespace k3
