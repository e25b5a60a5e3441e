#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/op_params.h"

namespace k3::cuda {

// f(gate, up) of spec 3.5, fp32.
template <Activation kKind>
__device__ __forceinline__ float ActivateAs(const ActivationSpec& spec, float gate, float up) {
  if constexpr (kKind == Activation::kSwiglu) return Silu(gate) * up;
  const float capped = spec.linear_beta > 0 ? spec.linear_beta * PreciseTanh(up * Reciprocal(spec.linear_beta)) : up;
  return spec.beta * PreciseTanh(gate * Reciprocal(spec.beta)) * Sigmoid(gate) * capped;
}
// Two of them, rounded to a pair. SwiGLU shares a reciprocal; its sigmoid is at least 2^-63.
template <Activation kKind>
__device__ __forceinline__ uint32_t ActivatePair(const ActivationSpec& spec, float gate0, float up0, float gate1,
                                                 float up1) {
  if constexpr (kKind == Activation::kSwiglu) {
    const float below0 = 1.0f + Exp2(fminf(gate0 * -1.4426950408889634f, 63.0f));
    const float below1 = 1.0f + Exp2(fminf(gate1 * -1.4426950408889634f, 63.0f));
    const float both = Reciprocal(below0 * below1);
    return PackBf16(gate0 * (both * below1) * up0, gate1 * (both * below0) * up1);
  }
  return PackBf16(ActivateAs<kKind>(spec, gate0, up0), ActivateAs<kKind>(spec, gate1, up1));
}
__device__ __forceinline__ float Activate(const ActivationSpec& spec, float gate, float up) {
  return spec.kind == Activation::kSwiglu ? ActivateAs<Activation::kSwiglu>(spec, gate, up)
                                          : ActivateAs<Activation::kSitu>(spec, gate, up);
}

// out[t][c] = f(gate_up[t][c], gate_up[t][cols + c]); grid (rows, packs of columns).
template <typename T, int N>
__global__ void GatedActivationKernel(Matrix<const T> gate_up, ActivationSpec spec, int cols, Matrix<T> out) {
  const int c = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (c >= cols) return;
  const T* row = gate_up.Row(blockIdx.x);
  float gate[N], up[N];
  LoadFloats<N>(row + c, gate);
  LoadFloats<N>(row + cols + c, up);
#pragma unroll
  for (int i = 0; i < N; ++i) gate[i] = Activate(spec, gate[i], up[i]);
  StoreFloats<N>(out.Row(blockIdx.x) + c, gate);
}

}  // namespace k3::cuda
