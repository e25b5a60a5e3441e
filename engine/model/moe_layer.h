#pragma once

#include "engine/model/layer_context.h"
#include "engine/model/weights.h"

namespace k3 {

// out = routed experts (through the latent width where the model has one) plus shared experts (spec 3.6). x [T, D]
// normed, out [T, D]; `moe_layer` counts MoE layers, for the probe.
void RunMoeLayer(const LayerContext& context, const MoeWeights& weights, int32_t moe_layer, const MatrixView& x,
                 const MatrixView& out);

// The layer of a group without tokens: its experts for the other groups' tokens.
void LendExperts(const LayerContext& context, const MoeWeights& weights);

}  // namespace k3
