#pragma once

#include <span>

#include "engine/model/layer_context.h"

namespace k3 {

// The residual stream of one step (spec 3.2): with attention residuals a bank of closed blocks and the live running
// sum, which is kept in the bank's next place so that closing a block copies nothing; otherwise one plain stream. Lives
// on the stack of Model::Forward; the memory is the workspace's bank.
//
// The sites, at each of which the sources are mixed, are numbered in the order in which they come: 2 L before the
// attention of layer L, 2 L + 1 before its MLP, the last one before the head. Where the backend's choice says so, sites
// with the same closed blocks are taken together, up to kAttnResSites at a time and as even as possible: the closed
// blocks are mixed for all of a group at its first site (workspace.closed_mixes), and each adds the live sum.
//
// Under tensor parallelism the deltas are partial sums of the group's ranks. Few tokens (decode): they are summed for
// all, and every rank keeps all rows of the bank. Many (prefill): each rank receives the sums of its own part of the
// tokens, keeps the bank of these only, and the normed rows are gathered again. A row's bits are the same either way.
class BlockResidual {
 public:
  // `queries`: the depth queries of all sites, which stay the caller's; null with plain residuals, and at site 0, which
  // has one source only, if it likes.
  BlockResidual(const LayerContext& context, int64_t tokens, std::span<const float* const> queries);

  // Where the embedding goes: the live sum before layer 0.
  MatrixView live() const;

  // The live sum before layer 0 from partial embeddings [T, D]; tensor parallelism only.
  void Start(const MatrixView& partial);

  // Adds `partial` (absent before layer 0) to the live sum and writes the normed input of the next sublayer to `all`.
  // `partial` is summed over the group's ranks on the way, which changes it. To be called once for each site, in order.
  void Next(const MatrixView& partial, const float* norm_weight, const MatrixView& all);

  // Closes the live block after the attention mix of layer L with L % attn_res_block_size == 0: the next delta starts a
  // new sum. Nothing happens on other layers or with plain residuals.
  void CloseBlock(int32_t layer);

  int32_t num_sources() const { return live_block_ + 1; }

 private:
  MatrixView Sum(const MatrixView& partial);
  void Mix(const MatrixView& delta, const float* norm_weight, const MatrixView& out);
  // At the first site of a group: decides how the group is mixed, and mixes the closed blocks for it.
  void BeginGroup();

  const LayerContext& context_;
  int64_t tokens_;
  std::span<const float* const> queries_;
  bool sharded_ = false;
  int64_t part_ = 0;   // tokens of a shard, the last ones perhaps missing
  int64_t first_ = 0;  // this rank's tokens: [first_, first_ + rows_)
  int64_t rows_ = 0;
  int32_t live_block_ = 0;
  bool restart_ = false;
  int32_t site_ = 0;  // the next
  int32_t group_begin_ = 0, group_end_ = 0;
  bool two_phases_ = false;  // of the group
};

}  // namespace k3
