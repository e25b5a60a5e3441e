#include "engine/model/model.h"

#include "engine/model/block_residual.h"
#include "engine/model/kda_layer.h"
#include "engine/model/mla_layer.h"
#include "engine/model/mlp_layer.h"
#include "engine/model/moe_layer.h"
#include "kernels/core/check.h"

namespace k3 {

MatrixView Model::Forward(const SequenceBatch& batch, const int32_t* tokens, Workspace& workspace, CacheStorage& cache,
                          RoutingProbe* probe) const {
  const LayerContext context{config_, ops_, ops_.stream(), batch, workspace, cache, probe};
  const int64_t count = batch.num_tokens;
  K3_CHECK(count > 0 && count <= workspace.bounds().tokens && batch.num_sequences <= workspace.bounds().sequences);

  BlockResidual residual(context, count);
  const MatrixView hidden = workspace.hidden.Rows(0, count);
  const MatrixView out = workspace.sublayer_out.Rows(0, count);
  MatrixView delta;  // output of the sublayer before, not yet in the residual; absent before layer 0

  ops_.Embed({.tokens = tokens, .table = weights_.embedding, .out = residual.live()}, context.stream);
  int32_t kda_layer = 0, mla_layer = 0, moe_layer = 0;
  for (int32_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const LayerWeights& weights = weights_.layers[layer];

    residual.Next(delta, weights.attention_mix_query, weights.input_norm, hidden);
    residual.CloseBlock(layer);
    if (weights.kda != nullptr) {
      RunKdaLayer(context, *weights.kda, kda_layer++, hidden, out);
    } else {
      RunMlaLayer(context, *weights.mla, mla_layer++, hidden, out);
    }
    delta = out;

    residual.Next(delta, weights.mlp_mix_query, weights.post_attention_norm, hidden);
    if (weights.moe != nullptr) {
      RunMoeLayer(context, *weights.moe, moe_layer++, hidden, out);
    } else {
      RunMlpLayer(context, *weights.mlp, hidden, out);
    }
  }
  residual.Next(delta, weights_.output_mix_query, weights_.final_norm, hidden);
  return hidden;
}

MatrixView Model::Logits(const MatrixView& hidden, const int32_t* rows, int64_t count, Workspace& workspace) const {
  K3_CHECK(count > 0 && count <= workspace.bounds().logits_rows);
  const MatrixView head_in = workspace.head_in.Rows(0, count);
  const MatrixView logits = workspace.logits.Rows(0, count);
  ops_.GatherRows({.x = hidden, .row = rows, .out = head_in}, ops_.stream());
  ops_.Linear({.x = head_in, .weight = weights_.lm_head.get(), .y = logits}, ops_.stream());
  return logits;
}

}  // namespace k3
