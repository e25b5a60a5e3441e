#include "engine/model/block_residual.h"

#include "kernels/core/check.h"

namespace k3 {

BlockResidual::BlockResidual(const LayerContext& context, int64_t tokens) : context_(context), tokens_(tokens) {}

MatrixView BlockResidual::live() const {
  const DType act = context_.ops.activation_dtype();
  char* base = static_cast<char*>(context_.workspace.bank) +
               live_block_ * context_.workspace.block_stride * static_cast<int64_t>(SizeOf(act));
  return {base, act, tokens_, context_.config.hidden_size, context_.config.hidden_size};
}

void BlockResidual::Next(const MatrixView& delta, const float* mix_query, const float* norm_weight,
                         const MatrixView& out) {
  const ModelConfig& config = context_.config;
  if (mix_query == nullptr) {
    context_.ops.AddRmsNorm(
        {.stream = live(), .delta = delta, .weight = norm_weight, .eps = config.rms_norm_eps, .out = out},
        context_.stream);
    return;
  }
  AttnResMixParams mix;
  mix.bank = context_.workspace.bank;
  mix.block_stride = context_.workspace.block_stride;
  mix.live_block = live_block_;
  mix.rows = tokens_;
  mix.cols = config.hidden_size;
  mix.delta = delta;
  mix.restart = restart_;
  mix.query = mix_query;
  mix.mix_eps = config.rms_norm_eps;
  mix.norm_weight = norm_weight;
  mix.norm_eps = config.rms_norm_eps;
  mix.out = out;
  context_.ops.AttnResMix(mix, context_.stream);
  restart_ = false;
}

void BlockResidual::CloseBlock(int32_t layer) {
  if (context_.config.attn_res_block_size == 0 || layer % context_.config.attn_res_block_size != 0) return;
  ++live_block_;
  restart_ = true;
  K3_CHECK(live_block_ < context_.config.num_residual_blocks());
}

}  // namespace k3
