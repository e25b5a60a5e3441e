#pragma once

#include <immintrin.h>

#include <cstdint>

// simd_scalar.h with one AVX-512 register. Include only from files compiled with -mavx512{f,bw,dq,vl} -mfma.
namespace k3::avx512 {

struct F32x16 {
  __m512 v;
};

inline __mmask16 TailMask(int64_t count) {
  return count >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << (count < 0 ? 0 : count)) - 1);
}

inline F32x16 Set(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 Zero() { return {_mm512_setzero_ps()}; }
inline F32x16 Load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32x16 Load(const float* p, int64_t count) {
  return count >= 16 ? Load(p) : F32x16{_mm512_maskz_loadu_ps(TailMask(count), p)};
}
inline void Store(float* p, F32x16 x) { _mm512_storeu_ps(p, x.v); }
inline void Store(float* p, F32x16 x, int64_t count) {
  if (count >= 16) return Store(p, x);
  _mm512_mask_storeu_ps(p, TailMask(count), x.v);
}
inline F32x16 WidenBf16(__m256i half) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline F32x16 LoadBf16(const uint16_t* p) { return WidenBf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F32x16 LoadBf16(const uint16_t* p, int64_t count) {
  return WidenBf16(_mm256_maskz_loadu_epi16(TailMask(count), p));
}
inline __m256i RoundBf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet));
}
inline void StoreBf16(uint16_t* p, F32x16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), RoundBf16(x.v)); }
inline void StoreBf16(uint16_t* p, F32x16 x, int64_t count) {
  _mm256_mask_storeu_epi16(p, TailMask(count), RoundBf16(x.v));
}

inline F32x16 Add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 Sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 Mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 Div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 Max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 Min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 Abs(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline F32x16 CopySign(F32x16 magnitude, F32x16 sign) {
  const __m512 bit = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(bit, magnitude.v), _mm512_and_ps(bit, sign.v))};
}
inline F32x16 RoundToEven(F32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F32x16 Pow2(F32x16 n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}
inline F32x16 SelectLess(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline F32x16 FillTail(F32x16 a, int64_t count, float fill) {
  return {_mm512_mask_blend_ps(TailMask(count), _mm512_set1_ps(fill), a.v)};
}
inline float ReduceAdd(F32x16 a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float ReduceMax(F32x16 a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// --- packed weights (panel_matrix.h) ---
struct Words {
  __m512i v;
};
inline Words LoadWords(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Words LoadBytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// The bf16 values in the low or high halves of 16 words.
inline F32x16 LowHalves(Words w) { return {_mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16))}; }
inline F32x16 HighHalves(Words w) {
  return {_mm512_castsi512_ps(_mm512_and_si512(w.v, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}
inline Words HighNibbles(Words w) { return {_mm512_srli_epi32(w.v, 4)}; }
// E2M1 values of the low nibbles; the permutation looks at no other bits.
inline F32x16 DecodeE2m1(Words w) {
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,
                                       -2.0f, -3.0f, -4.0f, -6.0f);
  return {_mm512_permutexvar_ps(w.v, values)};
}
inline F32x16 DecodeE8m0(const uint8_t* p) {
  const __m512i code = LoadBytes(p).v;
  __m512i bits = _mm512_slli_epi32(code, 23);
  bits =
      _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(code, _mm512_setzero_si512()), _mm512_set1_epi32(0x00400000));
  bits =
      _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(255)), _mm512_set1_epi32(0x7fc00000));
  return {_mm512_castsi512_ps(bits)};
}

// Tile shapes that fill the 32 registers: enough chains to hide the latency of a multiply-add for few rows, few loads
// per multiply-add for many.
inline constexpr int kGemmMaxRows = 12;
constexpr int GemmVectors(int rows) { return rows <= 3 ? 8 : rows <= 6 ? 4 : 2; }

}  // namespace k3::avx512
