#include "engine/model/block_residual.h"

#include <algorithm>

#include "kernels/core/check.h"

namespace k3 {

BlockResidual::BlockResidual(const LayerContext& context, int64_t tokens, std::span<const float* const> queries)
    : context_(context), tokens_(tokens), queries_(queries), rows_(tokens) {
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

void BlockResidual::Next(const MatrixView& partial, const float* norm_weight, const MatrixView& all) {
  const MatrixView delta = partial ? Sum(partial) : partial;
  const MatrixView out = sharded_ ? all.Rows(first_, rows_) : all;
  if (rows_ > 0) Mix(delta, norm_weight, out);
  restart_ = false;
  ++site_;
  if (!sharded_) return;
  // Every rank's block of `all`, padded to equal parts.
  const size_t bytes = static_cast<size_t>(part_ * context_.config.hidden_size) * SizeOf(all.dtype);
  const char* own = static_cast<const char*>(all.data) + bytes * static_cast<size_t>(context_.parallel.tensor_rank());
  context_.parallel.tensor->AllGather(own, all.data, bytes, context_.stream);
}

void BlockResidual::BeginGroup() {
  const ModelConfig& config = context_.config;
  // The last site before the next block is closed is the attention's of the layer that closes it.
  const int32_t last = 2 * std::min(live_block_ * config.attn_res_block_size, config.num_hidden_layers);
  const int32_t left = last + 1 - site_, groups = (left + kAttnResSites - 1) / kAttnResSites;
  K3_CHECK(left > 0);
  AttnResClosedParams closed;
  closed.sites = (left + groups - 1) / groups;
  group_begin_ = site_;
  group_end_ = site_ + closed.sites;
  two_phases_ =
      context_.ops.ChooseAttnResForm(rows_, config.hidden_size, live_block_, closed.sites) == AttnResForm::kTwoPhases;
  if (!two_phases_) return;
  K3_CHECK(context_.workspace.closed_mixes != nullptr);
  closed.bank = context_.workspace.bank;
  closed.block_stride = context_.workspace.block_stride;
  closed.closed = live_block_;
  closed.rows = rows_;
  closed.cols = config.hidden_size;
  for (int32_t i = 0; i < closed.sites; ++i) closed.queries[i] = queries_[static_cast<size_t>(site_ + i)];
  closed.mix_eps = config.rms_norm_eps;
  closed.mixes = context_.workspace.closed_mixes;
  context_.ops.AttnResClosed(closed, context_.stream);
}

void BlockResidual::Mix(const MatrixView& delta, const float* norm_weight, const MatrixView& out) {
  const ModelConfig& config = context_.config;
  if (config.attn_res_block_size == 0) {
    context_.ops.AddRmsNorm(
        {.stream = live(), .delta = delta, .weight = norm_weight, .eps = config.rms_norm_eps, .out = out},
        context_.stream);
    return;
  }
  if (live_block_ > 0 && site_ == group_end_) BeginGroup();
  AttnResMixParams mix;
  mix.bank = context_.workspace.bank;
  mix.block_stride = context_.workspace.block_stride;
  mix.live_block = live_block_;
  mix.rows = rows_;
  mix.cols = config.hidden_size;
  mix.delta = delta;
  mix.restart = restart_;
  mix.query = queries_[static_cast<size_t>(site_)];
  mix.mix_eps = config.rms_norm_eps;
  mix.norm_weight = norm_weight;
  mix.norm_eps = config.rms_norm_eps;
  mix.out = out;
  if (live_block_ > 0 && two_phases_) {
    mix.mixes = context_.workspace.closed_mixes;
    mix.site = site_ - group_begin_;
    mix.mixes_settled = mix.site > 0;
  }
  context_.ops.AttnResMix(mix, context_.stream);
}

void BlockResidual::CloseBlock(int32_t layer) {
  if (context_.config.attn_res_block_size == 0 || layer % context_.config.attn_res_block_size != 0) return;
  ++live_block_;
  restart_ = true;
  group_end_ = site_;
  K3_CHECK(live_block_ < context_.config.num_residual_blocks());
}

}  // namespace k3
