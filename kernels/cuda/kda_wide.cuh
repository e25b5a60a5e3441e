#pragma once

#include "kernels/cuda/kda_step.cuh"

// The step of kda_step.cuh for a batch of single tokens that fills the device. Here a warp owns whole rows of the
// state, and the warps add their sums up in shared memory: accesses are 512 bytes of memory in a row, which it serves
// faster than pieces of columns. A batch of few states is faster with more threads a state.
//
// Up to a few waves of blocks the memory is busiest with four blocks a multiprocessor, for which half of a state waits
// in shared memory instead of registers (kHeld). Of many waves, loads, arithmetic and stores would take turns at the
// memory: there each of two blocks a multiprocessor asks the second-level cache for the state that lies as many items
// further on as there are multiprocessors, of a block that starts later.
//
// Blocks of the first wave have their states before the launch before has ended. Then all of them compute and store in
// step, for 6 us (of 64 sequences, from the end of the launch before to the first load of a second block in its place):
// meanwhile some of them have the cache fetch states of the second wave. Earlier the launch before would end later.
namespace k3::cuda {

constexpr int kWideWarps = 4;
constexpr int kWideThreads = 32 * kWideWarps;
constexpr int kWideQuads = kStepDim / 4 / kWideWarps;  // quadruples of state rows of a warp

template <typename T, typename StateT, int kHeld>
struct KdaWideShared {
  alignas(16) float q[kStepDim];  // after the convolution, not yet normalised
  float k[kStepDim];
  float v[kStepDim];
  float decay[kStepDim];                   // exp(g) - 1: near 1 a rounded exp(g) would err alike at every token
  float partial[2][kWideWarps][kStepDim];  // prediction | output, over the rows of a warp
  T raw[kStepTaps][4][kStepDim];           // inputs as they lie in memory: q, k, v from three rows before, decay
  StateT held[kHeld > 0 ? 4 * kHeld : 1][kWideThreads][4];  // rows of the state; a thread touches only its own
  float beta;
};

// Every sequence has one token, sequence s row s. Rows of q, k, v, the gates and the output start at multiples of four
// elements. kHeld: quadruples of a warp's rows that wait in shared memory. resident: blocks that start at once; they
// read states before they wait for the launch before where they may (KdaParams::slots_settled), while blocks that find
// it done had better ask for their inputs first. few: up to a few waves, with the policy of kda_step.cuh, without which
// many waves are faster.
template <typename T, typename StateT, int kHeld, int kBlocks>
__global__ void __launch_bounds__(kWideThreads, kBlocks)
    KdaWideKernel(const KdaParams p, const SequenceBatch batch, int resident, int multiprocessors, bool few) {
  using Shared = KdaWideShared<T, StateT, kHeld>;
  constexpr int kOwn = kWideQuads - kHeld;
  Shared& s = *DynamicShared<Shared>();
  const int item = static_cast<int>(blockIdx.x + gridDim.x * blockIdx.y);
  const bool early = p.slots_settled && item < resident;
  if (!early) {
    GridDependencyWait();
    GridDependencyRelease();
  }
  // The remainder tells the compiler that `half` below is 0 or 1: 1 % of the time of many states.
  const int tid = threadIdx.x % kWideThreads, lane = tid % 32, warp = tid / 32;
  const int head = blockIdx.x, sequence = blockIdx.y;
  const int slot = batch.state_slot[sequence];
  const int width = p.heads * kStepDim;
  // Lane l of warp w holds columns 4 l .. 4 l + 3 of rows 4 (kWideWarps j + w) + e.
  const int corner = (head * kStepDim + 4 * warp) * kStepDim + 4 * lane;
  const auto offset = [](int i) { return (i / 4 * 4 * kWideWarps + i % 4) * kStepDim; };
  const int half = tid / 64, c = tid % 64 * 2;  // threads 0 to 63: channels of q, then v; others: k, then decay
  const int channel = head * kStepDim + c;
  // The raw inputs of this thread's channels; nobody else reads them.
  T* const raw = &s.raw[0][half][c];
  constexpr int kRow = 4 * kStepDim, kPart = 2 * kStepDim;
  float4 taps[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int part = 2 * n + half;
    if (part < 3) {
      const T* stored = reinterpret_cast<const T*>(KdaConvSlot(p, max(slot, 0))) + part * width + channel;
#pragma unroll
      for (int i = 0; i + 1 < kStepTaps; ++i)
        CopyPair<true>(raw + i * kRow + n * kPart, stored + i * 3 * width, slot >= 0);
      const float* from = p.conv_taps + (part * width + channel) * kStepTaps;
      taps[n][0] = *reinterpret_cast<const float4*>(from);
      taps[n][1] = *reinterpret_cast<const float4*>(from + kStepTaps);
    } else {
      taps[n][0].x = p.dt_bias[channel], taps[n][0].y = p.dt_bias[channel + 1];
      taps[n][0].z = p.a_log[head];
    }
  }
  T beta_logit = {};
  const auto fetch_row = [&] {
    const T* qkv = static_cast<const T*>(p.qkv.data) + sequence * p.qkv.ld + channel;
    const T* decay = static_cast<const T*>(p.decay.data) + sequence * p.decay.ld + channel;
    CopyPair<true>(raw + (kStepTaps - 1) * kRow, qkv + half * width, true);
    CopyPair<true>(raw + (kStepTaps - 1) * kRow + kPart, half == 0 ? qkv + 2 * width : decay, true);
    if (tid == 64) beta_logit = static_cast<const T*>(p.beta.data)[sequence * p.beta.ld + head];
    if (warp == 0) {
      PrefetchL2(static_cast<const T*>(p.gate.data) + sequence * p.gate.ld + head * kStepDim + 4 * lane);
    }
  };
  const uint64_t policy = few ? EvictFirstPolicy() : EvictNormalPolicy();
  float state[kOwn > 0 ? 4 * kOwn : 1][4];
  const auto load_state = [&] {
    if (slot >= 0) {
      const StateT* from = reinterpret_cast<const StateT*>(KdaStateSlot(p, slot)) + corner;
#pragma unroll
      for (int i = 0; i < 4 * kWideQuads; ++i) {
        if (i < 4 * kOwn) {
          LoadState(from + offset(i), policy, state[i]);
        } else {
          CopyState(s.held[i - 4 * kOwn][tid], from + offset(i), policy);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4 * kWideQuads; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (i < 4 * kOwn) state[i][e] = 0;
          if (i >= 4 * kOwn) s.held[i - 4 * kOwn][tid][e] = FromFloat<StateT>(0.0f);
        }
      }
    }
  };
  if (early) {
    load_state();
    GridDependencyWait();
    GridDependencyRelease();
  }
  fetch_row();
  if (!early) load_state();
  const int beyond = few ? 0 : multiprocessors;
  const int ahead = item >= resident ? beyond : item < multiprocessors ? resident : 0;
  if (ahead > 0 && tid == 0) {
    const int later = item + ahead, other = later / p.heads;
    const int other_slot = other < batch.num_sequences ? batch.state_slot[other] : -1;
    if (other_slot >= 0) {
      constexpr int kState = kStepDim * kStepDim;
      PrefetchBulkL2(reinterpret_cast<const StateT*>(KdaStateSlot(p, other_slot)) + later % p.heads * kState,
                     kState * sizeof(StateT));
    }
  }
  const int first_snapshot = batch.num_snapshots > 0 ? FirstSnapshot(batch, sequence) : 0;
  CopyAsyncCommit();
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
      for (int i = first_snapshot; i < batch.num_snapshots && batch.snapshot_row[i] == sequence; ++i) {
        store_window(batch.snapshot_slot[i]);
      }
      if (slot >= 0) store_window(slot);
    } else {
      const float decay[2] = {KdaDecayMinus1<T>(p, taps[n][0].z, x[3].Get(0), taps[n][0].x),
                              KdaDecayMinus1<T>(p, taps[n][0].z, x[3].Get(1), taps[n][0].y)};
      StoreFloats<2>(&s.decay[c], decay);
      if (c == 0) s.beta = Sigmoid(ToFloat(beta_logit));
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
      float held[4];
      if (j >= kOwn) LoadFloats<4>(s.held[4 * (j - kOwn) + e][tid], held);
      float(&row)[4] = j < kOwn ? state[4 * j + e] : held;
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
  if (warp == 0) gated = FetchGated<true, T>(p, sequence, head, lane);
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
  StateT* const back = slot >= 0 ? reinterpret_cast<StateT*>(KdaStateSlot(p, slot)) + corner : nullptr;
#pragma unroll
  for (int j = 0; j < kWideQuads; ++j) {
    float k[4], d[4];
    LoadFloats<4>(s.k + 4 * (kWideWarps * j + warp), k);
    if (j >= kOwn) LoadFloats<4>(s.decay + 4 * (kWideWarps * j + warp), d);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float held[4];
      if (j >= kOwn) {
        LoadFloats<4>(s.held[4 * (j - kOwn) + e][tid], held);
#pragma unroll
        for (int i = 0; i < 4; ++i) held[i] = fmaf(held[i], d[e], held[i]);
      }
      float(&row)[4] = j < kOwn ? state[4 * j + e] : held;
#pragma unroll
      for (int i = 0; i < 4; ++i) row[i] = fmaf(k[e], ku[i], row[i]);
      for (int i = first_snapshot; i < batch.num_snapshots && batch.snapshot_row[i] == sequence; ++i) {
        StateT* to = reinterpret_cast<StateT*>(KdaStateSlot(p, batch.snapshot_slot[i])) + corner;
        StoreFloats<4>(to + offset(4 * j + e), row);
      }
      if (back != nullptr) StoreState(back + offset(4 * j + e), row, policy);
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
    StoreGatedNorm<true>(p, s.partial[1][0], gated, sequence, head, lane);
  }
}

}  // namespace k3::cuda
