#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/op_table.h"

namespace k3::cuda {
namespace {

template <typename T>
void Gated(const GatedActivationParams& params, cudaStream_t queue) {
  constexpr int kWide = kPack<T>;
  const bool wide = params.out.cols % kWide == 0 && RowsAligned16(params.gate_up) && RowsAligned16(params.out);
  const int64_t packs = CeilDiv(params.out.cols, wide ? kWide : 1);
  LaunchShape shape;
  shape.block = dim3(static_cast<unsigned>(std::min<int64_t>(256, RoundUp(packs, 32))));
  shape.grid = dim3(static_cast<unsigned>(params.out.rows), static_cast<unsigned>(CeilDiv(packs, shape.block.x)));
  auto* kernel = wide ? &GatedActivationKernel<T, kWide> : &GatedActivationKernel<T, 1>;
  Launch(kernel, shape, queue, "GatedActivation", AsMatrix<const T>(params.gate_up), params.activation,
         static_cast<int>(params.out.cols), AsMatrix<T>(params.out));
}

}  // namespace

void CheckActivation(const ActivationSpec& spec) {
  K3_REQUIRE(spec.kind == Activation::kSwiglu || (spec.beta > 0 && spec.linear_beta >= 0),
             "SiTU needs beta > 0 and linear_beta >= 0, has " + std::to_string(spec.beta) + " and " +
                 std::to_string(spec.linear_beta));
}

void GatedActivation(const Device& device, const GatedActivationParams& params, cudaStream_t queue) {
  CheckActivation(params.activation);
  K3_REQUIRE_MATRIX(params.gate_up, device.act, params.out.rows, 2 * params.out.cols);
  K3_REQUIRE_MATRIX(params.out, device.act, params.gate_up.rows, params.gate_up.cols / 2);
  if (params.out.rows == 0 || params.out.cols == 0) return;
  device.act == DType::kBF16 ? Gated<bf16>(params, queue) : Gated<float>(params, queue);
}

}  // namespace k3::cuda
