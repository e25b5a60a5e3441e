#pragma once

#include "kernels/cuda/kda_step.cuh"

// The step of kda_step.cuh for a batch of single tokens that fills the device: four warps of 32 value columns, so that
// a warp's access of the state covers whole lines of 128 bytes. A batch of few states is faster with more threads a
// state.
namespace k3::cuda {

constexpr int kWideWarps = 4;
constexpr int kWideThreads = 32 * kWideWarps;
constexpr int kWideQuads = 8;  // quadruples of state rows of a lane

// Rows of q, k, v, the gates and the output start at multiples of four elements. Sequences of more than max_tokens are
// left alone, others of more than one token walked token by token.
template <typename T, typename StateT>
__global__ void __launch_bounds__(kWideThreads, 2)
    KdaWideKernel(const KdaParams p, const SequenceBatch batch, int max_tokens) {
  using Shared = KdaStepShared<T, 1>;
  Shared& s = *DynamicShared<Shared>();
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int head = blockIdx.x, sequence = blockIdx.y;
  const int begin = batch.token_begin[sequence], tokens = batch.token_begin[sequence + 1] - begin;
  const int slot = batch.state_slot[sequence];
  if (tokens < 1 || tokens > max_tokens) return;
  const int64_t width = static_cast<int64_t>(p.heads) * kStepDim;
  // The state: lane (group, octant) of a warp holds columns 32 warp + 4 octant .. + 3 of rows 16 j + 4 group + e.
  const int group = lane / 8, column = 32 * warp + lane % 8 * 4;
  const int corner = (head * kStepDim + 4 * group) * kStepDim + column;
  const uint64_t policy = EvictFirstPolicy();
  float state[4 * kWideQuads][4];
  int snapshot = batch.num_snapshots > 0 ? FirstSnapshot(batch, begin) : 0;

  for (int token = 0; token < tokens; ++token) {
    const bool last = token + 1 == tokens;
    const int64_t token_row = begin + token;
    {
      const int half = tid / 64, c = tid % 64 * 2;  // threads 0 to 63: channels of q, then v; others: k, then decay
      const int64_t channel = static_cast<int64_t>(head) * kStepDim + c;
      Pair<T> x[2][kStepTaps] = {};  // rows of the channels, from three before the token on; a decay in the first
      T beta_logit = {};
      float4 taps[2][2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int part = 2 * n + half;
        if (n == 0 || half == 0) {
          const T* stored =
              slot < 0 ? nullptr : reinterpret_cast<const T*>(KdaConvSlot(p, slot)) + part * width + channel;
          const T* row =
              static_cast<const T*>(p.qkv.data) + (token_row - (kStepTaps - 1)) * p.qkv.ld + part * width + channel;
#pragma unroll
          for (int i = 0; i < kStepTaps; ++i) {
            const int of = token - (kStepTaps - 1) + i;
            if (of >= 0) {
              x[n][i] = LoadPair(row, true);
            } else if (stored != nullptr) {
              x[n][i] = LoadPair(stored + (kStepTaps - 1 + of) * 3 * width, true);
            }
            row += p.qkv.ld;
          }
          const float* from = p.conv_taps + (part * width + channel) * kStepTaps;
          taps[n][0] = *reinterpret_cast<const float4*>(from);
          taps[n][1] = *reinterpret_cast<const float4*>(from + kStepTaps);
        } else {
          x[n][0] = LoadPair(static_cast<const T*>(p.decay.data) + token_row * p.decay.ld + channel, true);
          if (c == 0) beta_logit = static_cast<const T*>(p.beta.data)[token_row * p.beta.ld + head];
          taps[n][0].x = p.dt_bias[channel], taps[n][0].y = p.dt_bias[channel + 1];
          taps[n][0].z = p.a_log[head];
        }
      }
      if (warp == 0) {
        PrefetchL2(static_cast<const T*>(p.gate.data) + token_row * p.gate.ld + head * kStepDim + 4 * lane);
      }
      if (token == 0) {
        if (slot >= 0) {
          const StateT* from = reinterpret_cast<const StateT*>(KdaStateSlot(p, slot)) + corner;
#pragma unroll
          for (int i = 0; i < 4 * kWideQuads; ++i) {
            LoadState(from + (i / 4 * 16 + i % 4) * kStepDim, policy, state[i]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < 4 * kWideQuads; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) state[i][e] = 0;
          }
        }
      }
      // Nothing waits for the inputs before the loads of the state have been issued.
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < kStepTaps; ++i) PinPair(x[n][i]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int part = 2 * n + half;
        if (n == 0 || half == 0) {
          float* to = part == 0 ? s.q[0] : part == 1 ? s.k[0] : s.v[0];
          float sums[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float y = taps[n][e].x * x[n][0].Get(e);
            y = fmaf(taps[n][e].y, x[n][1].Get(e), y);
            y = fmaf(taps[n][e].z, x[n][2].Get(e), y);
            y = fmaf(taps[n][e].w, x[n][3].Get(e), y);
            sums[e] = Rounded<T>(Silu(y));
          }
          StoreFloats<2>(to + c, sums);
          const auto store_window = [&](int to_slot) {
            T* conv = reinterpret_cast<T*>(KdaConvSlot(p, to_slot)) + part * width + channel;
#pragma unroll
            for (int j = 1; j < kStepTaps; ++j) *reinterpret_cast<Pair<T>*>(conv + (j - 1) * 3 * width) = x[n][j];
          };
          for (int i = snapshot; i < batch.num_snapshots && batch.snapshot_row[i] == token_row; ++i) {
            store_window(batch.snapshot_slot[i]);
          }
          if (last && slot >= 0) store_window(slot);
        } else {
          const float decay[2] = {KdaDecayMinus1<T>(p, taps[n][0].z, x[n][0].Get(0), taps[n][0].x),
                                  KdaDecayMinus1<T>(p, taps[n][0].z, x[n][0].Get(1), taps[n][0].y)};
          StoreFloats<2>(&s.decay[0][c], decay);
          if (c == 0) s.beta[0] = Sigmoid(ToFloat(beta_logit));
        }
      }
    }
    __syncthreads();
    const KdaTokenScales scales = ComputeTokenScales(s.q[0], s.k[0], lane);
    float prediction[4] = {}, output[4] = {};
#pragma unroll
    for (int j = 0; j < kWideQuads; ++j) {
      float q[4], d[4], k[4];
      LoadFloats<4>(&s.k[0][16 * j + 4 * group], k);
      LoadFloats<4>(&s.q[0][16 * j + 4 * group], q);
      LoadFloats<4>(&s.decay[0][16 * j + 4 * group], d);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float(&row)[4] = state[4 * j + e];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          row[i] = fmaf(row[i], d[e], row[i]);
          prediction[i] = fmaf(row[i], k[e], prediction[i]);
          output[i] = fmaf(row[i], q[e], output[i]);
        }
      }
    }
    // Sums over the groups. Of the lanes with equal lane % 8 the lower two end with two predictions each, the upper two
    // with two outputs.
    const bool upper = (lane & 16) != 0, odd = (lane & 8) != 0;
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i] = (upper ? output[i] : prediction[i]) + __shfl_xor_sync(kAllLanes, upper ? prediction[i] : output[i], 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = (odd ? sum[i + 2] : sum[i]) + __shfl_xor_sync(kAllLanes, odd ? sum[i] : sum[i + 2], 8);
    }
    const int own = column + (odd ? 2 : 0);
    float v[2], own_u[2], u[4];
    LoadFloats<2>(&s.v[0][own], v);
