#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/op_params.h"

// Rows to the ranks of their experts and back: see PackSlotsParams and SumSlotsParams.
namespace k3::cuda {

constexpr int kAssignThreads = 512;
constexpr int kMostPeers = 64;

// Which slot each row gets in a peer's block, and how many are used. One block a peer.
__global__ void __launch_bounds__(kAssignThreads) AssignSlotsKernel(PackSlotsParams p, int64_t tokens) {
  int* warp_count = DynamicShared<int>();  // [kAssignThreads / 32]
  const int64_t part = p.first_part + static_cast<int64_t>(blockIdx.x);
  const int first = static_cast<int>(p.experts * part / p.parts);
  const int end = static_cast<int>(p.experts * (part + 1) / p.parts);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t* slots = p.slots + blockIdx.x * p.rows;
  int used = 0;
  for (int64_t begin = 0; begin < tokens; begin += kAssignThreads) {
    const int64_t t = begin + threadIdx.x;
    bool chosen = false;
    for (int j = 0; t < tokens && j < p.top_k; ++j) {
      const int id = p.ids[t * p.top_k + j];
      chosen = chosen || (id >= first && id < end);
    }
    const unsigned vote = __ballot_sync(kAllLanes, chosen);
    if (lane == 0) warp_count[warp] = __popc(vote);
    __syncthreads();
    int before = 0, total = 0;
    for (int w = 0; w < kAssignThreads / 32; ++w) {
      if (w < warp) before += warp_count[w];
      total += warp_count[w];
    }
    if (t < tokens) slots[t] = chosen ? used + before + __popc(vote & ((1u << lane) - 1)) : -1;
    used += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) p.counts[blockIdx.x] = used;
}

// Copies row blockIdx.x to its slot of peer blockIdx.y, and empties the slot of that number where it is not used. W:
// elements a thread and step.
template <typename T, int N>
__global__ void FillSlotsKernel(PackSlotsParams p, Matrix<const T> x, Matrix<T> out, int64_t tokens) {
  const int64_t row = blockIdx.x;
  const int64_t block = blockIdx.y * p.rows;
  const int slot = row < tokens ? p.slots[block + row] : -1;
  if (slot >= 0) {
    const T* from = x.Row(row);
    T* to = out.Row(block + slot);
    for (int c = threadIdx.x * N; c < p.x.cols; c += blockDim.x * N) {
      *reinterpret_cast<Pack<T, N>*>(to + c) = *reinterpret_cast<const Pack<T, N>*>(from + c);
    }
    for (int j = threadIdx.x; j < p.top_k; j += blockDim.x) {
      p.out_ids[(block + slot) * p.top_k + j] = p.ids[row * p.top_k + j];
      p.out_weights[(block + slot) * p.top_k + j] = p.weights[row * p.top_k + j];
    }
  }
  if (row < p.counts[blockIdx.y]) return;
  for (int j = threadIdx.x; j < p.top_k; j += blockDim.x) p.out_ids[(block + row) * p.top_k + j] = -1;
}

// Row blockIdx.x summed over up to Most peers, neighbours first, in fp32 with one rounding.
template <typename T, int Most>
__global__ void SumSlotsKernel(SumSlotsParams p, Matrix<T> out) {
  int* slot = DynamicShared<int>();  // [peers]
  const int64_t row = blockIdx.x;
  if (threadIdx.x < p.peers) slot[threadIdx.x] = p.slots[threadIdx.x * p.rows + row];
  __syncthreads();
  const int64_t width = p.out.cols;
  const T* data = static_cast<const T*>(p.data);
  for (int64_t c = threadIdx.x; c < width; c += blockDim.x) {
    float value[Most];
#pragma unroll
    for (int j = 0; j < Most; ++j) {
      const bool there = j < p.peers && slot[j] >= 0;
      value[j] = there ? ToFloat(data[(j * p.rows + slot[j]) * width + c]) : 0.0f;
    }
#pragma unroll
    for (int stride = 1; stride < Most; stride *= 2) {
#pragma unroll
      for (int j = 0; j + stride < Most; j += 2 * stride) value[j] += value[j + stride];
    }
    out.Row(row)[c] = FromFloat<T>(value[0]);
  }
}

}  // namespace k3::cuda
