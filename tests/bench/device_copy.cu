#include "kernels/cuda/launch.cuh"
#include "tests/bench/device_copy.h"

namespace k3::bench {
namespace {

__global__ void CopyKernel(uint4* to, const uint4* from, int64_t count) {
  constexpr int kEach = 4;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x * kEach + threadIdx.x;
  uint4 values[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (first + i * blockDim.x < count) values[i] = from[first + i * blockDim.x];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (first + i * blockDim.x < count) to[first + i * blockDim.x] = values[i];
  }
}

}  // namespace

void CopyByKernel(void* to, const void* from, int64_t bytes, cudaStream_t queue) {
  const int64_t count = bytes / 16;
  cuda::Launch(&CopyKernel, {.grid = dim3(static_cast<unsigned>(cuda::CeilDiv(count, 1024))), .block = dim3(256)},
               queue, "CopyKernel", static_cast<uint4*>(to), static_cast<const uint4*>(from), count);
}

}  // namespace k3::bench
