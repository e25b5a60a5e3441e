#include "kernels/cuda/moe_vector.cuh"
#include "kernels/cuda/moe_vector.h"

namespace k3::cuda {
namespace {

constexpr int64_t kMostTokens = 2;

template <int kParts, typename Out>
void LaunchDown(const MoeVectorArgs& args, const MoeExpertsParams& p, const CudaExperts& experts, const void* h,
                cudaStream_t queue) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(args.in / 8), static_cast<unsigned>(p.x.rows));
  shape.block = dim3(32 * kMoeVectorDownWarps);
  shape.early = true;
  Launch(&MoeDownVectorKernel<kParts, Out>, shape, queue, "MoeDownVector", args, p.weights, static_cast<const bf16*>(h),
         static_cast<const bf16*>(experts.w2.data()), AsMatrix<Out>(p.out));
}

template <typename Out>
void Down(const MoeVectorArgs& args, const MoeExpertsParams& p, const CudaExperts& experts, const void* h,
          cudaStream_t queue) {
  if (args.top_k <= 2) return LaunchDown<4, Out>(args, p, experts, h, queue);
  if (args.top_k <= 4) return LaunchDown<2, Out>(args, p, experts, h, queue);
  LaunchDown<1, Out>(args, p, experts, h, queue);
}

}  // namespace

bool TakesMoeVector(const Device& device, const MoeExpertsParams& params, const CudaExperts& experts) {
  return device.act == DType::kBF16 && !device.batch_invariant && !params.mxfp8_inputs &&
         params.x.rows <= kMostTokens && experts.count > 0 && experts.form == ExpertForm::kTiled &&
         RowsAligned16(params.x);
}

void MoeVector(const MoeExpertsParams& params, const CudaExperts& experts, void* h, cudaStream_t queue) {
  const MoeVectorArgs args{.ids = params.ids,
                           .top_k = params.top_k,
                           .first = experts.first,
                           .experts = experts.count,
                           .in = static_cast<int>(experts.in),
                           .inner = static_cast<int>(experts.inner)};
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(args.inner / 8), static_cast<unsigned>(params.x.rows * params.top_k));
  shape.block = dim3(32 * kMoeVectorUpWarps);
  Launch(&MoeUpVectorKernel, shape, queue, "MoeUpVector", args, params.activation, AsMatrix<const bf16>(params.x),
         static_cast<const bf16*>(experts.w13.data()), static_cast<bf16*>(h));
  params.out.dtype == DType::kF32 ? Down<float>(args, params, experts, h, queue)
                                  : Down<bf16>(args, params, experts, h, queue);
}

}  // namespace k3::cuda
