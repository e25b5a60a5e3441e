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

struct Mxfp4ScalesFound {
  int rare;   // 1: some are none of those that Mxfp4ScaleIsCommon names
  int large;  // 1: Mxfp4ScaleIsLarge
};

// Codes [count, cols / 2] and scales [count, cols / 32] of the checkpoint to the order of mxfp4_layout.h; count is a
// multiple of 16, cols of 32. What is found of scales is set in *found, on the device, and nothing else.
void RepackMxfp4(const void* rows, const void* scales, int64_t count, int64_t cols, void* to, void* to_scales,
                 Mxfp4ScalesFound* found, cudaStream_t queue);

// bf16 [rows, cols] to the order of weight_tiles.h; cols is a multiple of 8.
void TileWeights(const void* from, int64_t rows, int64_t cols, void* to, cudaStream_t queue);

}  // namespace k3::cuda
