#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/mxfp4_layout.h"
#include "kernels/cuda/ptx.cuh"

// MXFP4 weights (spec 2.3) in the order of mxfp4_layout.h.
namespace k3::cuda {

struct Mxfp4View {
  const uint4* codes;      // [rows / 16][pieces][32]
  const uint32_t* scales;  // [rows / 16][pieces][8]
  int pieces;              // of a row of them
};

__device__ __forceinline__ float Mxfp4Scale(uint32_t code) {
  return code == 255 ? __uint_as_float(0x7fc00000u) : __uint_as_float(code == 0 ? 0x00400000u : code << 23);
}

// The codes of a word as e4m3, their values times 2^-6, subnormals included: of row g and of row g + 8.
__device__ __forceinline__ void Mxfp4Bytes(uint32_t word, uint32_t& low, uint32_t& high) {
  low = word & kMxfp4Codes;
  high = (word << 2 ^ word >> 2) & kMxfp4Codes;
}

// The codes of a word where bf16 has its bits, as an A fragment: read as bf16, their values times 2^-126.
__device__ __forceinline__ void Mxfp4Spread(uint32_t word, uint32_t (&a)[4]) {
  uint32_t row[2];
  Mxfp4Bytes(word, row[0], row[1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = __byte_perm(row[i % 2], 0, i < 2 ? 0x1404 : 0x3424);  // in the upper bytes
    a[i] = (pair & 0x80008000u) | (pair >> 4 & 0x01c001c0u);
  }
}

// A scale's factor for that, as a pair; for codes up to 127. Others need two factors.
__device__ __forceinline__ uint32_t Mxfp4Factor(uint32_t code) { return code * 0x00800080u + 0x3f003f00u; }
__device__ __forceinline__ uint2 Mxfp4Factors(uint32_t code) {
  if (code == 255) return make_uint2(0x7fc07fc0u, 0x3f803f80u);
  const uint32_t first = min(code, 127u);
  return make_uint2(Mxfp4Factor(first), 0x3f803f80u + (code - first) * 0x00800080u);
}

// A row of weights as fp32.
struct Mxfp4Row {
  Mxfp4View view;
  int64_t row;
  __device__ __forceinline__ float operator()(int k) const {
    const int64_t piece = row / kMxfp4Rows * view.pieces + k / kMxfp4Inputs;
    const int g = row % 8, upper = row % kMxfp4Rows / 8, part = k % kMxfp4Inputs / 32, t = k % 32 / 8;
    const int pair = k % 8 / 2, a = upper + 2 * (pair % 2);
    const uint32_t word = reinterpret_cast<const uint32_t*>(view.codes + piece * 32 + 4 * g + t)[2 * part + pair / 2];
    uint32_t codes[4];
    Mxfp4Spread(word, codes);
    const uint32_t code = (a < 2 ? (a == 0 ? codes[0] : codes[1]) : (a == 2 ? codes[2] : codes[3])) >> (16 * (k % 2));
    const uint32_t magnitude = code >> 6 & 7;
    const float value = magnitude < 2 ? 0.5f * magnitude : (1.0f + 0.5f * (magnitude & 1)) * (1 << (magnitude / 2 - 1));
    const uint32_t scale = view.scales[piece * 8 + g] >> (16 * upper + 8 * part) & 255;
    return ((code & 0x8000u) != 0 ? -value : value) * Mxfp4Scale(scale);
  }
};

}  // namespace k3::cuda
