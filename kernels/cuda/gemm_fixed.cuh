#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"

namespace k3::cuda {

constexpr int kFixedTile = 64;
constexpr int kFixedDepth = 32;
constexpr int kFixedThreads = 128;

template <typename T, typename Out>
struct FixedGemmArgs {
  int m, n, k;
  const T* a;
  int64_t lda;
  const T* b;
  int64_t ldb;
  Out* c;
  int64_t ldc;
  int64_t stride_a, stride_b, stride_c;  // between members of the batch
  bool accumulate;
  bool aligned;  // rows of a and b start on 16 bytes, and their lengths are multiples of 8
};

// `rows` x `cols` elements of a matrix into shared rows of `stride` elements, zeros beyond its edges.
template <int kRows, int kCols, typename T>
__device__ __forceinline__ void LoadEdgeTile(const T* from, int64_t ld, int rows, int cols, bool aligned, T* to,
                                             int stride) {
  if (aligned) {
    constexpr int N = kPack<T>;
    for (int i = threadIdx.x; i < kRows * kCols / N; i += kFixedThreads) {
      const int r = i / (kCols / N), c = i % (kCols / N) * N;
      Pack<T, N> pack = {};
      if (r < rows && c < cols) pack = *reinterpret_cast<const Pack<T, N>*>(from + r * ld + c);
      *reinterpret_cast<Pack<T, N>*>(to + r * stride + c) = pack;
    }
  } else {
    for (int i = threadIdx.x; i < kRows * kCols; i += kFixedThreads) {
      const int r = i / kCols, c = i % kCols;
      to[r * stride + c] = r < rows && c < cols ? from[r * ld + c] : FromFloat<T>(0.0f);
    }
  }
}

// bf16 on the tensor cores: four warps, 32 x 32 each. Grid (n tiles, m tiles, batch).
template <bool kBIsKByN, typename Out>
__global__ void __launch_bounds__(kFixedThreads) FixedGemmKernel(FixedGemmArgs<bf16, Out> args) {
  constexpr int kStrideA = kFixedDepth + 8;
  constexpr int kStrideB = kBIsKByN ? kFixedTile + 8 : kFixedDepth + 8;
  bf16* tile_a = DynamicShared<bf16>();           // [64 m][32 k]
  bf16* tile_b = tile_a + kFixedTile * kStrideA;  // [64 n][32 k] or [32 k][64 n]
  const bf16* a = args.a + blockIdx.z * args.stride_a;
  const bf16* b = args.b + blockIdx.z * args.stride_b;
  Out* c = args.c + blockIdx.z * args.stride_c;
  const int row0 = blockIdx.y * kFixedTile, col0 = blockIdx.x * kFixedTile;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp / 2 * 32, warp_col = warp % 2 * 32;
  float sum[2][4][4] = {};
  for (int depth = 0; depth < args.k; depth += kFixedDepth) {
    __syncthreads();
    LoadEdgeTile<kFixedTile, kFixedDepth>(a + row0 * args.lda + depth, args.lda, args.m - row0, args.k - depth,
                                          args.aligned, tile_a, kStrideA);
    if constexpr (kBIsKByN) {
      LoadEdgeTile<kFixedDepth, kFixedTile>(b + depth * args.ldb + col0, args.ldb, args.k - depth, args.n - col0,
                                            args.aligned, tile_b, kStrideB);
    } else {
      LoadEdgeTile<kFixedTile, kFixedDepth>(b + col0 * args.ldb + depth, args.ldb, args.n - col0, args.k - depth,
                                            args.aligned, tile_b, kStrideB);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kFixedDepth; k += 16) {
      uint32_t rows[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        LoadMatrix4(rows[i], tile_a + (warp_row + 16 * i + lane % 16) * kStrideA + k + lane / 16 * 8);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t cols[4];
        const int col = warp_col + 16 * j;
        if constexpr (kBIsKByN) {
          LoadMatrix4Transposed(cols, tile_b + (k + lane % 16) * kStrideB + col + lane / 16 * 8);
        } else {
          LoadMatrix4(cols, tile_b + (col + lane / 16 * 8 + lane % 8) * kStrideB + k + lane / 8 % 2 * 8);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          MmaBf16(sum[i][2 * j], rows[i], cols[0], cols[1]);
          MmaBf16(sum[i][2 * j + 1], rows[i], cols[2], cols[3]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = row0 + warp_row + 16 * i + lane / 4 + e / 2 * 8;
        const int col = col0 + warp_col + 8 * j + lane % 4 * 2 + e % 2;
        if (row >= args.m || col >= args.n) continue;
        Out* to = c + row * args.ldc + col;
        *to = FromFloat<Out>(args.accumulate ? ToFloat(*to) + sum[i][j][e] : sum[i][j][e]);
      }
    }
  }
}

// fp32: one element of c a thread and 32 of k at a time. Grid (n / 16, m / 8, batch) of 128 threads.
template <bool kBIsKByN>
__global__ void __launch_bounds__(kFixedThreads) FixedGemmFloatKernel(FixedGemmArgs<float, float> args) {
  const float* a = args.a + blockIdx.z * args.stride_a;
  const float* b = args.b + blockIdx.z * args.stride_b;
  const int row = blockIdx.y * 8 + threadIdx.x / 16, col = blockIdx.x * 16 + threadIdx.x % 16;
  if (row >= args.m || col >= args.n) return;
  float sum = 0;
  for (int k = 0; k < args.k; ++k) {
    sum = fmaf(a[row * args.lda + k], kBIsKByN ? b[k * args.ldb + col] : b[col * args.ldb + k], sum);
  }
  float* to = args.c + blockIdx.z * args.stride_c + row * args.ldc + col;
  *to = args.accumulate ? *to + sum : sum;
}

}  // namespace k3::cuda
