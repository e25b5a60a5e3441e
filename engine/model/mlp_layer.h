#pragma once

#include "engine/model/layer_context.h"
#include "engine/model/weights.h"

namespace k3 {

// out = down(f(gate(x), up(x))), or out += that (spec 3.5): dense layers and shared experts.
void RunMlpLayer(const LayerContext& context, const MlpWeights& weights, const MatrixView& x, const MatrixView& out,
                 bool accumulate = false);

}  // namespace k3
