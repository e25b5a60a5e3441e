#pragma once

#include <compare>
#include <cstdint>

namespace k3 {

// Distinct id types, so that a page can never be passed where a state slot is meant. Negative = none.
struct PageId {
  int32_t value = -1;
  bool valid() const { return value >= 0; }
  auto operator<=>(const PageId&) const = default;
};

// A slot of the KDA state pool. Live slots and snapshot slots share one id space: live slots first.
struct StateSlot {
  int32_t value = -1;
  bool valid() const { return value >= 0; }
  auto operator<=>(const StateSlot&) const = default;
};

}  // namespace k3
