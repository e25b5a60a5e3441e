#pragma once

#include "kernels/cuda/moe.cuh"
#include "kernels/cuda/mxfp8.cuh"

// What the large expert products read, made ready: the picks' inputs side by side, MXFP4 weights as bf16.
namespace k3::cuda {

// to[pick of (token, j)] = x[token], with kMxfp8 rounded to MXFP8; grid (tokens), a thread takes 8 elements at a time.
template <bool kMxfp8>
__global__ void MoePermuteKernel(Matrix<const bf16> x, const int* __restrict__ pick_of, int top_k, int in, bf16* to) {
  GridDependencyWait();
  GridDependencyRelease();  // the plan has ended
  const int64_t token = blockIdx.x;
  for (int c = threadIdx.x; c < in / 8; c += blockDim.x) {
    uint4 piece = reinterpret_cast<const uint4*>(x.Row(token))[c];
    if constexpr (kMxfp8) {
      auto& elements = reinterpret_cast<bf16(&)[kRoundElements]>(piece);
      float values[kRoundElements];
#pragma unroll
      for (int e = 0; e < kRoundElements; ++e) values[e] = ToFloat(elements[e]);
      RoundToMxfp8(values);
#pragma unroll
      for (int e = 0; e < kRoundElements; ++e) elements[e] = FromFloat<bf16>(values[e]);
    }
#pragma unroll 8
    for (int j = 0; j < top_k; ++j) {
      const int pick = pick_of[token * top_k + j];
      if (pick >= 0) reinterpret_cast<uint4*>(to + static_cast<int64_t>(pick) * in)[c] = piece;
    }
  }
}

// bf16 copies of the MXFP4 rows of experts [expert_begin, expert_end) that have picks, in the order of weight_tiles.h;
// grid (blocks over the pieces' lanes of one expert, experts).
__global__ void Mxfp4ExpandKernel(Mxfp4View weights, MoePlan plan, int expert_begin, int rows, int cols, bf16* to) {
  const int expert = expert_begin + blockIdx.y;
  if (plan.expert_begin[expert + 1] == plan.expert_begin[expert]) return;
  const int64_t lanes = static_cast<int64_t>(rows / kMxfp4Rows) * weights.pieces * 32;
  bf16* const matrix = to + blockIdx.y * TiledElements(rows, cols);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < lanes;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t at = expert * lanes + i;
    const int lane = static_cast<int>(i % 32), g = lane / 4, t = lane % 4;
    const uint4 codes = weights.codes[at];
    const uint32_t scales = weights.scales[at / 32 * 8 + g];
    const int64_t piece = i / 32;
    const int64_t row = piece / weights.pieces * kMxfp4Rows + g;
    const int k = static_cast<int>(piece % weights.pieces) * kMxfp4Inputs + 8 * t;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t low[4], high[4];
      Mxfp4Spread(part == 0 ? codes.x : codes.z, low);
      Mxfp4Spread(part == 0 ? codes.y : codes.w, high);
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const uint2 factors = Mxfp4Factors(scales >> (16 * upper + 8 * part) & 255);
        const auto value = [&](uint32_t pair) { return MultiplyBf16(MultiplyBf16(pair, factors.x), factors.y); };
        *reinterpret_cast<uint4*>(matrix + TiledElement(row + 8 * upper, k + 32 * part, 2 * weights.pieces)) =
            make_uint4(value(low[upper]), value(low[upper + 2]), value(high[upper]), value(high[upper + 2]));
      }
    }
  }
}

}  // namespace k3::cuda
