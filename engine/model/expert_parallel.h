#pragma once

#include "engine/model/layer_context.h"
#include "engine/model/weights.h"

namespace k3 {

// The experts of one layer over the ranks of all groups. A rank routes its group's tokens; the inputs, ids and weights
// of all groups are brought together (dispatch), every rank applies its own experts to all of them, and each group gets
// the sums of its tokens back (combine). What then still differs between the ranks of one group is summed with the
// group's other partial sums, or by the layer before a norm. Every group takes part with the same number of rows
// (LayerContext::dispatch_rows); rows without a token have no experts.
//
// x [T, width] act; out [T, width] act, T the tokens of `x`. With one group dispatch and combine are nothing.
void RunExperts(const LayerContext& context, const MoeWeights& weights, const MatrixView& x, const MatrixView& out);

// The two ways of it, which RunExperts takes where there are several groups, for measuring them. `x` [T, width] and the
// workspace's expert ids and weights go to its gathered_*; gathered_out comes back as the sums `out` [T, width].
void Dispatch(const LayerContext& context, const MatrixView& x, int64_t rows);
void Combine(const LayerContext& context, int64_t rows, const MatrixView& out);

}  // namespace k3
