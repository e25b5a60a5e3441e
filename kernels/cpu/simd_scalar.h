#pragma once

#include <cstdint>
#include <cstring>

// Sixteen fp32 lanes as plain loops: the reference for simd_avx2.h and simd_avx512.h, which offer the same names and
// give the same bits. Kernel bodies are written once against these names and compiled per instruction set.
namespace k3::scalar {

struct F32x16 {
  float lane[16];
};

template <typename F>
inline F32x16 PerLane(F f) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) r.lane[i] = f(i);
  return r;
}

inline F32x16 Set(float x) {
  return PerLane([&](int) { return x; });
}
inline F32x16 Zero() { return Set(0.0f); }
// Lanes at and above `count` read as zero and are not touched by stores; 0 < count <= 16.
inline F32x16 Load(const float* p, int64_t count = 16) {
  return PerLane([&](int i) { return i < count ? p[i] : 0.0f; });
}
inline void Store(float* p, F32x16 x, int64_t count = 16) {
  for (int i = 0; i < count; ++i) p[i] = x.lane[i];
}
inline float FromBits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint32_t ToBits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}
inline F32x16 LoadBf16(const uint16_t* p, int64_t count = 16) {
  return PerLane([&](int i) { return i < count ? FromBits(static_cast<uint32_t>(p[i]) << 16) : 0.0f; });
}
// Rounds to nearest even; NaN stays NaN.
inline void StoreBf16(uint16_t* p, F32x16 x, int64_t count = 16) {
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = ToBits(x.lane[i]);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    p[i] = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
  }
}

inline F32x16 Add(F32x16 a, F32x16 b) {
  return PerLane([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline F32x16 Sub(F32x16 a, F32x16 b) {
  return PerLane([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline F32x16 Mul(F32x16 a, F32x16 b) {
  return PerLane([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline F32x16 Div(F32x16 a, F32x16 b) {
  return PerLane([&](int i) { return a.lane[i] / b.lane[i]; });
}
// a * b + c with one rounding.
inline F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) {
  return PerLane([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
}
// The second operand where either is NaN.
inline F32x16 Max(F32x16 a, F32x16 b) {
  return PerLane([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline F32x16 Min(F32x16 a, F32x16 b) {
  return PerLane([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline F32x16 Abs(F32x16 a) {
  return PerLane([&](int i) { return __builtin_fabsf(a.lane[i]); });
}
// |magnitude| with the sign of `sign`.
inline F32x16 CopySign(F32x16 magnitude, F32x16 sign) {
  return PerLane([&](int i) { return __builtin_copysignf(magnitude.lane[i], sign.lane[i]); });
}
inline F32x16 RoundToEven(F32x16 a) {
  return PerLane([&](int i) { return __builtin_rintf(a.lane[i]); });
}
// 2^n for integral n in [-126, 127]; anything for NaN.
inline F32x16 Pow2(F32x16 n) {
  return PerLane([&](int i) {
    const float x = n.lane[i];
    return x == x ? FromBits(static_cast<uint32_t>(static_cast<int32_t>(x) + 127) << 23) : x;
  });
}
// Where a < b (false for NaN): yes, else no.
inline F32x16 SelectLess(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
  return PerLane([&](int i) { return a.lane[i] < b.lane[i] ? yes.lane[i] : no.lane[i]; });
}
// Lanes at and above `count` replaced by `fill`.
inline F32x16 FillTail(F32x16 a, int64_t count, float fill) {
  return PerLane([&](int i) { return i < count ? a.lane[i] : fill; });
}

// The tree l + (l + 8), then 4, 2, 1: the same on every instruction set.
inline float ReduceAdd(F32x16 a) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a.lane[i] = a.lane[i] + a.lane[i + half];
  }
  return a.lane[0];
}
inline float ReduceMax(F32x16 a) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a.lane[i] = a.lane[i] > a.lane[i + half] ? a.lane[i] : a.lane[i + half];
  }
  return a.lane[0];
}

}  // namespace k3::scalar
