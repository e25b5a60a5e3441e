#pragma once

#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/op_params.h"

// What the KDA kernels share. H heads, d head dimension, W convolution taps. Kernels take KdaParams and the
// SequenceBatch it points to by value.
namespace k3::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kL2NormEps = 1e-6f;

// Log-decay of one channel (spec 3.3), natural logarithm, <= 0. `rate` is exp(A_log).
__device__ __forceinline__ float KdaLogDecay(const KdaParams& p, float rate, float z) {
  if (p.gate_kind == KdaGate::kBounded) return p.gate_lower_bound / (1.0f + expf(-rate * z));
  return -rate * (z > 20.0f ? z : log1pf(expf(z)));
}

// The same to base 2 with the fast functions, of logit + bias; a slow decay keeps its relative accuracy, for memory
// over a million tokens.
template <bool kBounded>
__device__ __forceinline__ float KdaLog2DecayFast(float lower_bound, float rate, float logit, float bias) {
  if constexpr (kBounded) {
    const float slope = -kLog2E * rate;
    return lower_bound * kLog2E * Reciprocal(1.0f + Exp2(fmaf(logit, slope, bias * slope)));
  }
  const float z = logit + bias;
  const float e = Exp2(z * kLog2E);
  const float log2 = e < 0.02f ? e * (1.0f - e * (0.5f - e * 0.33333333f)) * kLog2E : __log2f(1.0f + e);
  return -rate * (z > 20.0f ? z * kLog2E : log2);
}

// log2(1 + 2^x) to 1e-5 of itself, however small it is: log2(1 + e) / e is a polynomial on [0, 1].
__device__ __forceinline__ float Softplus2(float x) {
  const float e = Exp2(-fabsf(x));
  float ratio = fmaf(e, -0.034435898f, 0.14603287f);
  ratio = fmaf(e, ratio, -0.30303618f);
  ratio = fmaf(e, ratio, 0.46917406f);
  ratio = fmaf(e, ratio, -0.72042614f);
  ratio = fmaf(e, ratio, 1.4426829f);
  return fmaf(e, ratio, fmaxf(x, 0.0f));
}

__device__ __forceinline__ char* KdaConvSlot(const KdaParams& p, int slot) {
  return static_cast<char*>(p.conv_state) + slot * p.slot_stride;
}
__device__ __forceinline__ char* KdaStateSlot(const KdaParams& p, int slot) {
  return static_cast<char*>(p.state) + slot * p.slot_stride;
}

// The raw inputs of one sequence in time order: rows of this step from 0, rows of the stored convolution state before.
template <typename T>
struct KdaInputs {
  const T* step;    // first row of the sequence in qkv
  const T* stored;  // [W - 1, 3 H d]; null reads as zeros
  int64_t ld;
  int64_t channels;  // 3 H d
  int history;       // W - 1

  // Null where there is nothing.
  __device__ __forceinline__ const T* Row(int row) const {
    if (row >= 0) return step + row * ld;
    return stored == nullptr ? nullptr : stored + (history + row) * channels;
  }
};

template <typename T>
__device__ __forceinline__ KdaInputs<T> MakeKdaInputs(const KdaParams& p, int token_begin, int slot) {
  KdaInputs<T> inputs;
  inputs.step = static_cast<const T*>(p.qkv.data) + token_begin * p.qkv.ld;
  inputs.stored = slot < 0 || p.conv_width < 2 ? nullptr : reinterpret_cast<const T*>(KdaConvSlot(p, slot));
  inputs.ld = p.qkv.ld;
  inputs.channels = 3 * static_cast<int64_t>(p.heads) * p.head_dim;
  inputs.history = p.conv_width - 1;
  return inputs;
}

// Stores the convolution state of channel `channel` after `rows` rows of the step. `to` may be the stored state itself:
// rows are written in time order and read from later places.
template <typename T>
__device__ __forceinline__ void StoreConvChannel(const KdaInputs<T>& inputs, int rows, int64_t channel, char* to) {
  T* target = reinterpret_cast<T*>(to);
  for (int i = 0; i < inputs.history; ++i) {
    const T* row = inputs.Row(rows - inputs.history + i);
    target[i * inputs.channels + channel] = row == nullptr ? FromFloat<T>(0.0f) : row[channel];
  }
}

// Index of the first snapshot whose row is at least `row`.
__device__ __forceinline__ int FirstSnapshot(const SequenceBatch& batch, int row) {
  int low = 0, high = batch.num_snapshots;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (batch.snapshot_row[middle] < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace k3::cuda
