#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"

// Row copies: embedding lookup and row gathering. One block a row.
namespace k3::cuda {

// out[i] = from[index[i]], N elements a thread and step.
template <typename From, typename To, int N>
__global__ void CopyRowsKernel(Matrix<const From> from, const int32_t* __restrict__ index, int cols, Matrix<To> out) {
  const From* source = from.Row(index[blockIdx.x]);
  To* target = out.Row(blockIdx.x);
  for (int c = threadIdx.x * N; c < cols; c += blockDim.x * N) {
    float values[N];
    LoadFloats<N>(source + c, values);
    StoreFloats<N>(target + c, values);
  }
}

}  // namespace k3::cuda
