#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/memory.h"
#include "kernels/op_params.h"
#include "kernels/ops.h"

// The ops as free functions, one source file each: host-side checks, choice of variant, launch on `queue`. None
// synchronizes or allocates, so all may run under graph capture.
namespace k3::cuda {

void BeginStep(const Device& device, const BeginStepParams& params, cudaStream_t queue);
void Embed(const Device& device, const EmbedParams& params, cudaStream_t queue);
std::unique_ptr<LinearWeight> MakeLinear(const Device& device, Uploader& uploader, std::span<const HostTensor> parts);
void Linear(const Device& device, const LinearParams& params, cudaStream_t queue);
void LinearPair(const Device& device, const LinearParams& first, const LinearParams& second, cudaStream_t queue);
void GatherRows(const Device& device, const GatherRowsParams& params, cudaStream_t queue);
void CopyMatrix(const Device& device, const CopyMatrixParams& params, cudaStream_t queue);
void TreeSum(const Device& device, const TreeSumParams& params, cudaStream_t queue);
void PackSlots(const Device& device, const PackSlotsParams& params, cudaStream_t queue);
void SumSlots(const Device& device, const SumSlotsParams& params, cudaStream_t queue);
void GatedActivation(const Device& device, const GatedActivationParams& params, cudaStream_t queue);
void CheckActivation(const ActivationSpec& spec);
void RouterTopK(const Device& device, const RouterTopKParams& params, cudaStream_t queue);
void RouterSoftCap(const Device& device, const RouterSoftCapParams& params, cudaStream_t queue);
size_t KdaScratchBytes(const Device& device, int64_t tokens, int32_t heads, int32_t head_dim);
void Kda(const Device& device, const KdaParams& params, cudaStream_t queue);
std::unique_ptr<LatentProjection> MakeLatentProjection(const Device& device, Uploader& uploader, const HostTensor& kv_b,
                                                       int32_t heads, int32_t nope_dim, int32_t value_dim);
size_t MlaScratchBytes(const Device& device, int64_t tokens, int64_t heads, int64_t latent_dim, int64_t max_context);
void MlaAppend(const Device& device, const MlaAppendParams& params, cudaStream_t queue);
void MlaAttention(const Device& device, const MlaAttentionParams& params, cudaStream_t queue);
size_t MoeScratchBytes(const Device& device, int64_t tokens, int32_t top_k, int32_t experts, int64_t in, int64_t inner);
void MoeExperts(const Device& device, const MoeExpertsParams& params, cudaStream_t queue);
size_t SampleScratchBytes();
void Sample(const Device& device, const SampleParams& params, cudaStream_t queue);
void RmsNorm(const Device& device, const RmsNormParams& params, cudaStream_t queue);
void AddRmsNorm(const Device& device, const AddRmsNormParams& params, cudaStream_t queue);
void AttnResMix(const Device& device, const AttnResMixParams& params, cudaStream_t queue);
void AttnResClosed(const Device& device, const AttnResClosedParams& params, cudaStream_t queue);
// AttnResMix with mixes, which has checked the parameters.
void AttnResJoin(const Device& device, const AttnResMixParams& params, cudaStream_t queue);

}  // namespace k3::cuda
