#pragma once

#include "kernels/cuda/kda_common.cuh"

// The fused KDA step for sequences of few tokens: convolution, norms, gates, recurrence and gated norm in one launch,
// the state read once and written once, in place.
//
// A cluster of four blocks owns a (sequence, head); each block owns 32 value columns, so that its 128 x 32 piece of the
// state lies in registers: thread (row group, column quad) holds 4 rows x 4 columns. Inputs are prepared for up to
// eight tokens at a time; of each token only the sums over rows go through shared memory, prediction and output
// together: o = S'^T q = (decayed S)^T q + (k . q) u.
namespace k3::cuda {

constexpr int kStepDim = 128;
constexpr int kStepBlocks = 4;  // blocks of a cluster
constexpr int kStepColumns = kStepDim / kStepBlocks;
constexpr int kStepThreads = 256;
constexpr int kStepWarps = kStepThreads / 32;
constexpr int kStepTokens = 8;  // prepared together
constexpr int kStepTaps = 4;

struct KdaStepShared {
  float k[kStepTokens][kStepDim];      // normalised
  float q[kStepTokens][kStepDim];      // normalised and scaled
  float decay[kStepTokens][kStepDim];  // exp(g)
  float v[kStepTokens][kStepColumns];
  float beta[kStepTokens];
  float partial[2][kStepWarps][kStepColumns / 4][8];  // by token parity: sums over a warp's rows, prediction | output
  float key_query[2][kStepWarps];
  float output[kStepTokens][kStepColumns];
  float square[2][kStepBlocks][kStepTokens];  // sum of squares of the outputs by parity of the token group and block
};

template <typename T>
__device__ __forceinline__ void LoadFour(const T* from, bool aligned, float (&out)[4]) {
  if (aligned) {
    LoadFloats<4>(from, out);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = ToFloat(from[i]);
  }
}

// Convolution and SiLU of four channels at `row`, rounded to T.
template <typename T>
__device__ __forceinline__ void ConvFour(const KdaInputs<T>& inputs, const float* taps, int row, int64_t channel,
                                         bool aligned, float (&out)[4]) {
  float window[kStepTaps][4];
#pragma unroll
  for (int j = 0; j < kStepTaps; ++j) {
    const T* source = inputs.Row(row - (kStepTaps - 1) + j);
    if (source != nullptr) {
      LoadFour(source + channel, aligned, window[j]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) window[j][i] = 0;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float tap[kStepTaps];
    LoadFloats<kStepTaps>(taps + (channel + i) * kStepTaps, tap);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kStepTaps; ++j) sum = fmaf(tap[j], window[j][i], sum);
    out[i] = Rounded<T>(Silu(sum));
  }
}

// Grid (heads * kStepBlocks, sequences) in clusters of kStepBlocks; sequences of more than max_tokens are left alone.
template <typename T, typename StateT>
__global__ void __launch_bounds__(kStepThreads)
    KdaStepKernel(KdaParams p, SequenceBatch batch, int max_tokens, bool aligned) {
  KdaStepShared& s = *DynamicShared<KdaStepShared>();
  const int sequence = blockIdx.y;
  const int head = blockIdx.x / kStepBlocks;
  const int block = blockIdx.x % kStepBlocks;
  const int begin = batch.token_begin[sequence];
  const int tokens = batch.token_begin[sequence + 1] - begin;
  if (tokens < 1 || tokens > max_tokens) return;  // the whole cluster
  ClusterArrive();
  const int slot = batch.state_slot[sequence];

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int quad = threadIdx.x % 8;
  const int row_group = threadIdx.x / 8;
  const int64_t piece = static_cast<int64_t>(head) * kStepDim * kStepDim + block * kStepColumns + quad * 4;
  float state[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (slot >= 0) {
      LoadFloats<4>(reinterpret_cast<const StateT*>(KdaStateSlot(p, slot)) + piece + (row_group + 32 * i) * kStepDim,
                    state[i]);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) state[i][c] = 0;
    }
  }
  const auto store_state = [&](int to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      StoreFloats<4>(reinterpret_cast<StateT*>(KdaStateSlot(p, to)) + piece + (row_group + 32 * i) * kStepDim,
                     state[i]);
    }
  };

  const KdaInputs<T> inputs = MakeKdaInputs<T>(p, begin, slot);
  const int64_t width = static_cast<int64_t>(p.heads) * kStepDim;
  // Convolution states are written by the block whose channels they are; block 0 has those of q and k.
  const auto store_conv = [&](int rows, int to) {
    char* target = KdaConvSlot(p, to);
    if (block == 0) {
      StoreConvChannel(inputs, rows, threadIdx.x / kStepDim * width + head * kStepDim + threadIdx.x % kStepDim, target);
    }
    if (threadIdx.x < kStepColumns) {
      StoreConvChannel(inputs, rows, 2 * width + head * kStepDim + block * kStepColumns + threadIdx.x, target);
    }
  };

  int snapshot = batch.num_snapshots > 0 ? FirstSnapshot(batch, begin) : 0;
  for (int first = 0, group = 0; first < tokens; first += kStepTokens, group ^= 1) {
    const int count = min(kStepTokens, tokens - first);
    // Per token three pieces of work for a warp: q, k, and the rest.
    for (int work = warp; work < 3 * count; work += kStepWarps) {
      const int t = work / 3, row = first + t;
      const int64_t token = begin + row;
      if (work % 3 < 2) {
        float x[4];
        ConvFour(inputs, p.conv_taps, row, work % 3 * width + head * kStepDim + 4 * lane, aligned, x);
        float square = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) square = fmaf(x[i], x[i], square);
        float scale = rsqrtf(WarpSum(square) + kL2NormEps);
        if (work % 3 == 0) scale *= rsqrtf(static_cast<float>(kStepDim));
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] *= scale;
        StoreFloats<4>((work % 3 == 0 ? s.q[t] : s.k[t]) + 4 * lane, x);
      } else {
        const float rate = expf(p.a_log[head]);
        float z[4], bias[4];
        LoadFour(static_cast<const T*>(p.decay.data) + token * p.decay.ld + head * kStepDim + 4 * lane, aligned, z);
        LoadFloats<4>(p.dt_bias + head * kStepDim + 4 * lane, bias);
#pragma unroll
        for (int i = 0; i < 4; ++i) z[i] = expf(KdaLogDecay(p, rate, z[i] + bias[i]));
        StoreFloats<4>(s.decay[t] + 4 * lane, z);
        if (lane < kStepColumns / 4) {
          float v[4];
          ConvFour(inputs, p.conv_taps, row, 2 * width + head * kStepDim + block * kStepColumns + 4 * lane, aligned, v);
          StoreFloats<4>(s.v[t] + 4 * lane, v);
        }
        if (lane == 0) s.beta[t] = Sigmoid(ToFloat(static_cast<const T*>(p.beta.data)[token * p.beta.ld + head]));
      }
    }
    __syncthreads();

    for (int t = 0; t < count; ++t) {
      const int parity = t % 2;
      float sums[8] = {};
      float key_query = 0;
      float k[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row_group + 32 * i;
        k[i] = s.k[t][r];
        const float q = s.q[t][r], decay = s.decay[t][r];
        key_query = fmaf(k[i], q, key_query);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          state[i][c] *= decay;
          sums[c] = fmaf(state[i][c], k[i], sums[c]);
          sums[4 + c] = fmaf(state[i][c], q, sums[4 + c]);
        }
      }
