#pragma once

#include <cfloat>

#include "kernels/cuda/sampling_row.cuh"

// The raw statistics of a row, in one order of operations whatever the number of blocks: a slice by kSampleThreads
// threads, each with batches of packs, their warps, then the warps of all slices.
namespace k3::cuda {

constexpr int kScanPacks = 5;  // 16-byte packs of a batch: a group of 20 logits

__host__ __device__ constexpr int ScanBatches(int slice) {
  const int each = 4 * kScanPacks * kSampleThreads;
  return (slice + each - 1) / each;
}

// Thread t's share of `size` logits. `batch(b, top, packs)` sees each batch with its maximum; where the slice ends they
// are -inf. Returns the warp's maximum (at least -FLT_MAX) and the sum of exponentials relative to it, to every lane;
// the sum is NaN where a logit is NaN or +inf, 0 where all are -inf.
template <typename F>
__device__ __forceinline__ float2 ScanSlice(const float* from, int size, int t, const F& batch) {
  const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0;
  const int packs = (size + 3) / 4;
  float top = -FLT_MAX, sum = 0;
  for (int b = 0; b * kScanPacks * kSampleThreads < packs; ++b) {
    float4 z[kScanPacks];
#pragma unroll
    for (int j = 0; j < kScanPacks; ++j) {
      const int i = t + kSampleThreads * (b * kScanPacks + j);
      z[j] = float4{-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      if (aligned && 4 * i + 3 < size) {
        z[j] = *reinterpret_cast<const float4*>(from + 4 * i);
      } else {
        if (4 * i < size) z[j].x = from[4 * i];
        if (4 * i + 1 < size) z[j].y = from[4 * i + 1];
        if (4 * i + 2 < size) z[j].z = from[4 * i + 2];
        if (4 * i + 3 < size) z[j].w = from[4 * i + 3];
      }
    }
    float batch_top = -INFINITY;
#pragma unroll
    for (int j = 0; j < kScanPacks; ++j) {
      batch_top = fmaxf(batch_top, fmaxf(fmaxf(z[j].x, z[j].y), fmaxf(z[j].z, z[j].w)));
    }
    batch(b, batch_top, z);
    const float next_top = fmaxf(top, batch_top);
    const auto power = [&](float value) { return Exp2((value - next_top) * kLog2Of); };
    float part = 0;
#pragma unroll
    for (int j = 0; j < kScanPacks; ++j) part += (power(z[j].x) + power(z[j].y)) + (power(z[j].z) + power(z[j].w));
    sum = fmaf(sum, Exp2((top - next_top) * kLog2Of), part);
    top = next_top;
  }
  const float warp_top = WarpMax(top);
  return {warp_top, WarpSum(sum * Exp2((top - warp_top) * kLog2Of))};
}

struct ScanTotal {
  float top;
  float sum;  // of exponentials relative to top; not above 0 where the row has no distribution
};
// Of the warps of all slices, by one warp, to every lane.
__device__ __forceinline__ ScanTotal ScanCombine(const float2* partial, int slices, int lane) {
  float2 own[kSampleBlocks * kSampleWarps / 32];
  float top = -FLT_MAX;
#pragma unroll
  for (int i = 0; i < kSampleBlocks * kSampleWarps / 32; ++i) {
    own[i] = lane + 32 * i < slices * kSampleWarps ? partial[lane + 32 * i] : float2{-FLT_MAX, 0};
    top = fmaxf(top, own[i].x);
  }
  top = WarpMax(top);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kSampleBlocks * kSampleWarps / 32; ++i)
    sum = fmaf(own[i].y, Exp2((own[i].x - top) * kLog2Of), sum);
  return {top, WarpSum(sum)};
}

}  // namespace k3::cuda