#pragma unroll
    for (int i = 0; i < 2; ++i) own_u[i] = s.beta[0] * fmaf(-scales.k, sum[i], v[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) u[i] = __shfl_sync(kAllLanes, own_u[i % 2], lane % 8 + i / 2 * 8);
    if (upper) {
      const float o[2] = {fmaf(scales.key_query, odd ? u[2] : u[0], scales.q * sum[0]),
                          fmaf(scales.key_query, odd ? u[3] : u[1], scales.q * sum[1])};
      StoreFloats<2>(&s.o[0][own], o);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) u[i] *= scales.k;
#pragma unroll
    for (int j = 0; j < kWideQuads; ++j) {
      float k[4];
      LoadFloats<4>(&s.k[0][16 * j + 4 * group], k);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state[4 * j + e][i] = fmaf(k[e], u[i], state[4 * j + e][i]);
      }
    }
    for (; snapshot < batch.num_snapshots && batch.snapshot_row[snapshot] == token_row; ++snapshot) {
      StateT* to = reinterpret_cast<StateT*>(KdaStateSlot(p, batch.snapshot_slot[snapshot])) + corner;
#pragma unroll
      for (int i = 0; i < 4 * kWideQuads; ++i) StoreFloats<4>(to + (i / 4 * 16 + i % 4) * kStepDim, state[i]);
    }
    if (last && slot >= 0) {
      StateT* to = reinterpret_cast<StateT*>(KdaStateSlot(p, slot)) + corner;
#pragma unroll
      for (int i = 0; i < 4 * kWideQuads; ++i) StoreState(to + (i / 4 * 16 + i % 4) * kStepDim, state[i], policy);
    }
    __syncthreads();
    if (warp == 0) {
      StoreGatedNorm<true>(p, s.o[0], FetchGated<true, T>(p, token_row, head, lane), token_row, head, lane);
    }
  }
}

}  // namespace k3::cuda
