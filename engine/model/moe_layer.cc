#include "engine/model/moe_layer.h"

#include "engine/expert_balance.h"
#include "engine/model/expert_parallel.h"
#include "engine/model/mlp_layer.h"

namespace k3 {
namespace {

// Steps of so few tokens leave most of a device idle between two waits for memory: there the first half of the shared
// experts runs beside the router and the routed experts. Larger ones fill it.
constexpr int64_t kBesideTokens = 64;

}  // namespace

void RunMoeLayer(const LayerContext& context, const MoeWeights& weights, int32_t moe_layer, const MatrixView& x,
                 const MatrixView& out) {
  const ModelConfig& config = context.config;
  Ops& ops = context.ops;
  Workspace& ws = context.workspace;
  const int64_t tokens = x.rows;

  Stream side = context.stream;
  MatrixView shared;
  if (weights.shared.gate_up != nullptr) {
    if (tokens <= kBesideTokens) side = ops.Fork(context.stream);
    shared = ActivateMlp(context, weights.shared, x, side);
  }

  const MatrixView logits = ws.router_logits.Rows(0, tokens);
  ops.Linear({.x = x, .weight = weights.router.get(), .y = logits}, context.stream);
  RouterTopKParams router;
  router.logits = logits.as<float>();
  router.tokens = tokens;
  router.experts = config.num_experts;
  router.top_k = config.num_experts_per_token;
  router.groups = config.num_expert_group;
  router.topk_group = config.topk_group;
  router.bias = weights.router_bias;
  router.score = config.router_score;
  router.renormalize = config.moe_renormalize && config.num_experts_per_token > 1;  // one weight would become 1
  router.biased_weights = config.biased_router_weights;
  router.scale = config.routed_scaling_factor;
  router.forced_ids = context.probe != nullptr ? context.probe->ForcedIds(moe_layer) : nullptr;
  router.live_tokens = context.batch.live_tokens;
  router.ids = ws.expert_ids;
  router.weights = ws.expert_weights;
  RouterBalance balance;
  if (context.balance != nullptr) {
    balance = context.balance->Layer(moe_layer, context.batch);
    router.balance = &balance;
  }
  ops.RouterTopK(router, context.stream);
  if (balance.candidates != nullptr) {
    const BalanceOptions& options = context.balance->options();
    ops.RouterSoftCap({.balance = &balance,
                       .tokens = tokens,
                       .experts = router.experts,
                       .top_k = router.top_k,
                       .factor = static_cast<float>(*options.soft_cap),
                       .tau = static_cast<float>(options.soft_cap_tau),
                       .renormalize = router.renormalize,
                       .scale = router.scale,
                       .live_tokens = router.live_tokens,
                       .ids = router.ids,
                       .weights = router.weights},
                      context.stream);
  }
  if (context.probe != nullptr) context.probe->OnRouted(moe_layer, ws.expert_ids, tokens);

  MatrixView expert_in = x;
  if (weights.latent_down != nullptr) {
    expert_in = ws.expert_in.Rows(0, tokens);
    ops.Linear({.x = x, .weight = weights.latent_down.get(), .y = expert_in}, context.stream);
  }
  // The sum over experts goes straight to `out` unless it still has to come back from the latent width.
  const MatrixView expert_out = weights.latent_up != nullptr ? ws.expert_out.Rows(0, tokens) : out;
  RunExperts(context, weights, expert_in, expert_out);
  if (weights.latent_up != nullptr) {
    if (context.parallel.tensor_size() > 1) {
      // The norm needs the whole sum.
      context.parallel.tensor->AllReduce(expert_out.data, tokens * expert_out.ld, expert_out.dtype, context.stream);
    }
    if (weights.latent_norm != nullptr) {
      ops.RmsNorm({.x = expert_out, .weight = weights.latent_norm, .eps = config.rms_norm_eps, .out = expert_out},
                  context.stream);
    }
    // A rank multiplies its columns of the latent: one more partial sum of `out`.
    const int64_t share = weights.latent_up->in;
    const MatrixView latent = expert_out.Columns(context.parallel.tensor_rank() * share, share);
    ops.Linear({.x = latent, .weight = weights.latent_up.get(), .y = out}, context.stream);
  }
  if (side != context.stream) ops.Join(side, context.stream);
  if (shared) {
    ops.Linear({.x = shared, .weight = weights.shared.down.get(), .y = out, .accumulate = true}, context.stream);
  }
}

void LendExperts(const LayerContext& context, const MoeWeights& weights) {
  Workspace& ws = context.workspace;
  const MatrixView in = weights.latent_down != nullptr ? ws.expert_in : ws.hidden;
  const MatrixView out = weights.latent_up != nullptr ? ws.expert_out : ws.sublayer_out;
  RunExperts(context, weights, in.Rows(0, 0), out.Rows(0, 0));
}

}  // namespace k3
