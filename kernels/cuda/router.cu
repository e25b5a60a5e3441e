#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/op_table.h"
#include "kernels/cuda/router.cuh"

namespace k3::cuda {

void RouterTopK(const Device& device, const RouterTopKParams& params, cudaStream_t queue) {
  if (params.tokens == 0) return;
  K3_REQUIRE(params.logits != nullptr && params.ids != nullptr && params.weights != nullptr,
             "logits, ids or weights is null");
  K3_REQUIRE(params.top_k >= 1 && params.top_k <= std::min(params.experts, kRouterMaxTopK),
             "top_k must be in [1, min(experts, " + std::to_string(kRouterMaxTopK) + ")], is " +
                 std::to_string(params.top_k) + " of " + std::to_string(params.experts) + " experts");
  K3_REQUIRE(params.groups >= 1 && params.groups <= kRouterMaxGroups && params.experts % params.groups == 0 &&
                 params.topk_group >= 1 && params.topk_group <= params.groups,
             "groups " + std::to_string(params.groups) + " and topk_group " + std::to_string(params.topk_group) +
                 " do not fit " + std::to_string(params.experts) + " experts");
  K3_REQUIRE(params.forced_ids != nullptr || params.topk_group * (params.experts / params.groups) >= params.top_k,
             "top_k = " + std::to_string(params.top_k) + " experts do not fit into " +
                 std::to_string(params.topk_group) + " of " + std::to_string(params.groups) + " groups of " +
                 std::to_string(params.experts) + " experts");
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(params.tokens, kRouterWarps)));
  shape.block = dim3(32 * kRouterWarps);
  shape.shared = static_cast<size_t>(kRouterWarps) * 2 * params.experts * sizeof(float);
  K3_REQUIRE(shape.shared <= device.shared_per_block, "too many experts: " + std::to_string(params.experts));
  Launch(&RouterTopKKernel, shape, queue, "RouterTopK", params);
}

}  // namespace k3::cuda
