#include "engine/model/kda_layer.h"

namespace k3 {

void RunKdaLayer(const LayerContext& context, const KdaWeights& weights, int32_t kda_layer, const MatrixView& x,
                 const MatrixView& out) {
  const ModelConfig& config = context.config;
  Ops& ops = context.ops;
  Workspace& ws = context.workspace;
  const int64_t tokens = x.rows;
  const int64_t channels = config.kda_channels();
  const int64_t head_dim = config.kda_head_dim;

  // One product for all that reads x: q | k | v | f_a | b | gate (full rank) or g_a.
  const MatrixView projected = ws.projected.Rows(0, tokens).Columns(0, weights.in_proj->out);
  ops.Linear({.x = x, .weight = weights.in_proj.get(), .y = projected}, context.stream);
  const MatrixView qkv = projected.Columns(0, 3 * channels);
  const MatrixView f_a = projected.Columns(3 * channels, head_dim);
  const MatrixView beta = projected.Columns(3 * channels + head_dim, config.kda_heads);
  const int64_t gate_begin = 3 * channels + head_dim + config.kda_heads;

  const MatrixView decay = ws.decay.Rows(0, tokens);
  const LinearParams to_decay{.x = f_a, .weight = weights.f_b_proj.get(), .y = decay};
  MatrixView gate;
  if (config.use_full_rank_gate) {
    gate = projected.Columns(gate_begin, channels);
    ops.Linear(to_decay, context.stream);
  } else {
    gate = ws.low_rank_gate.Rows(0, tokens);
    const MatrixView g_a = projected.Columns(gate_begin, head_dim);
    ops.LinearPair(to_decay, {.x = g_a, .weight = weights.g_b_proj.get(), .y = gate}, context.stream);
  }

  const MatrixView mixed = ws.attention_out.Rows(0, tokens).Columns(0, channels);
  KdaParams kda;
  kda.batch = &context.batch;
  kda.heads = config.kda_heads;
  kda.head_dim = config.kda_head_dim;
  kda.conv_width = config.conv_width;
  kda.qkv = qkv;
  kda.decay = decay;
  kda.beta = beta;
  kda.gate = gate;
  kda.conv_taps = weights.conv_taps;
  kda.dt_bias = weights.dt_bias;
  kda.a_log = weights.a_log;
  kda.norm_weight = weights.o_norm;
  kda.gate_kind = config.kda_gate;
  kda.gate_lower_bound = config.gate_lower_bound;
  kda.norm_eps = config.rms_norm_eps;
  kda.state = context.cache.State(kda_layer);
  kda.conv_state = context.cache.ConvState(kda_layer);
  kda.slot_stride = context.cache.slot_stride();
  kda.state_dtype = context.cache.geometry().state_dtype;
  kda.slots_settled = true;  // queued last was a product
  kda.out = mixed;
  kda.scratch = ws.scratch;
  ops.Kda(kda, context.stream);

  ops.Linear({.x = mixed, .weight = weights.o_proj.get(), .y = out}, context.stream);
}

}  // namespace k3
