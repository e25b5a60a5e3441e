#pragma once

#include "kernels/core/mxfp8.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"

// Activations of quantised experts rounded to MXFP8 (kernels/core/mxfp8.h).
namespace k3::cuda {

constexpr int kRoundElements = 8;  // of a lane; four lanes hold a group
constexpr int kRoundThreads = 256;

// The calling lane's eight elements of a group; all four lanes of the group call.
__device__ __forceinline__ void RoundToMxfp8(float (&x)[kRoundElements]) {
  float largest = 0;
#pragma unroll
  for (float value : x) largest = fmaxf(largest, fabsf(value));
  const unsigned lanes = 0xfu << (threadIdx.x % 32 & ~3u);
  largest = fmaxf(largest, __shfl_xor_sync(lanes, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(lanes, largest, 2));
  const int scale = Mxfp8ScaleExponent(largest);
#pragma unroll
  for (float& value : x) {
    const int step = Mxfp8StepExponent(value, scale);
    value = rintf(value * Mxfp8PowerOfTwo(-step)) * Mxfp8PowerOfTwo(step);
  }
}

// to[row] = from[row] rounded, for rows [*begin, *end) or, where these are null, [0, rows); `cols` a multiple of 32,
// rows of `to` dense. In place where `to` is `from`. Grid: any number of blocks.
template <typename T>
__global__ void __launch_bounds__(kRoundThreads)
    RoundRowsKernel(Matrix<const T> from, int64_t rows, int cols, const int* begin, const int* end, T* to) {
  const int pieces = cols / kRoundElements;
  const int64_t first = begin != nullptr ? *begin : 0, last = end != nullptr ? *end : rows;
  for (int64_t i = first * pieces + static_cast<int64_t>(blockIdx.x) * kRoundThreads + threadIdx.x; i < last * pieces;
       i += static_cast<int64_t>(gridDim.x) * kRoundThreads) {
    const int64_t row = i / pieces;
    const int col = static_cast<int>(i % pieces) * kRoundElements;
    float x[kRoundElements];
#pragma unroll
    for (int e = 0; e < kRoundElements; ++e) x[e] = ToFloat(from.Row(row)[col + e]);
    RoundToMxfp8(x);
#pragma unroll
    for (int e = 0; e < kRoundElements; ++e) to[row * cols + col + e] = FromFloat<T>(x[e]);
  }
}

}  // namespace k3::cuda
