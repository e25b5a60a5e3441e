#pragma once

#include "kernels/cuda/kda_common.cuh"

namespace k3::cuda {

constexpr int kAnyThreads = 256;

// KDA token by token for any head dimension and number of taps: one block a (head, sequence), the state stays in global
// memory (L2). The obvious version; shapes of the released models take the other kernels.
// Shared memory: q, k, decay, v, o [d] each, then one float a warp.
template <typename T, typename StateT>
__global__ void KdaAnyKernel(KdaParams p, SequenceBatch batch) {
  const int d = p.head_dim;
  float* q = DynamicShared<float>();
  float* k = q + d;
  float* v = k + d;
  float* decay = v + d;
  float* o = decay + d;
  float* partial = o + d;
  const int head = blockIdx.x;
  const int sequence = blockIdx.y;
  const int begin = batch.token_begin[sequence];
  const int tokens = batch.token_begin[sequence + 1] - begin;
  const int slot = batch.state_slot[sequence];
  const int64_t width = static_cast<int64_t>(p.heads) * d;
  if (slot < 0) {
    for (int i = threadIdx.x; i < tokens * d; i += blockDim.x) {
      static_cast<T*>(p.out.data)[(begin + i / d) * p.out.ld + head * d + i % d] = FromFloat<T>(0.0f);
    }
    return;
  }
  const KdaInputs<T> inputs = MakeKdaInputs<T>(p, begin, slot);
  const int64_t piece = static_cast<int64_t>(head) * d * d;
  StateT* state = reinterpret_cast<StateT*>(KdaStateSlot(p, slot)) + piece;
  const float rate = expf(p.a_log[head]);
  int snapshot = batch.num_snapshots > 0 ? FirstSnapshot(batch, begin) : 0;

  const auto store_conv = [&](int rows, int to) {
    if (p.conv_taps == nullptr) return;
    for (int c = threadIdx.x; c < 3 * d; c += blockDim.x) {
      StoreConvChannel(inputs, rows, c / d * width + head * d + c % d, KdaConvSlot(p, to));
    }
  };
  for (int t = 0; t < tokens; ++t) {
    const int64_t token = begin + t;
    for (int c = threadIdx.x; c < 3 * d; c += blockDim.x) {
      const int64_t channel = c / d * width + head * d + c % d;
      if (p.conv_taps == nullptr) {
        q[c] = ToFloat(inputs.Row(t)[channel]);
        continue;
      }
      float sum = 0;
      for (int j = 0; j < p.conv_width; ++j) {
        const T* row = inputs.Row(t - inputs.history + j);
        if (row != nullptr) sum = fmaf(p.conv_taps[channel * p.conv_width + j], ToFloat(row[channel]), sum);
      }
      q[c] = Rounded<T>(Silu(sum));  // q, k and v lie one after the other
    }
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
      const float z = ToFloat(static_cast<const T*>(p.decay.data)[token * p.decay.ld + head * d + c]);
      decay[c] = expm1f(KdaLogDecay(p, rate, z + p.dt_bias[head * d + c]));  // as in kda_step.cuh
    }
    __syncthreads();
    float square_q = 0, square_k = 0;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
      square_q = fmaf(q[c], q[c], square_q);
      square_k = fmaf(k[c], k[c], square_k);
    }
    square_q = BlockSum(square_q, partial);
    __syncthreads();
    square_k = BlockSum(square_k, partial);
    const float scale_q = rsqrtf(square_q + kL2NormEps) * rsqrtf(static_cast<float>(d));
    const float scale_k = rsqrtf(square_k + kL2NormEps);
    const float beta = Sigmoid(ToFloat(static_cast<const T*>(p.beta.data)[token * p.beta.ld + head]));
    float square_o = 0;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
      const auto decayed = [&](int r) {
        const float x = ToFloat(state[r * d + c]);
        return fmaf(x, decay[r], x);
      };
      float prediction = 0;
      for (int r = 0; r < d; ++r) prediction = fmaf(decayed(r), k[r] * scale_k, prediction);
      const float u = beta * (v[c] - prediction);
      float sum = 0;
      for (int r = 0; r < d; ++r) {
        const float x = fmaf(k[r] * scale_k, u, decayed(r));
        state[r * d + c] = FromFloat<StateT>(x);
        sum = fmaf(x, q[r] * scale_q, sum);
      }
      o[c] = sum;
      square_o = fmaf(sum, sum, square_o);
    }
    __syncthreads();
    const float scale = rsqrtf(BlockSum(square_o, partial) / d + p.norm_eps);
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
      T& out = static_cast<T*>(p.out.data)[token * p.out.ld + head * d + c];
      if (p.norm_weight == nullptr) {
        out = FromFloat<T>(o[c]);
        continue;
      }
      const float gate = Sigmoid(ToFloat(static_cast<const T*>(p.gate.data)[token * p.gate.ld + head * d + c]));
      out = FromFloat<T>(o[c] * scale * p.norm_weight[c] * gate);
    }
    for (; snapshot < batch.num_snapshots && batch.snapshot_row[snapshot] == token; ++snapshot) {
      const int to = batch.snapshot_slot[snapshot];
      StateT* target = reinterpret_cast<StateT*>(KdaStateSlot(p, to)) + piece;
      for (int r = 0; r < d; ++r) {
        for (int c = threadIdx.x; c < d; c += blockDim.x) target[r * d + c] = state[r * d + c];
      }
      store_conv(t + 1, to);
    }
    __syncthreads();
  }
  store_conv(tokens, slot);
}

}  // namespace k3::cuda
