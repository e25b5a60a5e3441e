#pragma once

#include "engine/model/layer_context.h"
#include "engine/model/weights.h"

namespace k3 {

// out = KDA sublayer of x (spec 3.3). x [T, D] normed, out [T, D]; `kda_layer` counts KDA layers, for the state pool.
void RunKdaLayer(const LayerContext& context, const KdaWeights& weights, int32_t kda_layer, const MatrixView& x,
                 const MatrixView& out);

}  // namespace k3
