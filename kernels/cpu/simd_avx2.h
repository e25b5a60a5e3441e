#pragma once

#include <immintrin.h>

#include <cstdint>

// simd_scalar.h with two AVX2 registers of eight lanes. Include only from files compiled with -mavx2 -mfma.
namespace k3::avx2 {

struct F32x16 {
  __m256 lo, hi;
};

inline __m256i TailMask(int64_t count) {
  alignas(32) static constexpr int32_t kMasks[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  const int64_t n = count < 0 ? 0 : count > 8 ? 8 : count;
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kMasks + 8 - n));
}

inline F32x16 Set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32x16 Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F32x16 Load(const float* p, int64_t count) {
  if (count >= 16) return Load(p);
  if (count <= 8) return {_mm256_maskload_ps(p, TailMask(count)), _mm256_setzero_ps()};
  return {_mm256_loadu_ps(p), _mm256_maskload_ps(p + 8, TailMask(count - 8))};
}
inline void Store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
inline void Store(float* p, F32x16 x, int64_t count) {
  if (count >= 16) return Store(p, x);
  if (count <= 8) {
    _mm256_maskstore_ps(p, TailMask(count), x.lo);
  } else {
    _mm256_storeu_ps(p, x.lo);
    _mm256_maskstore_ps(p + 8, TailMask(count - 8), x.hi);
  }
}
inline __m256 WidenBf16(__m128i half) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline F32x16 LoadBf16(const uint16_t* p) {
  return {WidenBf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          WidenBf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline F32x16 LoadBf16(const uint16_t* p, int64_t count) {
  if (count >= 16) return LoadBf16(p);
  alignas(32) uint16_t padded[16] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
  return LoadBf16(padded);
}
// bf16 bits in the low half of each 32-bit lane.
inline __m256i RoundBf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline void StoreBf16(uint16_t* p, F32x16 x) {
  // packus works within 128-bit halves; the permutation restores the order.
  const __m256i packed = _mm256_packus_epi32(RoundBf16(x.lo), RoundBf16(x.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void StoreBf16(uint16_t* p, F32x16 x, int64_t count) {
  if (count >= 16) return StoreBf16(p, x);
  alignas(32) uint16_t all[16];
  StoreBf16(all, x);
  for (int64_t i = 0; i < count; ++i) p[i] = all[i];
}

inline F32x16 Add(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32x16 Sub(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32x16 Mul(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32x16 Div(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 Max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32x16 Min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F32x16 Abs(F32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline F32x16 CopySign(F32x16 magnitude, F32x16 sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(bit, magnitude.lo), _mm256_and_ps(bit, sign.lo)),
          _mm256_or_ps(_mm256_andnot_ps(bit, magnitude.hi), _mm256_and_ps(bit, sign.hi))};
}
inline F32x16 RoundToEven(F32x16 a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kMode), _mm256_round_ps(a.hi, kMode)};
}
inline __m256 Pow2(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F32x16 Pow2(F32x16 n) { return {Pow2(n.lo), Pow2(n.hi)}; }
inline F32x16 SelectLess(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline F32x16 FillTail(F32x16 a, int64_t count, float fill) {
  const __m256 f = _mm256_set1_ps(fill);
  return {_mm256_blendv_ps(f, a.lo, _mm256_castsi256_ps(TailMask(count))),
          _mm256_blendv_ps(f, a.hi, _mm256_castsi256_ps(TailMask(count - 8)))};
}
inline float ReduceAdd(F32x16 a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float ReduceMax(F32x16 a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// --- packed weights (panel_matrix.h) ---
struct Words {
  __m256i lo, hi;
};
inline Words LoadWords(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline Words LoadBytes(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
// The bf16 values in the low or high halves of 16 words.
inline F32x16 LowHalves(Words w) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w.hi, 16))};
}
inline F32x16 HighHalves(Words w) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(w.lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(w.hi, mask))};
}
inline Words HighNibbles(Words w) { return {_mm256_srli_epi32(w.lo, 4), _mm256_srli_epi32(w.hi, 4)}; }
// E2M1 values of the low nibbles: magnitude by permutation (which looks at three bits), sign from bit 3.
inline __m256 DecodeE2m1(__m256i codes) {
  const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(static_cast<int>(0x80000000)));
  return _mm256_or_ps(_mm256_permutevar8x32_ps(magnitudes, codes), _mm256_castsi256_ps(sign));
}
inline F32x16 DecodeE2m1(Words w) { return {DecodeE2m1(w.lo), DecodeE2m1(w.hi)}; }
inline __m256 DecodeE8m0(__m256i code) {
  __m256i bits = _mm256_slli_epi32(code, 23);
  bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x00400000), _mm256_cmpeq_epi32(code, _mm256_setzero_si256()));
  bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000), _mm256_cmpeq_epi32(code, _mm256_set1_epi32(255)));
  return _mm256_castsi256_ps(bits);
}
inline F32x16 DecodeE8m0(const uint8_t* p) {
  const Words codes = LoadBytes(p);
  return {DecodeE8m0(codes.lo), DecodeE8m0(codes.hi)};
}

// Tile shapes for 16 registers of half a vector each.
inline constexpr int kGemmMaxRows = 6;
constexpr int GemmVectors(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

}  // namespace k3::avx2
