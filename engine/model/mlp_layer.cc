#include "engine/model/mlp_layer.h"

namespace k3 {

MatrixView ActivateMlp(const LayerContext& context, const MlpWeights& weights, const MatrixView& x, Stream stream) {
  const MatrixView gate_up = context.workspace.projected.Rows(0, x.rows).Columns(0, weights.gate_up->out);
  const MatrixView activated = context.workspace.mlp_act.Rows(0, x.rows).Columns(0, weights.down->in);
  context.ops.Linear({.x = x, .weight = weights.gate_up.get(), .y = gate_up}, stream);
  context.ops.GatedActivation({.gate_up = gate_up, .activation = context.config.activation, .out = activated}, stream);
  return activated;
}

void RunMlpLayer(const LayerContext& context, const MlpWeights& weights, const MatrixView& x, const MatrixView& out) {
  const MatrixView activated = ActivateMlp(context, weights, x, context.stream);
  context.ops.Linear({.x = activated, .weight = weights.down.get(), .y = out}, context.stream);
}

}  // namespace k3
