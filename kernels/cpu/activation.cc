#include "kernels/core/shape_check.h"
#include "kernels/cpu/cpu_ops.h"

namespace k3 {

void CpuOps::GatedActivation(const GatedActivationParams& p, Stream) {
  const int64_t width = p.out.cols;
  CheckMatrix("GatedActivation", "gate_up", p.gate_up, p.out.rows, 2 * width, DType::kF32);
  CheckMatrix("GatedActivation", "out", p.out, p.out.rows, width, DType::kF32);
  // An activation costs about twenty multiply-adds.
  ForRows(p.out.rows, 20 * width, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const float* gate = p.gate_up.as<float>() + t * p.gate_up.ld;
      kernels_.gated_activation(gate, gate + width, p.activation, width, p.out.as<float>() + t * p.out.ld);
    }
  });
}

}  // namespace k3
