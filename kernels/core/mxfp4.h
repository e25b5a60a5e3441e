#pragma once

#include <bit>
#include <cstdint>
#include <limits>

// MXFP4 as in released checkpoints (spec 2.3): E2M1 elements, two per byte along the input dimension, the low nibble
// first; one E8M0 scale byte per 32 input elements of a row.
namespace k3 {

inline constexpr int kMxfp4Group = 32;
inline constexpr uint8_t kMxfp4NanScale = 255;

// Code 0..15: bit 3 is the sign.
inline constexpr float kE2m1Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                          -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// 2^(code - 127); code 0 is subnormal in fp32, code 255 is NaN.
inline float E8m0ToFloat(uint8_t code) {
  if (code == kMxfp4NanScale) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
}

// Element `column` of a row. The product is exact except for scale codes 253 and 254, where magnitudes of 2^128 and
// more become infinity.
inline float Mxfp4Value(const uint8_t* packed_row, const uint8_t* scale_row, int64_t column) {
  const int code = (packed_row[column >> 1] >> (4 * (column & 1))) & 15;
  return kE2m1Values[code] * E8m0ToFloat(scale_row[column / kMxfp4Group]);
}

}  // namespace k3
