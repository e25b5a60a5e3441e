#include "engine/model/mlp_layer.h"

namespace k3 {

void RunMlpLayer(const LayerContext& context, const MlpWeights& weights, const MatrixView& x, const MatrixView& out,
                 bool accumulate) {
  Ops& ops = context.ops;
  const MatrixView gate_up = context.workspace.projected.Rows(0, x.rows).Columns(0, weights.gate_up->out);
  const MatrixView activated = context.workspace.mlp_act.Rows(0, x.rows).Columns(0, weights.down->in);
  ops.Linear({.x = x, .weight = weights.gate_up.get(), .y = gate_up}, context.stream);
  ops.GatedActivation({.gate_up = gate_up, .activation = context.config.activation, .out = activated}, context.stream);
  ops.Linear({.x = activated, .weight = weights.down.get(), .y = out, .accumulate = accumulate}, context.stream);
}

}  // namespace k3
