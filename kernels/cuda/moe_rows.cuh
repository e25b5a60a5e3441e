#pragma once

#include "kernels/cuda/moe.cuh"
#include "kernels/cuda/mxfp8.cuh"

// What the large expert products read, made ready: the picks' inputs side by side.
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

}  // namespace k3::cuda
