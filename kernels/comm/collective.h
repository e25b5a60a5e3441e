#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace k3 {

enum class Collective : uint8_t { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kBroadcast };
inline constexpr int kCollectives = 5;

inline const char* Name(Collective kind) {
  constexpr const char* kNames[kCollectives] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                                "broadcast"};
  return kNames[static_cast<size_t>(kind)];
}

// What the collectives of some ranks have cost since the start, summed over those ranks.
struct CollectiveTotals {
  struct Kind {
    uint64_t calls = 0;
    uint64_t bytes = 0;  // sent to others
    double seconds = 0;  // on GPUs only while steps are profiled, of the first rank
  };
  std::array<Kind, kCollectives> kinds;
  int ranks = 0;

  const Kind& operator[](Collective kind) const { return kinds[static_cast<size_t>(kind)]; }
  double seconds() const {
    double sum = 0;
    for (const Kind& kind : kinds) sum += kind.seconds;
    return sum;
  }
};

}  // namespace k3
