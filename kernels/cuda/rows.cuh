#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"

// Row copies: embedding lookup and row gathering, one block a row; sums of parts in a fixed order.
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

// See BeginStepParams. Grid (parts of a row, rows of the table; the first row's blocks also do the tokens).
__global__ void BeginStepKernel(BeginStepParams p) {
  const int first = blockIdx.x * blockDim.x + threadIdx.x;
  const int step = gridDim.x * blockDim.x;
  if (blockIdx.y == 0) {
    for (int64_t t = first; t < p.num_tokens; t += step) {
      const int token = p.tokens[t];
      if (token < 0) p.tokens[t] = max(0, p.drawn[-1 - token]);
    }
  }
  if (p.packed_table == nullptr || blockIdx.y >= p.sequences) return;
  const int stride = *p.packed_stride;
  const int* from = p.packed_table + static_cast<int64_t>(blockIdx.y) * stride;
  int* to = p.table + blockIdx.y * p.table_stride;
  for (int i = first; i < stride; i += step) to[i] = from[i];
}

// The same from one rank's share of an embedding table: rows of the other ranks come out as zeros.
template <typename From, typename To>
__global__ void EmbedShareKernel(Matrix<const From> share, int64_t first_id, int64_t rows,
                                 const int32_t* __restrict__ tokens, int cols, Matrix<To> out) {
  const int64_t row = tokens[blockIdx.x] - first_id;
  To* target = out.Row(blockIdx.x);
  const bool mine = row >= 0 && row < rows;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) {
    float value[1] = {0.0f};
    if (mine) LoadFloats<1>(share.Row(row) + c, value);
    StoreFloats<1>(target + c, value);
  }
}

constexpr int kMostTreeParts = 64;

// out[i] = sum of parts, neighbours first (core/tree_sum.h), in fp32 with one rounding. `out` may be the first part.
template <typename T, int Parts>
__global__ void TreeSumKernel(const T* data, int64_t count, T* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    float value[Parts];
#pragma unroll
    for (int j = 0; j < Parts; ++j) value[j] = ToFloat(data[j * count + i]);
#pragma unroll
    for (int stride = 1; stride < Parts; stride *= 2) {
#pragma unroll
      for (int j = 0; j + stride < Parts; j += 2 * stride) value[j] += value[j + stride];
    }
    out[i] = FromFloat<T>(value[0]);
  }
}

// Any number of parts up to kMostTreeParts.
template <typename T>
__global__ void TreeSumAnyKernel(const T* data, int parts, int64_t count, T* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    float value[kMostTreeParts];
    for (int j = 0; j < parts; ++j) value[j] = ToFloat(data[j * count + i]);
    for (int stride = 1; stride < parts; stride *= 2) {
      for (int j = 0; j + stride < parts; j += 2 * stride) value[j] += value[j + stride];
    }
    out[i] = FromFloat<T>(value[0]);
  }
}

}  // namespace k3::cuda