#pragma unroll
      for (int offset = 8; offset < 32; offset *= 2) {
#pragma unroll
        for (int c = 0; c < 8; ++c) sums[c] += __shfl_xor_sync(kAllLanes, sums[c], offset);
        key_query += __shfl_xor_sync(kAllLanes, key_query, offset);
      }
      if (lane < 8) StoreFloats<8>(s.partial[parity][warp][lane], sums);
      if (lane == 0) s.key_query[parity][warp] = key_query;
      __syncthreads();
      float u[4] = {}, o[4] = {};
      key_query = 0;
#pragma unroll
      for (int w = 0; w < kStepWarps; ++w) {
        LoadFloats<8>(s.partial[parity][w][quad], sums);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          u[c] += sums[c];
          o[c] += sums[4 + c];
        }
        key_query += s.key_query[parity][w];
      }
      const float beta = s.beta[t];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        u[c] = beta * (s.v[t][4 * quad + c] - u[c]);
        o[c] = fmaf(key_query, u[c], o[c]);
#pragma unroll
        for (int i = 0; i < 4; ++i) state[i][c] = fmaf(k[i], u[c], state[i][c]);
      }
      if (row_group == 0) StoreFloats<4>(s.output[t] + 4 * quad, o);
      for (; snapshot < batch.num_snapshots && batch.snapshot_row[snapshot] == begin + first + t; ++snapshot) {
        store_state(batch.snapshot_slot[snapshot]);
        store_conv(first + t + 1, batch.snapshot_slot[snapshot]);
      }
    }
    __syncthreads();

    // Gated norm: warp t finishes token t of the group.
    float o = 0;
    if (first == 0) ClusterWait();  // the other blocks run, so their shared memory may be written
    if (warp < count) {
      o = s.output[warp][lane];
      const float square = WarpSum(o * o);
      if (lane < kStepBlocks) *InBlock(&s.square[group][block][warp], lane) = square;
    }
    ClusterArrive();
    ClusterWait();
    if (warp < count) {
      float square = 0;
#pragma unroll
      for (int b = 0; b < kStepBlocks; ++b) square += s.square[group][b][warp];
      const int64_t token = begin + first + warp;
      const int64_t column = head * kStepDim + block * kStepColumns + lane;
      const float gate = Sigmoid(ToFloat(static_cast<const T*>(p.gate.data)[token * p.gate.ld + column]));
      const float scale = rsqrtf(square / kStepDim + p.norm_eps);
      static_cast<T*>(p.out.data)[token * p.out.ld + column] =
          FromFloat<T>(o * scale * p.norm_weight[block * kStepColumns + lane] * gate);
    }
  }
  // All blocks have read the old convolution state by the first cluster barrier.
  if (slot >= 0) {
    store_state(slot);
    store_conv(tokens, slot);
  }
}

}  // namespace k3::cuda
