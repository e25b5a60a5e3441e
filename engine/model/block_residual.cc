#include "engine/model/block_residual.h"

#include <algorithm>

#include "kernels/core/check.h"

namespace k3 {

BlockResidual::BlockResidual(const LayerContext& context, int64_t tokens)
    : context_(context), tokens_(tokens), rows_(tokens) {
  const int64_t shards = context.parallel.tensor_size();
  if (shards == 1) return;
  const int64_t bank_rows = context.workspace.bank_rows;
  sharded_ = tokens > std::min(bank_rows, Workspace::kReplicatedBankTokens);
  if (!sharded_) return;
  part_ = (tokens + shards - 1) / shards;
  K3_CHECK(part_ <= bank_rows);
  first_ = std::min(tokens, part_ * context.parallel.tensor_rank());
  rows_ = std::min(part_, tokens - first_);
}

MatrixView BlockResidual::Sum(const MatrixView& partial) {
  Communicator* group = context_.parallel.tensor;
  const int64_t cols = context_.config.hidden_size;
  if (context_.parallel.tensor_size() == 1) return partial;
  K3_CHECK(partial.ld == cols);
  if (!sharded_) {
    group->AllReduce(partial.data, tokens_ * cols, partial.dtype, context_.stream);
    return partial;
  }
  const MatrixView& sums = context_.workspace.delta_shard;
  group->ReduceScatter(partial.data, sums.data, part_ * cols, partial.dtype, context_.stream);
  return sums.Rows(0, rows_);
}

void BlockResidual::Start(const MatrixView& partial) {
  const MatrixView sums = Sum(partial);
  if (rows_ > 0) context_.ops.CopyMatrix({.from = sums, .to = live()}, context_.stream);
}

MatrixView BlockResidual::live() const {
  const DType act = context_.ops.activation_dtype();
  char* base = static_cast<char*>(context_.workspace.bank) +
               live_block_ * context_.workspace.block_stride * static_cast<int64_t>(SizeOf(act));
  return {base, act, rows_, context_.config.hidden_size, context_.config.hidden_size};
}

void BlockResidual::Next(const MatrixView& partial, const float* mix_query, const float* norm_weight,
                         const MatrixView& all) {
  const MatrixView delta = partial ? Sum(partial) : partial;
  const MatrixView out = sharded_ ? all.Rows(first_, rows_) : all;
  if (rows_ > 0) Mix(delta, mix_query, norm_weight, out);
  if (mix_query != nullptr) restart_ = false;
  if (!sharded_) return;
  // Every rank's block of `all`, padded to equal parts.
  const size_t bytes = static_cast<size_t>(part_ * context_.config.hidden_size) * SizeOf(all.dtype);
  const char* own = static_cast<const char*>(all.data) + bytes * static_cast<size_t>(context_.parallel.tensor_rank());
  context_.parallel.tensor->AllGather(own, all.data, bytes, context_.stream);
}

void BlockResidual::Mix(const MatrixView& delta, const float* mix_query, const float* norm_weight,
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
  mix.rows = rows_;
  mix.cols = config.hidden_size;
  mix.delta = delta;
  mix.restart = restart_;
  mix.query = mix_query;
  mix.mix_eps = config.rms_norm_eps;
  mix.norm_weight = norm_weight;
  mix.norm_eps = config.rms_norm_eps;
  mix.out = out;
  context_.ops.AttnResMix(mix, context_.stream);
}

void BlockResidual::CloseBlock(int32_t layer) {
  if (context_.config.attn_res_block_size == 0 || layer % context_.config.attn_res_block_size != 0) return;
  ++live_block_;
  restart_ = true;
  K3_CHECK(live_block_ < context_.config.num_residual_blocks());
}

}  // namespace k3
