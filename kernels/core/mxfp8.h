#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

// MXFP8 as activations of quantised experts take it (spec 3.6): E4M3 elements and one power of two per 32 of them along
// the contraction. The scale is the least one with which no element exceeds 448, the largest of E4M3; elements round to
// nearest, ties to even. What comes out are plain numbers: every one of them is exact in bf16.
namespace k3 {

inline constexpr int kMxfp8Group = 32;

// e of the scale 2^e, of a group whose largest magnitude is `largest`: ceil(log2(largest / 448)), 448 = 1.75 * 2^8.
constexpr int Mxfp8ScaleExponent(float largest) {
  const uint32_t bits = std::bit_cast<uint32_t>(largest);
  return static_cast<int>(bits >> 23 & 0xff) - 127 - 8 + ((bits & 0x7fffff) > 0x600000 ? 1 : 0);
}

// 2^exponent as a float, for exponents of normal ones.
constexpr float Mxfp8PowerOfTwo(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// The exponent of the spacing of E4M3 around `x` under the scale 2^scale_exponent: three bits of mantissa, and below
// 2^-6 the steps of the subnormals.
constexpr int Mxfp8StepExponent(float x, int scale_exponent) {
  const int own = static_cast<int>(std::bit_cast<uint32_t>(x) >> 23 & 0xff) - 127 - 3;
  const int least = scale_exponent - 9;
  const int step = own > least ? own : least;
  return step < -126 ? -126 : step > 126 ? 126 : step;
}

// `group` of 32, in place. NaN and infinity stay what they are.
inline void RoundToMxfp8(float* group) {
  float largest = 0;
  for (int i = 0; i < kMxfp8Group; ++i) largest = std::max(largest, std::fabs(group[i]));
  const int scale = Mxfp8ScaleExponent(largest);
  for (int i = 0; i < kMxfp8Group; ++i) {
    const int step = Mxfp8StepExponent(group[i], scale);
    group[i] = std::nearbyint(group[i] * Mxfp8PowerOfTwo(-step)) * Mxfp8PowerOfTwo(step);
  }
}

}  // namespace k3
