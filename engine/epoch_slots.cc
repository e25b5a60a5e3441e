#include "engine/epoch_slots.h"

#include "kernels/core/check.h"

namespace k3 {

int32_t EpochSlots::Refresh() {
  if (offered_ == number(current_)) return current_;
  if (offered_ == 0) {
    current_ = 0;
    upload_.reset();  // nobody was pinned to what it was for
    return current_;
  }
  // Never the current one, although nobody may be pinned to it: a step in flight may still be filling it.
  for (int32_t slot = 1; slot < kSlots; ++slot) {
    if (slot == current_ || pins(slot) > 0) continue;
    slots_[static_cast<size_t>(slot)].number = offered_;
    current_ = slot;
    upload_ = EpochUpload{offered_, slot};
    break;
  }
  return current_;
}

int32_t EpochSlots::live() const {
  int32_t live = 0;
  for (int32_t slot = 0; slot < kSlots; ++slot) live += slot == current_ || pins(slot) > 0;
  return live;
}

void EpochSlots::Unpin(int32_t slot) {
  K3_CHECK(pins(slot) > 0);
  --slots_[static_cast<size_t>(slot)].pins;
}

}  // namespace k3
