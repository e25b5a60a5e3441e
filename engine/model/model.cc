#include "engine/model/model.h"

#include <algorithm>

#include "engine/model/block_residual.h"
#include "engine/model/kda_layer.h"
#include "engine/model/mla_layer.h"
#include "engine/model/mlp_layer.h"
#include "engine/model/moe_layer.h"
#include "kernels/core/check.h"

namespace k3 {

Model::Model(const ModelConfig& config, const Weights& weights, Ops& ops, const ParallelContext& parallel)
    : config_(config), weights_(weights), ops_(ops), parallel_(parallel) {
  for (const LayerWeights& layer : weights.layers) {
    mix_queries_.push_back(layer.attention_mix_query);
    mix_queries_.push_back(layer.mlp_mix_query);
  }
  mix_queries_.push_back(weights.output_mix_query);
}

WorkspaceRanks Model::workspace_ranks() const {
  WorkspaceRanks ranks =
      WorkspaceRanks::Of({.tensor = parallel_.tensor_size(), .data = parallel_.data_size()}, parallel_.transport);
  for (const LayerWeights& layer : weights_.layers) {
    if (layer.moe != nullptr) ranks.expert_leaves = static_cast<int64_t>(layer.moe->experts.size());
  }
  return ranks;
}

MatrixView Model::Forward(const SequenceBatch& batch, const int32_t* tokens, Workspace& workspace, CacheStorage& cache,
                          RoutingProbe* probe, int64_t dispatch_rows, const ExpertBalance* balance) const {
  const int64_t count = batch.num_tokens;
  const int64_t rows = std::max(count, dispatch_rows);
  const LayerContext context{config_, ops_, ops_.stream(), batch, workspace, cache, parallel_, probe, balance, rows};
  K3_CHECK(rows > 0 && rows <= workspace.bounds().tokens && batch.num_sequences <= workspace.bounds().sequences);
  if (count == 0) {
    // Only the experts are shared between groups.
    K3_CHECK(parallel_.data_size() > 1);
    for (const LayerWeights& weights : weights_.layers) {
      if (weights.moe != nullptr) LendExperts(context, *weights.moe);
    }
    return workspace.hidden.Rows(0, 0);
  }

  BlockResidual residual(context, count, mix_queries_);
  const MatrixView hidden = workspace.hidden.Rows(0, count);
  const MatrixView out = workspace.sublayer_out.Rows(0, count);
  MatrixView delta;  // output of the sublayer before, not yet in the residual; absent before layer 0

  if (parallel_.tensor_size() > 1) {
    ops_.Embed({.tokens = tokens,
                .table = weights_.embedding,
                .out = out,
                .is_share = true,
                .first_id = parallel_.tensor_rank() * weights_.embedding.rows},
               context.stream);
    residual.Start(out);
  } else {
    ops_.Embed({.tokens = tokens, .table = weights_.embedding, .out = residual.live()}, context.stream);
  }
  int32_t kda_layer = 0, mla_layer = 0, moe_layer = 0;
  for (int32_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const LayerWeights& weights = weights_.layers[layer];

    residual.Next(delta, weights.input_norm, hidden);
    residual.CloseBlock(layer);
    if (weights.kda != nullptr) {
      RunKdaLayer(context, *weights.kda, kda_layer++, hidden, out);
    } else {
      RunMlaLayer(context, *weights.mla, mla_layer++, hidden, out);
    }
    delta = out;

    residual.Next(delta, weights.post_attention_norm, hidden);
    if (weights.moe != nullptr) {
      RunMoeLayer(context, *weights.moe, moe_layer++, hidden, out);
    } else {
      RunMlpLayer(context, *weights.mlp, hidden, out);
    }
  }
  residual.Next(delta, weights_.final_norm, hidden);
  return hidden;
}

MatrixView Model::Logits(const MatrixView& hidden, const int32_t* rows, int64_t count, Workspace& workspace) const {
  K3_CHECK(count > 0 && count <= workspace.bounds().logits_rows);
  const MatrixView head_in = workspace.head_in.Rows(0, count);
  const MatrixView logits = workspace.logits.Rows(0, count);
  ops_.GatherRows({.x = hidden, .row = rows, .out = head_in}, ops_.stream());
  if (parallel_.tensor_size() == 1) {
    ops_.Linear({.x = head_in, .weight = weights_.lm_head.get(), .y = logits}, ops_.stream());
    return logits;
  }
  // [rank][R, share of V], then each rank's columns to their place.
  const int64_t share = weights_.lm_head->out;
  const auto part = [&](int32_t rank) {
    float* data = workspace.gathered_logits.as<float>() + rank * count * share;
    return MatrixView{data, DType::kF32, count, share, share};
  };
  const MatrixView own = part(parallel_.tensor_rank());
  ops_.Linear({.x = head_in, .weight = weights_.lm_head.get(), .y = own}, ops_.stream());
  parallel_.tensor->AllGather(own.data, workspace.gathered_logits.data,
                              static_cast<size_t>(count * share) * sizeof(float), ops_.stream());
  for (int32_t rank = 0; rank < parallel_.tensor_size(); ++rank) {
    ops_.CopyMatrix({.from = part(rank), .to = logits.Columns(rank * share, share)}, ops_.stream());
  }
  return logits;
}

}  // namespace k3
