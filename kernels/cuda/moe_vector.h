#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/weights.h"
#include "kernels/op_params.h"

namespace k3::cuda {

// Experts in bf16 for so few tokens that sorting their picks costs more than it saves. `h` is scratch, [tokens, top_k,
// inner] bf16.
bool TakesMoeVector(const Device& device, const MoeExpertsParams& params, const CudaExperts& experts);
void MoeVector(const MoeExpertsParams& params, const CudaExperts& experts, void* h, cudaStream_t queue);

}  // namespace k3::cuda
