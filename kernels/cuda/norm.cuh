#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"

namespace k3::cuda {

// One block a row: stream += delta (rounded and stored back, when kAdd), out = weight * row / sqrt(mean(row^2) + eps).
// With kHeld every thread owns at most one pack, so the row is read once, and its weights before the launch before has
// ended; otherwise the row is read again from L1/L2.
// `out` may be `stream` itself: a thread writes only what it has read.
template <typename T, int N, bool kAdd, bool kHeld>
__global__ void AddRmsNormKernel(Matrix<T> stream, Matrix<const T> delta, const float* __restrict__ weight, float eps,
                                 int cols, Matrix<T> out) {
  float* partial = DynamicShared<float>();  // one a warp
  T* row = stream.Row(blockIdx.x);
  const T* add = kAdd ? delta.Row(blockIdx.x) : nullptr;
  const int packs = cols / N;
  float x[N] = {}, w[N] = {};
  float sum = 0;
  if constexpr (kHeld) {
    if (static_cast<int>(threadIdx.x) < packs) LoadFloats<N>(weight + threadIdx.x * N, w);
  }
  GridDependencyRelease();
  GridDependencyWait();
  for (int p = threadIdx.x; p < packs; p += blockDim.x) {
    LoadFloats<N>(row + p * N, x);
    if constexpr (kAdd) {
      float d[N];
      LoadFloats<N>(add + p * N, d);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = Rounded<T>(x[i] + d[i]);
      StoreFloats<N>(row + p * N, x);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) sum = fmaf(x[i], x[i], sum);
  }
  const float scale = rsqrtf(BlockSum(sum, partial) / cols + eps);
  for (int p = threadIdx.x; p < packs; p += blockDim.x) {
    if constexpr (!kHeld) {
      LoadFloats<N>(row + p * N, x);
      LoadFloats<N>(weight + p * N, w);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = x[i] * scale * w[i];
    StoreFloats<N>(out.Row(blockIdx.x) + p * N, x);
  }
}

}  // namespace k3::cuda
