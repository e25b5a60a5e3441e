#pragma once

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/weight_tiles.h"
#include "kernels/cuda/weights.h"

// Experts of a token or two, in bf16: matrix-vector products, straight from the router's ids. With so few picks hardly
// two share an expert, so nothing is sorted, and the second product adds a token's experts up itself: two kernels
// instead of four. A token's result does not depend on the other's.
//
// A block has eight rows of outputs, whose weights lie side by side (weight_tiles.h); lane 4 g + t of a warp has inputs
// 8 t .. 8 t + 7 of row g.
namespace k3::cuda {

constexpr int kMoeVectorUpWarps = 4, kMoeVectorDownWarps = 8;

struct MoeVectorArgs {
  const int32_t* ids;  // [tokens, top_k]
  int top_k;
  int first, experts;  // that live here
  int in, inner;       // multiples of 32
};

__device__ __forceinline__ float Dot8(const uint4& w, const uint4& x, float sum) {
  const uint32_t weight[4] = {w.x, w.y, w.z, w.w}, input[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(LowBf16(input[i]), LowBf16(weight[i]), sum);
    sum = fmaf(HighBf16(input[i]), HighBf16(weight[i]), sum);
  }
  return sum;
}

// Over the four lanes of a row.
__device__ __forceinline__ float RowSum(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

// h[pick] = f(w1 x, w3 x). The warps take turns along the inputs; grid (inner / 8, picks).
__global__ void __launch_bounds__(32 * kMoeVectorUpWarps, 8)
    MoeUpVectorKernel(MoeVectorArgs args, ActivationSpec spec, Matrix<const bf16> x, const bf16* w13, bf16* h) {
  constexpr int kStride = kMoeVectorUpWarps * kWeightTileInputs, kSteps = 3;
  __shared__ float2 partial[kMoeVectorUpWarps][8];
  GridDependencyRelease();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  const int expert = args.ids[blockIdx.y] - args.first;
  if (expert < 0 || expert >= args.experts) return;
  const int own = warp * kWeightTileInputs, first = own + 8 * (lane % 4);
  // Eight gate rows over their eight up rows.
  const bf16* weights = w13 + expert * TiledElements(2 * args.inner, args.in) +
                        TiledElement(16 * blockIdx.x + g, first, WeightTilesAcross(args.in));
  const bf16* input = x.Row(blockIdx.y / args.top_k) + first;
  float gate = 0, up = 0;
  for (int base = 0; base < args.in; base += kStride * kSteps) {
    uint4 gate_weights[kSteps], up_weights[kSteps], values[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int k = base + kStride * s;
      const bool valid = k + own < args.in;
      const bf16* from = weights + TiledInputsOn(k);
      gate_weights[s] = LoadStreaming16If(valid, from);
      up_weights[s] = LoadStreaming16If(valid, from + TiledRowsOn(8));
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int k = base + kStride * s;
      values[s] = k + own < args.in ? *reinterpret_cast<const uint4*>(input + k) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      gate = Dot8(gate_weights[s], values[s], gate);
      up = Dot8(up_weights[s], values[s], up);
    }
  }
  gate = RowSum(gate);
  up = RowSum(up);
  if (lane % 4 == 0) partial[warp][g] = {gate, up};
  __syncthreads();
  if (threadIdx.x >= 8) return;
  float2 total = partial[0][threadIdx.x];
#pragma unroll
  for (int w = 1; w < kMoeVectorUpWarps; ++w) {
    total.x += partial[w][threadIdx.x].x;
    total.y += partial[w][threadIdx.x].y;
  }
  h[static_cast<int64_t>(blockIdx.y) * args.inner + 8 * blockIdx.x + threadIdx.x] =
      FromFloat<bf16>(Activate(spec, total.x, total.y));
}

// out[t] = sum over j of weights[t, j] w2 h[pick of (t, j)]. Of every kMoeVectorDownWarps / kParts picks each kParts
// warps share one, along the inputs; the first weights do not wait for h. Grid (in / 8, tokens).
template <int kParts, typename Out>
__global__ void __launch_bounds__(32 * kMoeVectorDownWarps, 3)
    MoeDownVectorKernel(MoeVectorArgs args, const float* weights, const bf16* h, const bf16* w2, Matrix<Out> out) {
  constexpr int kStride = kParts * kWeightTileInputs, kSteps = 8;
  __shared__ float partial[kMoeVectorDownWarps][8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  const int own = warp % kParts * kWeightTileInputs, first = own + 8 * (lane % 4);
  const bf16* const rows = w2 + TiledElement(8 * blockIdx.x + g, first, WeightTilesAcross(args.inner));
  const int64_t token_pick = static_cast<int64_t>(blockIdx.y) * args.top_k;
  bool waited = false;
  float total = 0;
  for (int j = warp / kParts; j < args.top_k; j += kMoeVectorDownWarps / kParts) {
    const int expert = args.ids[token_pick + j] - args.first;
    if (expert < 0 || expert >= args.experts) continue;
    const bf16* row = rows + expert * TiledElements(args.in, args.inner);
    const bf16* input = h + (token_pick + j) * args.inner + first;
    float sum = 0;
    for (int base = 0; base < args.inner; base += kStride * kSteps) {
      uint4 w[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int k = base + kStride * s;
        w[s] = LoadStreaming16If(k + own < args.inner, row + TiledInputsOn(k));
      }
      if (!waited) GridDependencyWait();
      waited = true;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int k = base + kStride * s;
        if (k + own >= args.inner) break;
        sum = Dot8(w[s], *reinterpret_cast<const uint4*>(input + k), sum);
      }
    }
    total = fmaf(weights[token_pick + j], sum, total);
  }
  if (!waited) GridDependencyWait();
  total = RowSum(total);
  if (lane % 4 == 0) partial[warp][g] = total;
  __syncthreads();
  if (threadIdx.x >= 8) return;
  total = partial[0][threadIdx.x];
#pragma unroll
  for (int w = 1; w < kMoeVectorDownWarps; ++w) total += partial[w][threadIdx.x];
  out.Row(blockIdx.y)[8 * blockIdx.x + threadIdx.x] = FromFloat<Out>(total);
}

}  // namespace k3::cuda
