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
  const uint32_t row[2] = {word, word << 2 ^ word >> 2};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    a[i] = (row[i] & 0x80008000u) | (row[i] >> 4 & 0x01c001c0u);
    a[i + 2] = (row[i] << 8 & 0x80008000u) | (row[i] << 4 & 0x01c001c0u);
  }
}

// The factor for that of the scale in byte `byte` of a word, as a pair. Up to code 128, beyond which it is not finite.
__device__ __forceinline__ uint32_t Mxfp4Factor(uint32_t scales, int byte) {
  return __byte_perm(scales, 0, 0x4040 + 0x0101 * byte) * 0x80u + 0x3f003f00u;
}

// A row of weights as fp32.
struct Mxfp4Row {
  Mxfp4View view;
  int64_t row;
  __device__ __forceinline__ float operator()(int k) const {
    const int64_t piece = row / kMxfp4Rows * view.pieces + k / kMxfp4Inputs;
    const int g = row % 8, upper = row % kMxfp4Rows / 8, part = k % kMxfp4Inputs / 32, column = Mxfp4ColumnOf(k % 16);
    const uint32_t word =
        reinterpret_cast<const uint32_t*>(view.codes + piece * 32 + 4 * g + column / 4)[k % kMxfp4Inputs / 16];
    uint32_t codes[2];
    Mxfp4Bytes(word, codes[0], codes[1]);
    const uint32_t code = (upper == 0 ? codes[0] : codes[1]) >> (8 * (column % 4));
    const uint32_t magnitude = code >> 2 & 7;
    const float value = magnitude < 2 ? 0.5f * magnitude : (1.0f + 0.5f * (magnitude & 1)) * (1 << (magnitude / 2 - 1));
    const uint32_t scale = view.scales[piece * 8 + g] >> (16 * upper + 8 * part) & 255;
    return ((code & 0x80u) != 0 ? -value : value) * Mxfp4Scale(scale);
  }
};

}  // namespace k3::cuda
