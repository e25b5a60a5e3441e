#pragma once

#include <cstdint>

// The counter-based generator behind HostTensor's random values: element `index` of a tensor with seed `seed` is drawn
// from these bits alone, so any part of a tensor can be made anywhere, in any order, on any device.
namespace k3 {

constexpr uint64_t CounterRandomBits(uint64_t seed, uint64_t index) {
  uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15ull + index * 0xd1342543de82ef95ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Two uniforms of the bits, for Box-Muller: the first in (0, 1], the second in [0, 1).
constexpr float FirstUniform(uint64_t bits) { return static_cast<float>((bits >> 40) + 1) * 0x1p-24f; }
constexpr float SecondUniform(uint64_t bits) { return static_cast<float>(bits & 0xffffff) * 0x1p-24f; }

}  // namespace k3
