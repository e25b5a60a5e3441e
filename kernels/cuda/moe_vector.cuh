#pragma once

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/weights.h"

// Experts of a token or two, in bf16: matrix-vector products as in gemm_vector.cuh, straight from the router's ids.
// With so few picks hardly two share an expert, so nothing is sorted, and the second product adds a token's experts up
// itself: two kernels instead of four. A token's result does not depend on the other's.
namespace k3::cuda {

constexpr int kMoeVectorThreads = 128;
constexpr int kMoeVectorWarps = kMoeVectorThreads / 32;
constexpr int kMoeVectorStep = 256;  // inputs of a warp's step, 8 a lane

struct MoeVectorArgs {
  const int32_t* ids;  // [tokens, top_k]
  int top_k;
  int first, experts;  // that live here
  int in, inner;
};

template <int kSteps, bool kWhole>
__device__ __forceinline__ void FetchRow(const bf16* row, int base, int end, int lane, uint4 (&w)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int k = base + kMoeVectorStep * s + 8 * lane;
    w[s] = kWhole || k < end ? LoadStreaming16(row + k) : uint4{0, 0, 0, 0};
  }
}

__device__ __forceinline__ float Dot8(const uint4& w, const uint4& x, float sum) {
  const uint32_t weight[4] = {w.x, w.y, w.z, w.w}, input[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(LowBf16(input[i]), LowBf16(weight[i]), sum);
    sum = fmaf(HighBf16(input[i]), HighBf16(weight[i]), sum);
  }
  return sum;
}

// h[pick] = f(w1 x, w3 x). A warp an output; grid (inner / warps, picks). kWhole: the width is a multiple of kSteps
// steps.
template <int kSteps, bool kWhole>
__global__ void __launch_bounds__(kMoeVectorThreads)
    MoeUpVectorKernel(MoeVectorArgs args, ActivationSpec spec, Matrix<const bf16> x, const bf16* w13, bf16* h) {
  const int lane = threadIdx.x % 32;
  const int output = blockIdx.x * kMoeVectorWarps + threadIdx.x / 32;
  const int expert = args.ids[blockIdx.y] - args.first;
  if (expert < 0 || expert >= args.experts || output >= args.inner) return;
  // Eight gate rows over their eight up rows.
  const int64_t row = 2 * static_cast<int64_t>(expert) * args.inner + output / 8 * 16 + output % 8;
  const bf16* gate_row = w13 + row * args.in;
  const bf16* up_row = gate_row + 8 * static_cast<int64_t>(args.in);
  const bf16* input = x.Row(blockIdx.y / args.top_k);
  float gate = 0, up = 0;
  for (int base = 0; base < args.in; base += kMoeVectorStep * kSteps) {
    uint4 gate_weights[kSteps], up_weights[kSteps];
    FetchRow<kSteps, kWhole>(gate_row, base, args.in, lane, gate_weights);
    FetchRow<kSteps, kWhole>(up_row, base, args.in, lane, up_weights);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int k = base + kMoeVectorStep * s + 8 * lane;
      if (!kWhole && k >= args.in) continue;
      const uint4 values = *reinterpret_cast<const uint4*>(input + k);
      gate = Dot8(gate_weights[s], values, gate);
      up = Dot8(up_weights[s], values, up);
    }
  }
  gate = WarpSum(gate);
  up = WarpSum(up);
  if (lane == 0) h[static_cast<int64_t>(blockIdx.y) * args.inner + output] = FromFloat<bf16>(Activate(spec, gate, up));
}

// out[t] = sum over j, ascending, of weights[t, j] w2 h[pick of (t, j)]. kParts warps share an output, each with runs
// of kTogether picks, and add up in shared memory; grid (in / outputs of a block, tokens).
template <int kTogether, int kSteps, bool kWhole, int kParts, typename Out>
__global__ void __launch_bounds__(kMoeVectorThreads)
    MoeDownVectorKernel(MoeVectorArgs args, const float* weights, const bf16* h, const bf16* w2, Matrix<Out> out) {
  constexpr int kOutputs = kMoeVectorWarps / kParts;
  __shared__ float partial[kOutputs][kParts];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = warp % kParts, output = blockIdx.x * kOutputs + warp / kParts;
  const int row_output = min(output, args.in - 1);
  const int64_t token_pick = static_cast<int64_t>(blockIdx.y) * args.top_k;
  float total = 0;
  for (int begin = part * kTogether; begin < args.top_k; begin += kParts * kTogether) {
    float sum[kTogether] = {};
    const bf16* row[kTogether];
    bool here[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int expert = begin + j < args.top_k ? args.ids[token_pick + begin + j] - args.first : -1;
      here[j] = expert >= 0 && expert < args.experts;
      row[j] = w2 + (static_cast<int64_t>(here[j] ? expert : 0) * args.in + row_output) * args.inner;
    }
    for (int base = 0; base < args.inner; base += kMoeVectorStep * kSteps) {
      uint4 w[kTogether][kSteps];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) FetchRow<kSteps, kWhole>(row[j], base, args.inner, lane, w[j]);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const bf16* input = h + (token_pick + min(begin + j, args.top_k - 1)) * args.inner;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const int k = base + kMoeVectorStep * s + 8 * lane;
          if (!kWhole && k >= args.inner) continue;
          sum[j] = Dot8(w[j][s], *reinterpret_cast<const uint4*>(input + k), sum[j]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const float dot = WarpSum(sum[j]);
      if (here[j]) total = fmaf(weights[token_pick + begin + j], dot, total);
    }
  }
  if (lane == 0) partial[warp / kParts][part] = total;
  __syncthreads();
  if (lane != 0 || part != 0 || output >= args.in) return;
#pragma unroll
  for (int p = 1; p < kParts; ++p) total += partial[warp / kParts][p];
  out.Row(blockIdx.y)[output] = FromFloat<Out>(total);
}

}  // namespace k3::cuda
