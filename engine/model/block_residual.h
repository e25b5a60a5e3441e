#pragma once

#include "engine/model/layer_context.h"

namespace k3 {

// The residual stream of one step (spec 3.2): with attention residuals a bank of closed blocks and the live running
// sum, which is kept in the bank's next place so that closing a block copies nothing; otherwise one plain stream. Lives
// on the stack of Model::Forward; the memory is the workspace's bank.
class BlockResidual {
 public:
  BlockResidual(const LayerContext& context, int64_t tokens);

  // Where the embedding goes: the live sum before layer 0.
  MatrixView live() const;

  // Adds `delta` (absent before layer 0) to the live sum and writes the normed input of the next sublayer to `out`.
  // `mix_query` is the depth query of that sublayer, null with plain residuals.
  void Next(const MatrixView& delta, const float* mix_query, const float* norm_weight, const MatrixView& out);

  // Closes the live block after the attention mix of layer L with L % attn_res_block_size == 0: the next delta starts a
  // new sum. Nothing happens on other layers or with plain residuals.
  void CloseBlock(int32_t layer);

  int32_t num_sources() const { return live_block_ + 1; }

 private:
  const LayerContext& context_;
  int64_t tokens_;
  int32_t live_block_ = 0;
  bool restart_ = false;
};

}  // namespace k3
