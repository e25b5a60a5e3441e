#include "engine/model/mla_layer.h"

#include <cmath>

namespace k3 {

void RunMlaLayer(const LayerContext& context, const MlaWeights& weights, int32_t mla_layer, const MatrixView& x,
                 const MatrixView& out) {
  const ModelConfig& config = context.config;
  Ops& ops = context.ops;
  Workspace& ws = context.workspace;
  const int64_t tokens = x.rows;
  const int64_t heads = config.num_attention_heads;
  const int64_t query_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim);

  // One product for all that reads x: q_a (or q) | kv_a | gate.
  const MatrixView projected = ws.projected.Rows(0, tokens).Columns(0, weights.in_proj->out);
  ops.Linear({.x = x, .weight = weights.in_proj.get(), .y = projected}, context.stream);
  const int64_t q_width = config.q_lora_rank > 0 ? config.q_lora_rank : query_width;
  MatrixView q = projected.Columns(0, q_width);
  const MatrixView kv_a = projected.Columns(q_width, config.latent_line_elements());
  MatrixView gate;
  if (config.mla_use_output_gate) {
    gate = projected.Columns(q_width + config.latent_line_elements(), heads * config.v_head_dim);
  }
  if (config.q_lora_rank > 0) {
    const MatrixView q_latent = ws.q_latent.Rows(0, tokens);
    ops.RmsNorm({.x = q, .weight = weights.q_a_norm, .eps = config.latent_norm_eps, .out = q_latent}, context.stream);
    q = ws.q.Rows(0, tokens);
    ops.Linear({.x = q_latent, .weight = weights.q_b_proj.get(), .y = q}, context.stream);
  }

  const MlaPages pages = context.cache.Pages(mla_layer);
  ops.MlaAppend({.batch = &context.batch,
                 .kv_a = kv_a,
                 .norm_weight = weights.kv_a_norm,
                 .norm_eps = config.latent_norm_eps,
                 .latent_dim = config.kv_lora_rank,
                 .rope_dim = config.qk_rope_head_dim,
                 .pages = pages},
                context.stream);
  const MatrixView attended = ws.attention_out.Rows(0, tokens).Columns(0, heads * config.v_head_dim);
  ops.MlaAttention({.batch = &context.batch,
                    .heads = config.num_attention_heads,
                    .nope_dim = config.qk_nope_head_dim,
                    .rope_dim = config.qk_rope_head_dim,
                    .latent_dim = config.kv_lora_rank,
                    .value_dim = config.v_head_dim,
                    .q = q,
                    .projection = weights.kv_b.get(),
                    .gate = gate,
                    .scale = 1.0f / std::sqrt(static_cast<float>(config.qk_nope_head_dim + config.qk_rope_head_dim)),
                    .pages = pages,
                    .out = attended,
                    .scratch = ws.scratch},
                   context.stream);
  ops.Linear({.x = attended, .weight = weights.o_proj.get(), .y = out}, context.stream);
}

}  // namespace k3
