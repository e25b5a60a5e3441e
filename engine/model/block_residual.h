#pragma once

#include "engine/model/layer_context.h"

namespace k3 {

// The residual stream of one step (spec 3.2): with attention residuals a bank of closed blocks and the live running
// sum, which is kept in the bank's next place so that closing a block copies nothing; otherwise one plain stream. Lives
// on the stack of Model::Forward; the memory is the workspace's bank.
//
// Under tensor parallelism the deltas are partial sums of the group's ranks. Few tokens (decode): they are summed for
// all, and every rank keeps all rows of the bank. Many (prefill): each rank receives the sums of its own part of the
// tokens, keeps the bank of these only, and the normed rows are gathered again. A row's bits are the same either way.
class BlockResidual {
 public:
  BlockResidual(const LayerContext& context, int64_t tokens);

  // Where the embedding goes: the live sum before layer 0.
  MatrixView live() const;

  // The live sum before layer 0 from partial embeddings [T, D]; tensor parallelism only.
  void Start(const MatrixView& partial);

  // Adds `partial` (absent before layer 0) to the live sum and writes the normed input of the next sublayer to `all`.
  // `partial` is summed over the group's ranks on the way, which changes it.
  // `mix_query` is the depth query of that sublayer, null with plain residuals.
  void Next(const MatrixView& partial, const float* mix_query, const float* norm_weight, const MatrixView& all);

  // Closes the live block after the attention mix of layer L with L % attn_res_block_size == 0: the next delta starts a
  // new sum. Nothing happens on other layers or with plain residuals.
  void CloseBlock(int32_t layer);

  int32_t num_sources() const { return live_block_ + 1; }

 private:
  MatrixView Sum(const MatrixView& partial);
  void Mix(const MatrixView& delta, const float* mix_query, const float* norm_weight, const MatrixView& out);

  const LayerContext& context_;
  int64_t tokens_;
  bool sharded_ = false;
  int64_t part_ = 0;   // tokens of a shard, the last ones perhaps missing
  int64_t first_ = 0;  // this rank's tokens: [first_, first_ + rows_)
  int64_t rows_ = 0;
  int32_t live_block_ = 0;
  bool restart_ = false;
};

}  // namespace k3
