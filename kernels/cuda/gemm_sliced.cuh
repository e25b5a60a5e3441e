#pragma once

#include "kernels/cuda/gemm_fixed.cuh"

// Products c = a b^T in bf16 whose rows have the same bits whatever m is, by two kernels for few and for many rows of
// a. Both add in one order: k in slices of SliceLength(k), each slice in steps of 32 by the matrix unit with the rows
// of b as its 16-row operand, then the slices in ascending order. Within a step lane t of a row holds inputs 8 t .. 8 t
// + 7, so the first product of a step takes inputs 8 t .. 8 t + 3 of all t and the second one the others.
namespace k3::cuda {

constexpr int kSliceStep = 32;
constexpr int kSlices = 8;
constexpr int kSlicedThreads = 256;

// Of k that is a multiple of kSliceStep. Later slices may be shorter or missing.
__host__ __device__ constexpr int SliceLength(int k) { return (k / kSliceStep + kSlices - 1) / kSlices * kSliceStep; }

// Stores sums of two rows of b (g and g + 8 of the 16 from `col`) for one row of a.
template <typename Out>
__device__ __forceinline__ void StoreSliced(const FixedGemmArgs<bf16, Out>& args, Out* c, int row, int col, float low,
                                            float high) {
  if (row >= args.m) return;
  Out* to = c + row * args.ldc + col;
  if (col < args.n) to[0] = FromFloat<Out>(args.accumulate ? ToFloat(to[0]) + low : low);
  if (col + 8 < args.n) to[8] = FromFloat<Out>(args.accumulate ? ToFloat(to[8]) + high : high);
}

// Up to 8 kRows rows of a: the rows of b stream through once, a slice of them by each of eight warps. kTiles: 16-row
// tiles of b a block. Grid (n / (16 kTiles), 1, batch).
template <int kRows, int kTiles, typename Out>
__global__ void __launch_bounds__(kSlicedThreads) SlicedStreamKernel(FixedGemmArgs<bf16, Out> args) {
  static_assert(kSlicedThreads == 32 * kSlices);
  float4* partial = DynamicShared<float4>();  // [slices][kTiles][kRows][32]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int first_col = blockIdx.x * 16 * kTiles;
  // Rows that do not exist repeat the last.
  const bf16* a[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    a[i] = args.a + blockIdx.z * args.stride_a + min(8 * i + g, args.m - 1) * args.lda + 8 * t;
  }
  const bf16* b[kTiles][2];
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      b[j][h] =
          args.b + blockIdx.z * args.stride_b + min(first_col + 16 * j + 8 * h + g, args.n - 1) * args.ldb + 8 * t;
    }
  }
  const int length = SliceLength(args.k);
  const int begin = min(warp * length, args.k), end = min(begin + length, args.k);
  float sum[kTiles][kRows][4] = {};
#pragma unroll(kTiles* kRows <= 4 ? 4 : 2)
  for (int k = begin; k < end; k += kSliceStep) {
    uint4 weights[kTiles][2];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) weights[j][h] = LoadStreaming16(b[j][h] + k);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint4 row = *reinterpret_cast<const uint4*>(a[i] + k);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const uint32_t first[4] = {weights[j][0].x, weights[j][1].x, weights[j][0].y, weights[j][1].y};
        const uint32_t second[4] = {weights[j][0].z, weights[j][1].z, weights[j][0].w, weights[j][1].w};
        MmaBf16(sum[j][i], first, row.x, row.y);
        MmaBf16(sum[j][i], second, row.z, row.w);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      partial[((warp * kTiles + j) * kRows + i) * 32 + lane] = {sum[j][i][0], sum[j][i][1], sum[j][i][2], sum[j][i][3]};
    }
  }
  __syncthreads();
  Out* c = args.c + blockIdx.z * args.stride_c;
  const int slices = (args.k + length - 1) / length;
  for (int i = threadIdx.x; i < kTiles * kRows * 32; i += kSlicedThreads) {
    const float4 total = SumInOrder(partial + i, kTiles * kRows * 32, slices);
    const int row = i / 32 % kRows * 8 + 2 * t, col = first_col + i / (32 * kRows) * 16 + g;
    StoreSliced(args, c, row, col, total.x, total.z);
    StoreSliced(args, c, row + 1, col, total.y, total.w);
  }
}

