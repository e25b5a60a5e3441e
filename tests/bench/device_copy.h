#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace k3::bench {

// A plain copy kernel, 16 bytes a thread and access: the ceiling that memory-bound kernels are held against. `bytes` is
// a multiple of 16.
void CopyByKernel(void* to, const void* from, int64_t bytes, cudaStream_t queue);

}  // namespace k3::bench
