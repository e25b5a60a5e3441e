#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "engine/step.h"

namespace k3 {

// The bias epochs of one rank that are alive: each in a slot of the rank's table, with the number of requests that are
// pinned to it. Slot 0 always holds epoch 0, which changes nothing. A new epoch waits while all slots are taken; of
// several that wait only the newest counts. Engine thread only.
class EpochSlots {
 public:
  static constexpr int32_t kSlots = kEpochSlots;

  // The rank's newest epoch.
  void Offer(uint64_t number) { offered_ = number; }
  // What requests that are admitted now are pinned to. Takes over the epoch that was offered when there is room.
  int32_t Refresh();
  // What the next plan must carry; kept until Sent, because a plan may come to nothing.
  const std::optional<EpochUpload>& upload() const { return upload_; }
  void Sent() { upload_.reset(); }

  int32_t current() const { return current_; }
  uint64_t number(int32_t slot) const { return slots_[static_cast<size_t>(slot)].number; }
  int32_t pins(int32_t slot) const { return slots_[static_cast<size_t>(slot)].pins; }
  // Epochs that somebody is or may become pinned to.
  int32_t live() const;
  void Pin(int32_t slot) { ++slots_[static_cast<size_t>(slot)].pins; }
  void Unpin(int32_t slot);

 private:
  struct Slot {
    uint64_t number = 0;
    int32_t pins = 0;
  };
  std::array<Slot, kSlots> slots_;
  int32_t current_ = 0;
  uint64_t offered_ = 0;
  std::optional<EpochUpload> upload_;
};

}  // namespace k3
