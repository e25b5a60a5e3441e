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

// See BeginStepParams.
__global__ void BeginStepKernel(BeginStepParams p) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t t = first; t < p.num_tokens; t += step) {
    const int token = p.tokens[t];
    if (token < 0) p.tokens[t] = max(0, p.drawn[-1 - token]);
  }
  if (p.packed_table == nullptr) return;
  const int64_t stride = *p.packed_stride;
  for (int64_t i = first; i < p.sequences * stride; i += step) {
    p.table[i / stride * p.table_stride + i % stride] = p.packed_table[i];
  }
}

}  // namespace k3::cuda
