#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/core/dtype.h"

// Element-wise kernels used while weights are made.
namespace k3::cuda {

// to[i] = from[i] for BF16, F16 and F32 in any combination.
void Convert(const void* from, DType from_type, void* to, DType to_type, int64_t count, cudaStream_t queue);
// to[i] = deviation * normal(seed, i); `to_type` BF16 or F32.
void FillNormal(void* to, DType to_type, int64_t count, float deviation, uint64_t seed, cudaStream_t queue);
// to[i] = 8 bits of (seed, i).
void FillBits(uint8_t* to, int64_t count, uint64_t seed, cudaStream_t queue);

// Regroups the eight codes of each word in place, from the order of the checkpoint to that of Mxfp4Nibble.
void RegroupMxfp4(void* words, int64_t count, cudaStream_t queue);

}  // namespace k3::cuda
