#pragma once

#include "kernels/cuda/kda_step.cuh"

// The step of kda_step.cuh for a batch of single tokens that fills the device. Here a warp owns whole rows of the
// state, and the warps add their sums up in shared memory: accesses are 512 bytes of memory in a row, which it serves
// faster than pieces of columns. A batch of few states is faster with more threads a state.
//
// The blocks of a large batch come in waves, whose loads, arithmetic and stores would take turns at the memory. So each
// block asks the second-level cache for the state that lies `ahead` items further on, of a block that starts later.
namespace k3::cuda {

constexpr int kWideWarps = 4;
constexpr int kWideThreads = 32 * kWideWarps;
constexpr int kWideQuads = kStepDim / 4 / kWideWarps;  // quadruples of state rows of a warp

template <typename T>
struct KdaWideShared {
  alignas(16) float q[kStepDim];  // after the convolution, not yet normalised
  float k[kStepDim];
  float v[kStepDim];
  float decay[kStepDim];                   // exp(g) - 1: near 1 a rounded exp(g) would err alike at every token
  float partial[2][kWideWarps][kStepDim];  // prediction | output, over the rows of a warp
  T raw[kStepTaps][4][kStepDim];           // inputs as they lie in memory: q, k, v from three rows before, decay
  float beta;
};

// Rows of q, k, v, the gates and the output start at multiples of four elements. Sequences of more than max_tokens are
// left alone, others of more than one token walked token by token. ahead: 0 for no prefetch.
template <typename T, typename StateT>
__global__ void __launch_bounds__(kWideThreads, 2)
    KdaWideKernel(const KdaParams p, const SequenceBatch batch, int max_tokens, int ahead) {
  GridDependencyWait();
  GridDependencyRelease();
  using Shared = KdaWideShared<T>;
  Shared& s = *DynamicShared<Shared>();
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int head = blockIdx.x, sequence = blockIdx.y;
  const int begin = batch.token_begin[sequence], tokens = batch.token_begin[sequence + 1] - begin;
  const int slot = batch.state_slot[sequence];
  if (tokens < 1 || tokens > max_tokens) return;
  const int64_t width = static_cast<int64_t>(p.heads) * kStepDim;
  // Lane l of warp w holds columns 4 l .. 4 l + 3 of rows 4 (kWideWarps j + w) + e.
  const int corner = (head * kStepDim + 4 * warp) * kStepDim + 4 * lane;
  const auto offset = [](int i) { return (i / 4 * 4 * kWideWarps + i % 4) * kStepDim; };
  const uint64_t policy = EvictFirstPolicy();
  float state[4 * kWideQuads][4];
  int snapshot = batch.num_snapshots > 0 ? FirstSnapshot(batch, begin) : 0;

  for (int token = 0; token < tokens; ++token) {
    const bool last = token + 1 == tokens;
    const int64_t token_row = begin + token;
    {
      const int half = tid / 64, c = tid % 64 * 2;  // threads 0 to 63: channels of q, then v; others: k, then decay
      const int64_t channel = static_cast<int64_t>(head) * kStepDim + c;
      // The raw inputs of this thread's channels; nobody else reads them.
      T* const raw = &s.raw[0][half][c];
      constexpr int kRow = 4 * kStepDim, kPart = 2 * kStepDim;
      T beta_logit = {};
      float4 taps[2][2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int part = 2 * n + half;
        if (part < 3) {
          const T* stored =
              slot < 0 ? nullptr : reinterpret_cast<const T*>(KdaConvSlot(p, slot)) + part * width + channel;
          const T* row = static_cast<const T*>(p.qkv.data) + token_row * p.qkv.ld + part * width + channel;
#pragma unroll
          for (int i = 0; i < kStepTaps; ++i) {
            const int of = token - (kStepTaps - 1) + i;
            const bool valid = of >= 0 || stored != nullptr;
            const T* from = !valid    ? row
                            : of >= 0 ? row + (i - (kStepTaps - 1)) * p.qkv.ld
                                      : stored + (kStepTaps - 1 + of) * 3 * width;
            CopyPair<true>(raw + i * kRow + n * kPart, from, valid);
          }
          const float* from = p.conv_taps + (part * width + channel) * kStepTaps;
          taps[n][0] = *reinterpret_cast<const float4*>(from);
          taps[n][1] = *reinterpret_cast<const float4*>(from + kStepTaps);
        } else {
          CopyPair<true>(raw + n * kPart, static_cast<const T*>(p.decay.data) + token_row * p.decay.ld + channel, true);
          if (c == 0) beta_logit = static_cast<const T*>(p.beta.data)[token_row * p.beta.ld + head];
          taps[n][0].x = p.dt_bias[channel], taps[n][0].y = p.dt_bias[channel + 1];
          taps[n][0].z = p.a_log[head];
        }
      }
      CopyAsyncCommit();
      if (warp == 0) {
        PrefetchL2(static_cast<const T*>(p.gate.data) + token_row * p.gate.ld + head * kStepDim + 4 * lane);
      }
      if (token == 0) {
        if (slot >= 0) {
          const StateT* from = reinterpret_cast<const StateT*>(KdaStateSlot(p, slot)) + corner;
#pragma unroll
          for (int i = 0; i < 4 * kWideQuads; ++i) {
            LoadState(from + offset(i), policy, state[i]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < 4 * kWideQuads; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) state[i][e] = 0;
          }
        }
      }
      if (ahead > 0 && token == 0 && tid == 0) {
        const int item = sequence * p.heads + head + ahead, other = item / p.heads;
        const int other_slot = other < batch.num_sequences ? batch.state_slot[other] : -1;
        if (other_slot >= 0) {
          constexpr int kState = kStepDim * kStepDim;
          PrefetchBulkL2(reinterpret_cast<const StateT*>(KdaStateSlot(p, other_slot)) + item % p.heads * kState,
                         kState * sizeof(StateT));
        }
      }
      CopyAsyncWait<0>();
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int part = 2 * n + half;
        Pair<T> x[kStepTaps];
#pragma unroll
        for (int i = 0; i < kStepTaps; ++i) x[i] = *reinterpret_cast<const Pair<T>*>(raw + i * kRow + n * kPart);
        if (part < 3) {
          float* to = part == 0 ? s.q : part == 1 ? s.k : s.v;
          float sums[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float y = taps[n][e].x * x[0].Get(e);
            y = fmaf(taps[n][e].y, x[1].Get(e), y);
            y = fmaf(taps[n][e].z, x[2].Get(e), y);
            y = fmaf(taps[n][e].w, x[3].Get(e), y);
            sums[e] = Rounded<T>(Silu(y));
          }
          StoreFloats<2>(to + c, sums);
          const auto store_window = [&](int to_slot) {
            T* conv = reinterpret_cast<T*>(KdaConvSlot(p, to_slot)) + part * width + channel;
#pragma unroll
            for (int j = 1; j < kStepTaps; ++j) *reinterpret_cast<Pair<T>*>(conv + (j - 1) * 3 * width) = x[j];
          };
          for (int i = snapshot; i < batch.num_snapshots && batch.snapshot_row[i] == token_row; ++i) {
            store_window(batch.snapshot_slot[i]);
          }
          if (last && slot >= 0) store_window(slot);
        } else {
          const float decay[2] = {KdaDecayMinus1<T>(p, taps[n][0].z, x[0].Get(0), taps[n][0].x),
                                  KdaDecayMinus1<T>(p, taps[n][0].z, x[0].Get(1), taps[n][0].y)};
          StoreFloats<2>(&s.decay[c], decay);
          if (c == 0) s.beta = Sigmoid(ToFloat(beta_logit));
        }
      }
    }
    __syncthreads();
    const KdaTokenScales scales = ComputeTokenScales(s.q, s.k, lane);
    float prediction[4] = {}, output[4] = {};
#pragma unroll
    for (int j = 0; j < kWideQuads; ++j) {
      const int row0 = 4 * (kWideWarps * j + warp);
      float q[4], d[4], k[4];
      LoadFloats<4>(s.k + row0, k);
      LoadFloats<4>(s.q + row0, q);
      LoadFloats<4>(s.decay + row0, d);
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
    StoreFloats<4>(&s.partial[0][warp][4 * lane], prediction);
    StoreFloats<4>(&s.partial[1][warp][4 * lane], output);
    KdaGated<T> gated = {};
    if (warp == 0) gated = FetchGated<true, T>(p, token_row, head, lane);
    __syncthreads();
    float sum[4] = {}, u[4], v[4];
#pragma unroll
    for (int w = 0; w < kWideWarps; ++w) {
      float part[4];
      LoadFloats<4>(&s.partial[0][w][4 * lane], part);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += part[i];
    }
    LoadFloats<4>(s.v + 4 * lane, v);
#pragma unroll
    for (int i = 0; i < 4; ++i) u[i] = s.beta * fmaf(-scales.k, sum[i], v[i]);
    float ku[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ku[i] = u[i] * scales.k;
#pragma unroll
    for (int j = 0; j < kWideQuads; ++j) {
      float k[4];
      LoadFloats<4>(s.k + 4 * (kWideWarps * j + warp), k);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state[4 * j + e][i] = fmaf(k[e], ku[i], state[4 * j + e][i]);
      }
    }
    for (; snapshot < batch.num_snapshots && batch.snapshot_row[snapshot] == token_row; ++snapshot) {
      StateT* to = reinterpret_cast<StateT*>(KdaStateSlot(p, batch.snapshot_slot[snapshot])) + corner;
#pragma unroll
      for (int i = 0; i < 4 * kWideQuads; ++i) StoreFloats<4>(to + offset(i), state[i]);
    }
    if (last && slot >= 0) {
      StateT* to = reinterpret_cast<StateT*>(KdaStateSlot(p, slot)) + corner;
#pragma unroll
      for (int i = 0; i < 4 * kWideQuads; ++i) {
        StoreState(to + offset(i), state[i], policy);
      }
    }
    if (warp == 0) {
      float o[4] = {};
#pragma unroll
      for (int w = 0; w < kWideWarps; ++w) {
        float part[4];
        LoadFloats<4>(&s.partial[1][w][4 * lane], part);
#pragma unroll
        for (int i = 0; i < 4; ++i) o[i] += part[i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) o[i] = fmaf(scales.key_query, u[i], scales.q * o[i]);
      __syncwarp();
      StoreFloats<4>(&s.partial[1][0][4 * lane], o);
      __syncwarp();
      StoreGatedNorm<true>(p, s.partial[1][0], gated, token_row, head, lane);
    }
    if (!last) __syncthreads();
  }
}

}  // namespace k3::cuda
