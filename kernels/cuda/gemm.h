#pragma once

#include "kernels/cuda/blas.h"
#include "kernels/cuda/device.h"

namespace k3::cuda {

// cuBLASLt, VectorGemm where that is faster, or in batch-invariant mode FixedGemm.
void Gemm(const Device& device, const GemmArgs& args, cudaStream_t queue);

// The same products by kernels that sum over k in an order of their own, which depends on k and on how the operands lie
// in memory only: a row of c depends on its row of a alone, whatever m is.
void FixedGemm(const GemmArgs& args, cudaStream_t queue);

// Products of up to four rows with weights [n, k] in bf16, of the sizes at which it is no slower than cuBLASLt.
bool TakesVectorGemm(const GemmArgs& args);
void VectorGemm(const GemmArgs& args, cudaStream_t queue);
// Two of them at once, of the same m, n, k and out.
void VectorGemmPair(const GemmArgs& first, const GemmArgs& second, cudaStream_t queue);

}  // namespace k3::cuda
