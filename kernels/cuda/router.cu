#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/op_table.h"
#include "kernels/cuda/router.cuh"

namespace k3::cuda {
namespace {

constexpr int kRouterHeld = 8;  // experts of a lane that stay in registers

}  // namespace

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
  shape.early = true;
  K3_REQUIRE(shape.shared <= device.shared_per_block, "too many experts: " + std::to_string(params.experts));
  if (params.balance == nullptr) {
    if (params.experts <= 32 * kRouterHeld && params.topk_group == params.groups) {
      return Launch(&RouterHeldKernel<kRouterHeld>, shape, queue, "RouterTopK", params);
    }
    return Launch(&RouterTopKKernel<false>, shape, queue, "RouterTopK", params, RouterBalance());
  }
  const RouterBalance& balance = *params.balance;
  K3_REQUIRE(balance.delta != nullptr && balance.slot_of_sequence != nullptr && balance.sequence_of_token != nullptr &&
                 balance.margins != nullptr && balance.load != nullptr && balance.sums != nullptr,
             "a pointer of the balance is null");
  K3_REQUIRE(balance.groups >= 1 && balance.groups <= params.experts && balance.observe_every >= 1,
             std::to_string(params.experts) + " experts cannot be balanced over " + std::to_string(balance.groups) +
                 " ranks, counting every " + std::to_string(balance.observe_every));
  K3_REQUIRE(2 * params.top_k <= kRouterMaxTopK, "balance needs twice top_k candidates, at most " +
                                                     std::to_string(kRouterMaxTopK) + ", top_k is " +
                                                     std::to_string(params.top_k));
  Launch(&RouterTopKKernel<true>, shape, queue, "RouterTopK", params, balance);
}

void RouterSoftCap(const Device& device, const RouterSoftCapParams& params, cudaStream_t queue) {
  if (params.tokens == 0) return;
  K3_REQUIRE(params.balance != nullptr && params.ids != nullptr && params.weights != nullptr,
             "balance, ids or weights is null");
  const RouterBalance& balance = *params.balance;
  K3_REQUIRE(balance.candidates != nullptr && balance.candidate_values != nullptr &&
                 balance.candidate_scores != nullptr && balance.load != nullptr && balance.sums != nullptr,
             "the balance has no candidates");
  K3_REQUIRE(params.factor >= 1 && params.tau >= 0, "factor must be at least 1 and tau at least 0, they are " +
                                                        std::to_string(params.factor) + " and " +
                                                        std::to_string(params.tau));
  K3_REQUIRE(2 * params.top_k <= kRouterMaxTopK, "top_k is " + std::to_string(params.top_k));
  LaunchShape shape;
  shape.grid = dim3(1);
  shape.block = dim3(32);
  shape.shared = static_cast<size_t>(balance.groups) * 2 * sizeof(uint32_t);
  K3_REQUIRE(shape.shared <= device.shared_per_block, "too many ranks: " + std::to_string(balance.groups));
  Launch(&RouterSoftCapKernel, shape, queue, "RouterSoftCap", params, balance);
}

}  // namespace k3::cuda
