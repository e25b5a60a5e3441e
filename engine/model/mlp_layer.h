#pragma once

#include "engine/model/layer_context.h"
#include "engine/model/weights.h"

namespace k3 {

// f(gate(x), up(x)) of spec 3.5 in the workspace, until the next call. Runs on `stream`.
MatrixView ActivateMlp(const LayerContext& context, const MlpWeights& weights, const MatrixView& x, Stream stream);

// out = down(f(gate(x), up(x))): dense layers.
void RunMlpLayer(const LayerContext& context, const MlpWeights& weights, const MatrixView& x, const MatrixView& out);

}  // namespace k3
