#pragma once

#include "kernels/cuda/kda_chunk.cuh"

// The 16 x 16 tiles of a chunk's score matrix: operands, products, the inverse of I + A, and the scores on the diagonal
// where the gate is unbounded.
namespace k3::cuda {

constexpr int kPrepareThreads = 512;
constexpr int kPrepareWarps = kPrepareThreads / 32;
constexpr int kHalfRows = 8;
constexpr int kTileStride = kChunkRows + 4;     // floats
constexpr int kInverseStride = kChunkRows + 8;  // elements
static_assert(kPrepareWarps == 16);             // as many as rows of a tile
constexpr int kDiagonalPairs = kHalfRows * kHalfRows;

__device__ __forceinline__ void StorePair(bf16* to, uint32_t pair) { *reinterpret_cast<uint32_t*>(to) = pair; }

// Addresses of ldmatrix rows for this lane within a 16 x 16 tile at (row, column) of a matrix.
template <int kStride>
__device__ __forceinline__ const bf16* RowOperand(const bf16* matrix, int row, int column, int lane) {  // A
  return matrix + (row + lane % 16) * kStride + column + lane / 16 * 8;
}
template <int kStride>
__device__ __forceinline__ const bf16* ColumnOperand(const bf16* matrix, int row, int column,
                                                     int lane) {  // B, rows are n
  return matrix + (row + lane / 16 * 8 + lane % 8) * kStride + column + lane / 8 % 2 * 8;
}
// The B fragments of 8 rows for two steps of the contraction, 32 columns.
template <int kStride>
__device__ __forceinline__ const bf16* ColumnOperandTwice(const bf16* matrix, int row, int column, int lane) {
  return matrix + (row + lane % 8) * kStride + column + lane / 8 * 8;
}

// sum[16x16] += a[16x16] b[16x16] in tf32 for fp32 tiles in shared memory, row-major with kTileStride.
__device__ __forceinline__ void MmaTile(const float* a, const float* b, int lane, float (&sum)[2][4]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int k = 0; k < 16; k += 8) {
    const uint32_t rows[4] = {RoundTf32(a[g * kTileStride + k + t]), RoundTf32(a[(g + 8) * kTileStride + k + t]),
                              RoundTf32(a[g * kTileStride + k + t + 4]),
                              RoundTf32(a[(g + 8) * kTileStride + k + t + 4])};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      MmaTf32(sum[n], rows, RoundTf32(b[(k + t) * kTileStride + 8 * n + g]),
              RoundTf32(b[(k + t + 4) * kTileStride + 8 * n + g]));
    }
  }
}
__device__ __forceinline__ void StoreTile(float* to, const float (&sum)[2][4], float sign, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[(g + i / 2 * 8) * kTileStride + 8 * n + 2 * t + i % 2] = sign * sum[n][i];
  }
}

// Inverse of I + A for the unit lower triangular 64 x 64 matrix in `a`, its columns multiplied by `scale`, rounded to
// fp16 pairs in `rounded` (which may overlay `a`): substitution in fp32 within 16 x 16 tiles, tf32 products between
// them (spec 4.3). `inverse` is work space like `a`. Called by the whole block; the warps beyond the first two run
// `meanwhile`(index among them) first.
template <typename F>
__device__ __forceinline__ void InvertUnitLower(const float* a, float* inverse, const float* scale, bf16* rounded,
                                                const F& meanwhile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto tile = [](auto* matrix, int i, int j) { return matrix + 16 * i * kTileStride + 16 * j; };
  if (warp < 2) {
    const int d = 2 * warp + lane / 16;
    const int column = lane % 16;
    const float* rows = tile(a, d, d);
    float x[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      float sum[4] = {};
#pragma unroll
      for (int m = 0; m < r; ++m) sum[m % 4] = fmaf(rows[r * kTileStride + m], x[m], sum[m % 4]);
      x[r] = (r == column ? 1.0f : 0.0f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
#pragma unroll
    for (int r = 0; r < 16; ++r) tile(inverse, d, d)[r * kTileStride + column] = x[r];
    __syncwarp();
    // Pairs of tiles: T10 = -X1 (A10 X0), T32 = -X3 (A32 X2); the tiles above the diagonal serve as work space.
    const int i = 2 * warp + 1, j = 2 * warp;
    float product[2][4] = {}, result[2][4] = {};
    MmaTile(tile(a, i, j), tile(inverse, j, j), lane, product);
    StoreTile(tile(inverse, j, i), product, 1.0f, lane);
    __syncwarp();
    MmaTile(tile(inverse, i, i), tile(inverse, j, i), lane, result);
    StoreTile(tile(inverse, i, j), result, -1.0f, lane);
  } else {
    meanwhile(warp - 2);
  }
  __syncthreads();
  // The lower left 32 x 32 block, a tile a warp: -X' (A' X''), X' and X'' the inverses just made.
  const int i = 2 + warp / 2 % 2, j = warp % 2;
  if (warp < 4) {
    float product[2][4] = {};
    for (int m = j; m < 2; ++m) MmaTile(tile(a, i, m), tile(inverse, m, j), lane, product);
    StoreTile(tile(inverse, j, i), product, 1.0f, lane);
  }
  __syncthreads();
  if (warp < 4) {
    float result[2][4] = {};
    for (int m = 2; m <= i; ++m) MmaTile(tile(inverse, i, m), tile(inverse, j, m), lane, result);
    StoreTile(tile(inverse, i, j), result, -1.0f, lane);
  }
  __syncthreads();
  const float2 scales = *reinterpret_cast<const float2*>(scale + 2 * lane);
#pragma unroll
  for (int i = 0; i < kChunkRows / kPrepareWarps; ++i) {
    const int r = kPrepareWarps * i + warp;
    if (2 * lane < 16 * (i + 1)) {
      const float2 pair = *reinterpret_cast<const float2*>(inverse + r * kTileStride + 2 * lane);
      StorePair(rounded + r * kInverseStride + 2 * lane, PackF16(pair.x * scales.x, pair.y * scales.y));
    }
  }
  __syncthreads();
}

// Scores of the pairs i >= j of 8 rows with one exponential a pair, summed over the warp's channels:
// to[i * i + 2 j] is M_ij, to[i * i + 2 j + 1] (j < i) A_ij without beta.
__device__ __forceinline__ void DiagonalPairs(const float (&q0)[8], const float (&q1)[8], const float (&k0)[8],
                                              const float (&k1)[8], const float (&c0)[8], const float (&c1)[8],
                                              int lane, float* to) {
  float sums[kDiagonalPairs];
#pragma unroll
  for (int i = 0; i < kHalfRows; ++i) {
#pragma unroll
    for (int j = 0; j < kHalfRows; ++j) {
      if (j > i) continue;
      const float x = i == j ? k0[j] : k0[j] * Exp2(c0[i] - c0[j]);
      const float y = i == j ? k1[j] : k1[j] * Exp2(c1[i] - c1[j]);
      sums[i * i + 2 * j] = fmaf(q0[i], x, q1[i] * y);
      if (j < i) sums[i * i + 2 * j + 1] = fmaf(k0[i], x, k1[i] * y);
    }
  }
#pragma unroll
  for (int group = 0; group < kDiagonalPairs / 32; ++group) {
    float values[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) values[i] = sums[32 * group + i];
    WarpSumEach<32>(values, lane);
    to[32 * group + lane] = values[0];
  }
}

}  // namespace k3::cuda
