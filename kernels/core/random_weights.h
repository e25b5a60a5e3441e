#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/core/bfloat16.h"
#include "kernels/core/tensor.h"

// Values of a HostTensor without data (`serve --random-weights`): a pure function of (seed, element index), so that
// shards, backends and threads agree. Element index = row * row stride + column.
namespace k3 {

// SplitMix64's finaliser over a Weyl sequence.
inline uint64_t RandomWeightBits(uint64_t seed, uint64_t index) {
  uint64_t z = seed * 0xd1342543de82ef95u + (index + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Normal deviate of mean 0 (Box-Muller).
inline float RandomWeight(uint64_t seed, uint64_t index, float stddev) {
  const uint64_t bits = RandomWeightBits(seed, index);
  const float u = (static_cast<float>(bits >> 40) + 1) * 0x1p-24f;  // (0, 1]
  const float v = static_cast<float>(bits & 0xffffff) * 0x1p-24f;
  return stddev * std::sqrt(-2 * std::log(u)) * std::cos(6.2831853f * v);
}

// Packed MXFP4 without data: uniform codes; their root mean square is 2.93, hence the one scale code of the tensor.
inline uint8_t RandomWeightMxfp4Scale(float stddev) {
  const int code = 127 + static_cast<int>(std::lround(std::log2(stddev > 0 ? stddev / 2.93f : 1.0f)));
  return static_cast<uint8_t>(code < 1 ? 1 : code > 254 ? 254 : code);
}
inline uint8_t RandomWeightMxfp4Byte(uint64_t seed, uint64_t index) {
  return static_cast<uint8_t>(RandomWeightBits(seed, index) >> 56);
}

}  // namespace k3
