#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"

// Products of a handful of rows, bound by the weights' way from memory. A warp owns an output column and has
// kSteps * 256 of its weights on their way at once, before it waits for the launch before; the next launch may start
// then. Weights leave the second-level cache first: what follows between two layers, instructions too, stays in it.
// c[r][n] does not depend on the number of rows.
namespace k3::cuda {

constexpr int kVectorThreads = 128;
constexpr int kVectorWarps = kVectorThreads / 32;
constexpr int kVectorMaxRows = 4;
constexpr int kVectorStep = 256;  // inputs of a warp's step, 8 a lane

template <typename Out>
struct VectorProduct {
  Matrix<const bf16> a;        // [m, k]
  Matrix<const bf16> weights;  // [n, k]
  Matrix<Out> c;               // [m, n]
  bool accumulate;
};
template <typename Out>
struct VectorProducts {
  VectorProduct<Out> product[2];
};

// kRows >= m: rows beyond m repeat the last. kWhole: k is a multiple of kSteps steps, so that no load hides behind a
// branch and all of a round are on their way together. Grid (columns / warps, products).
template <int kRows, int kSteps, bool kWhole, typename Out>
__global__ void __launch_bounds__(kVectorThreads)
    VectorGemmKernel(const __grid_constant__ VectorProducts<Out> products, int m, int n, int k) {
  const VectorProduct<Out>& args = products.product[blockIdx.y];
  const int lane = threadIdx.x % 32;
  const int column = blockIdx.x * kVectorWarps + threadIdx.x / 32;
  const bf16* from = args.weights.Row(min(column, n - 1)) + 8 * lane;
  const uint64_t policy = EvictFirstPolicy();
  uint4 w[kSteps];
  const auto fetch = [&](int base) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      w[s] = uint4{0, 0, 0, 0};
      if (kWhole || base + kVectorStep * s + 8 * lane < k) w[s] = LoadHinted16(from + base + kVectorStep * s, policy);
    }
  };
  fetch(0);
  GridDependencyRelease();  // not before: weights of the next launch would come before these
  GridDependencyWait();
  const bf16* a[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) a[r] = args.a.Row(min(r, m - 1)) + 8 * lane;
  float sum[kRows] = {};
  for (int base = 0; base < k; base += kVectorStep * kSteps) {
    if (base > 0) fetch(base);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (!kWhole && base + kVectorStep * s + 8 * lane >= k) continue;
      const uint32_t weight[4] = {w[s].x, w[s].y, w[s].z, w[s].w};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint4 x = *reinterpret_cast<const uint4*>(a[r] + base + kVectorStep * s);
        const uint32_t input[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[r] = fmaf(LowBf16(input[i]), LowBf16(weight[i]), sum[r]);
          sum[r] = fmaf(HighBf16(input[i]), HighBf16(weight[i]), sum[r]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) sum[r] = WarpSum(sum[r]);
  if (column >= n || lane >= m) return;
  float total = sum[0];
#pragma unroll
  for (int r = 1; r < kRows; ++r) total = lane == r ? sum[r] : total;
  Out* to = args.c.Row(lane) + column;
  *to = FromFloat<Out>(args.accumulate ? total + ToFloat(*to) : total);
}

// The same for k <= 8 * kLanes: so many lanes own kShortColumns columns, whose weights are on their way together. Grid
// (columns / those of a block, products).
constexpr int kShortColumns = 4;

template <int kRows, int kLanes, typename Out>
__global__ void __launch_bounds__(kVectorThreads)
    VectorGemmShortKernel(const __grid_constant__ VectorProducts<Out> products, int m, int n, int k) {
  const VectorProduct<Out>& args = products.product[blockIdx.y];
  const int lane = threadIdx.x % kLanes;
  const int first = (blockIdx.x * kVectorThreads + threadIdx.x) / kLanes * kShortColumns;
  const bool holds = 8 * lane < k;
  uint4 w[kShortColumns];
#pragma unroll
  for (int j = 0; j < kShortColumns; ++j) {
    w[j] = LoadStreaming16If(holds, args.weights.Row(min(first + j, n - 1)) + (holds ? 8 * lane : 0));
  }
  GridDependencyRelease();
  GridDependencyWait();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bf16* row = args.a.Row(min(r, m - 1)) + (holds ? 8 * lane : 0);
    const uint4 x = holds ? *reinterpret_cast<const uint4*>(row) : uint4{0, 0, 0, 0};
    const uint32_t input[4] = {x.x, x.y, x.z, x.w};
    float sum[kShortColumns] = {};
#pragma unroll
    for (int j = 0; j < kShortColumns; ++j) {
      const uint32_t weight[4] = {w[j].x, w[j].y, w[j].z, w[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[j] = fmaf(LowBf16(input[i]), LowBf16(weight[i]), sum[j]);
        sum[j] = fmaf(HighBf16(input[i]), HighBf16(weight[i]), sum[j]);
      }
    }
    WarpSumEachStep<kShortColumns, kShortColumns / 2>(sum, lane);  // lane l has column l % kShortColumns
#pragma unroll
    for (int distance = kShortColumns; distance < kLanes; distance *= 2) {
      sum[0] += __shfl_xor_sync(kAllLanes, sum[0], distance);
    }
    if (r < m && lane < kShortColumns && first + lane < n) {
      Out* to = args.c.Row(r) + first + lane;
      *to = FromFloat<Out>(args.accumulate ? sum[0] + ToFloat(*to) : sum[0]);
    }
  }
}

}  // namespace k3::cuda