constexpr int kSlicedRows = 128;  // rows of a in a tile
constexpr int kSlicedStages = 4;

// Many rows of a: tiles of 128 of them and 32 kTiles rows of b, fetched three steps ahead; eight warps hold 32 rows of
// a and 16 kTiles of b each. Grid (n / (32 kTiles), m / 128, batch).
template <int kTiles, typename Out>
__global__ void __launch_bounds__(kSlicedThreads) SlicedTileKernel(FixedGemmArgs<bf16, Out> args) {
  constexpr int kCols = 32 * kTiles;
  constexpr int kStage = (kSlicedRows + kCols) * kSliceStep;
  // Rows of 64 bytes: a quarter of a warp reads two of them at once, from all banks.
  bf16* stages = DynamicShared<bf16>();  // [stages][128 + kCols][32]
  const bf16* a = args.a + blockIdx.z * args.stride_a;
  const bf16* b = args.b + blockIdx.z * args.stride_b;
  const int row0 = blockIdx.y * kSlicedRows, col0 = blockIdx.x * kCols;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int warp_row = warp % 4 * 32, warp_col = warp / 4 * 16 * kTiles;
  const int steps = args.k / kSliceStep, per_slice = SliceLength(args.k) / kSliceStep;

  const auto fetch = [&](int step) {
    if (step < steps) {
      bf16* stage = stages + step % kSlicedStages * kStage;
#pragma unroll
      for (int i = threadIdx.x; i < (kSlicedRows + kCols) * 4; i += kSlicedThreads) {
        const int r = i / 4, k = step * kSliceStep + i % 4 * 8;
        const bf16* from = r < kSlicedRows ? a + min(row0 + r, args.m - 1) * args.lda + k
                                           : b + min(col0 + r - kSlicedRows, args.n - 1) * args.ldb + k;
        CopyAsync16(stage + r * kSliceStep + i % 4 * 8, from);
      }
    }
    CopyAsyncCommit();
  };
#pragma unroll
  for (int i = 0; i < kSlicedStages - 1; ++i) fetch(i);

  float sum[kTiles][4][4] = {}, total[kTiles][4][4];
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) total[j][i][e] = -0.0f;  // what leaves the first slice as it is
    }
  }
  int left = per_slice;  // steps of the slice
  for (int step = 0; step < steps; ++step) {
    CopyAsyncWait<kSlicedStages - 2>();
    __syncthreads();
    fetch(step + kSlicedStages - 1);
    const bf16* stage = stages + step % kSlicedStages * kStage + 8 * t;
    uint4 rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows[i] = *reinterpret_cast<const uint4*>(stage + (warp_row + 8 * i + g) * kSliceStep);
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const bf16* from = stage + (kSlicedRows + warp_col + 16 * j + g) * kSliceStep;
      const uint4 low = *reinterpret_cast<const uint4*>(from);
      const uint4 high = *reinterpret_cast<const uint4*>(from + 8 * kSliceStep);
      const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        MmaBf16(sum[j][i], first, rows[i].x, rows[i].y);
        MmaBf16(sum[j][i], second, rows[i].z, rows[i].w);
      }
    }
    if (--left == 0 || step + 1 == steps) {
      left = per_slice;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            total[j][i][e] += sum[j][i][e];
            sum[j][i][e] = 0;
          }
        }
      }
    }
  }
  Out* c = args.c + blockIdx.z * args.stride_c;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row0 + warp_row + 8 * i + 2 * t, col = col0 + warp_col + 16 * j + g;
      StoreSliced(args, c, row, col, total[j][i][0], total[j][i][2]);
      StoreSliced(args, c, row + 1, col, total[j][i][1], total[j][i][3]);
    }
  }
}

}  // namespace k3::cuda
