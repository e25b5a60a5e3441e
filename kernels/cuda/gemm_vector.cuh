#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"

// Products of a handful of rows, bound by the weights' way from memory. A warp owns an output column and has
// kSteps * 256 of its weights on their way at once. c[r][n] does not depend on the number of rows.
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
  uint4 w[kSteps];
  const auto fetch = [&](int base) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      w[s] = uint4{0, 0, 0, 0};
      if (kWhole || base + kVectorStep * s + 8 * lane < k) w[s] = LoadStreaming16(from + base + kVectorStep * s);
    }
  };
  fetch(0);
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

}  // namespace k3::cuda
