#pragma once

#include "engine/model/layer_context.h"
#include "engine/model/weights.h"

namespace k3 {

// out = MLA sublayer of x, without rotary embedding (spec 3.4). x [T, D] normed, out [T, D]; `mla_layer` counts MLA
// layers, for the page pool.
void RunMlaLayer(const LayerContext& context, const MlaWeights& weights, int32_t mla_layer, const MatrixView& x,
                 const MatrixView& out);

}  // namespace k3
