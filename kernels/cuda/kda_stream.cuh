#pragma once

#include "kernels/cuda/kda_step.cuh"

// The step of kda_step.cuh for many states: slower for each, but it reads and writes memory faster.
//
// An item is a (sequence, head): 64 KiB of consecutive state. Blocks stay resident and take items in turn; the copy
// engine brings the states of the next two while one is worked on, and takes finished ones back. Within an item thread
// (warp, lane) holds rows warp + 16 i of columns 4 lane .. 4 lane + 3 in registers, so that of each token only the sums
// over rows go through shared memory. Thread t < 384 prepares channel t of q | k | v, the others the decays; a token's
// inputs are fetched while the one before is worked on.
namespace k3::cuda {

constexpr int kStreamThreads = 512;
constexpr int kStreamWarps = kStreamThreads / 32;
constexpr int kStreamRows = kStepDim / kStreamWarps;  // of a thread
constexpr int kStreamStages = 3;

template <typename StateT>
struct KdaStreamShared {
  alignas(128) StateT state[kStreamStages][kStepDim * kStepDim];
  float partial[2][kStreamWarps][kStepDim];     // prediction | output, over the rows of a warp
  float q[kStepDim], k[kStepDim], v[kStepDim];  // after the convolution; q and k not yet normalised
  float decay[kStepDim];                        // exp(g) - 1: near 1 a rounded exp(g) would err alike at every token
  float u[kStepDim], o[kStepDim];
  float square[8];  // over the channels of the four warps of q, then of k
  float output_square[4];
  float key_query;
  float beta;
  uint64_t full[kStreamStages];
};

// What a thread fetches for a token, as it lies in memory, so that nothing waits for it before it is used: a channel's
// window of raw inputs and its taps, or for a decay (logit, beta logit) and (bias, A_log).
template <typename T>
struct KdaStreamInput {
  T x[kStepTaps];
  float weight[kStepTaps];
};

// Sequences of more than max_tokens are left alone.
template <typename T, typename StateT>
__global__ void __launch_bounds__(kStreamThreads, 1) KdaStreamKernel(KdaParams p, SequenceBatch batch, int max_tokens) {
  using Shared = KdaStreamShared<StateT>;
  Shared& s = *DynamicShared<Shared>();
  constexpr uint32_t kStateBytes = kStepDim * kStepDim * sizeof(StateT);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int part = tid / kStepDim, c = tid % kStepDim;  // q, k, v, decay
  const int items = batch.num_sequences * p.heads;
  const int64_t width = static_cast<int64_t>(p.heads) * kStepDim;

  const auto tokens_of = [&](int item) {
    const int sequence = item / p.heads;
    return batch.token_begin[sequence + 1] - batch.token_begin[sequence];
  };
  // The first item from `item` on that is this block's and short enough.
  const auto next_item = [&](int item) {
    while (item < items) {
      const int tokens = tokens_of(item);
      if (tokens >= 1 && tokens <= max_tokens) break;
      item += gridDim.x;
    }
    return item;
  };
  const auto state_of = [&](int slot, int head) {
    return reinterpret_cast<StateT*>(KdaStateSlot(p, slot)) + static_cast<int64_t>(head) * kStepDim * kStepDim;
  };
  const auto fetch_state = [&](int item, int stage) {  // by one thread
    if (item >= items) return;
    const int slot = batch.state_slot[item / p.heads];
    if (slot < 0) return;
    BarrierArriveExpect(&s.full[stage], kStateBytes);
    CopyBulk(s.state[stage], state_of(slot, item % p.heads), kStateBytes, &s.full[stage]);
  };
  const auto fetch_input = [&](int item, int token) {
    KdaStreamInput<T> in = {};
    if (item >= items) return in;
    const int sequence = item / p.heads, head = item % p.heads;
    const int begin = batch.token_begin[sequence];
    const int64_t channel = static_cast<int64_t>(head) * kStepDim + c;
    if (part < 3) {
      const KdaInputs<T> inputs = MakeKdaInputs<T>(p, begin, batch.state_slot[sequence]);
#pragma unroll
      for (int j = 0; j < kStepTaps; ++j) {
        const T* row = inputs.Row(token - (kStepTaps - 1) + j);
        if (row != nullptr) in.x[j] = row[part * width + channel];
      }
      const float4 taps = *reinterpret_cast<const float4*>(p.conv_taps + (part * width + channel) * kStepTaps);
      in.weight[0] = taps.x, in.weight[1] = taps.y, in.weight[2] = taps.z, in.weight[3] = taps.w;
    } else {
      const int64_t row = begin + token;
      in.x[0] = static_cast<const T*>(p.decay.data)[row * p.decay.ld + channel];
      in.x[1] = static_cast<const T*>(p.beta.data)[row * p.beta.ld + head];
      in.weight[0] = p.dt_bias[channel];
      in.weight[1] = p.a_log[head];
    }
    return in;
  };

  int item = next_item(blockIdx.x);
  if (item >= items) return;
  int following = next_item(item + gridDim.x);
  if (tid == 0) {
    for (int stage = 0; stage < kStreamStages; ++stage) BarrierInit(&s.full[stage], 1);
    BarrierInitFence();
    fetch_state(item, 0);
    fetch_state(following, 1);
  }
  const float norm_weight = p.norm_weight[c];
  KdaStreamInput<T> input = fetch_input(item, 0);
  unsigned arrived = 0;  // parity of each stage's next arrival, a bit a stage
  __syncthreads();

  for (int turn = 0; item < items; ++turn) {
    const int stage = turn % kStreamStages;
    const int sequence = item / p.heads, head = item % p.heads;
    const int begin = batch.token_begin[sequence], tokens = tokens_of(item);
    const int slot = batch.state_slot[sequence];
    const int after_following = next_item(following + gridDim.x);
    const int64_t channel = static_cast<int64_t>(head) * kStepDim + c;
    int snapshot = batch.num_snapshots > 0 ? FirstSnapshot(batch, begin) : 0;
    float state[kStreamRows][4];

    for (int token = 0; token < tokens; ++token) {
      const bool last = token + 1 == tokens;
      const KdaStreamInput<T> current = input;
      if (part < 3) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kStepTaps; ++j) sum = fmaf(current.weight[j], ToFloat(current.x[j]), sum);
        sum = Rounded<T>(Silu(sum));
        (part == 0 ? s.q : part == 1 ? s.k : s.v)[c] = sum;
        if (part < 2) {
          const float square = WarpSum(sum * sum);
          if (lane == 0) s.square[warp] = square;
        }
      } else {
        s.decay[c] = expm1f(KdaLogDecay(p, expf(current.weight[1]), ToFloat(current.x[0]) + current.weight[0]));
        if (c == 0) s.beta = Sigmoid(ToFloat(current.x[1]));
      }
      input = last ? fetch_input(following, 0) : fetch_input(item, token + 1);
      T gate = {};
      if (part == 0) gate = static_cast<const T*>(p.gate.data)[(begin + token) * p.gate.ld + channel];
      __syncthreads();

      if (token == 0) {
        if (slot >= 0) {
          BarrierWait(&s.full[stage], arrived >> stage & 1);
          arrived ^= 1u << stage;
        }
#pragma unroll
        for (int i = 0; i < kStreamRows; ++i) {
          if (slot >= 0) {
            LoadFloats<4>(s.state[stage] + (warp + kStreamWarps * i) * kStepDim + 4 * lane, state[i]);
          } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) state[i][e] = 0;
          }
        }
      }
      const float scale_q = rsqrtf(s.square[0] + s.square[1] + s.square[2] + s.square[3] + kL2NormEps) *
                            rsqrtf(static_cast<float>(kStepDim));
      const float scale_k = rsqrtf(s.square[4] + s.square[5] + s.square[6] + s.square[7] + kL2NormEps);
      float k[kStreamRows], prediction[4] = {}, output[4] = {};
#pragma unroll
      for (int i = 0; i < kStreamRows; ++i) {
        const int r = warp + kStreamWarps * i;
        k[i] = s.k[r] * scale_k;
        const float q = s.q[r] * scale_q, decay = s.decay[r];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          state[i][e] = fmaf(state[i][e], decay, state[i][e]);
          prediction[e] = fmaf(state[i][e], k[i], prediction[e]);
          output[e] = fmaf(state[i][e], q, output[e]);
        }
      }
      StoreFloats<4>(&s.partial[0][warp][4 * lane], prediction);
      StoreFloats<4>(&s.partial[1][warp][4 * lane], output);
      __syncthreads();

      if (part < 2) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kStreamWarps; ++w) sum += s.partial[part][w][c];
        if (part == 0) {
          s.u[c] = s.beta * (s.v[c] - sum);
        } else {
          s.o[c] = sum;
        }
      } else if (warp == 8) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kStepDim; i += 32) sum = fmaf(s.k[i + lane] * scale_k, s.q[i + lane] * scale_q, sum);
        sum = WarpSum(sum);
        if (lane == 0) s.key_query = sum;
      }
      __syncthreads();

      float u[4];
      LoadFloats<4>(s.u + 4 * lane, u);
#pragma unroll
      for (int i = 0; i < kStreamRows; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state[i][e] = fmaf(k[i], u[e], state[i][e]);
        if (last && slot >= 0)
          StoreFloats<4>(s.state[stage] + (warp + kStreamWarps * i) * kStepDim + 4 * lane, state[i]);
      }
      float o = 0;
      if (part == 0) {
        o = fmaf(s.key_query, s.u[c], s.o[c]);
        const float square = WarpSum(o * o);
        if (lane == 0) s.output_square[warp] = square;
      }
      for (; snapshot < batch.num_snapshots && batch.snapshot_row[snapshot] == begin + token; ++snapshot) {
        const int to = batch.snapshot_slot[snapshot];
#pragma unroll
        for (int i = 0; i < kStreamRows; ++i) {
          StoreFloats<4>(state_of(to, head) + (warp + kStreamWarps * i) * kStepDim + 4 * lane, state[i]);
        }
        if (part < 3) {
#pragma unroll
          for (int j = 1; j < kStepTaps; ++j) {
            reinterpret_cast<T*>(KdaConvSlot(p, to))[(j - 1) * 3 * width + part * width + channel] = current.x[j];
          }
        }
      }
      if (last && slot >= 0) {
        FenceSharedForCopy();
        // The window of the last token is the new convolution state.
        if (part < 3) {
#pragma unroll
          for (int j = 1; j < kStepTaps; ++j) {
            reinterpret_cast<T*>(KdaConvSlot(p, slot))[(j - 1) * 3 * width + part * width + channel] = current.x[j];
          }
        }
      }
      if (last && tid == 0) {
        // The stage of the item before this one is free once its copy out has read it.
        CopyBulkOutWaitRead();
        fetch_state(after_following, (turn + 2) % kStreamStages);
      }
      __syncthreads();
      if (last && slot >= 0 && tid == 0) CopyBulkOut(state_of(slot, head), s.state[stage], kStateBytes);
      if (part == 0) {
        const float square = s.output_square[0] + s.output_square[1] + s.output_square[2] + s.output_square[3];
        const float scale = rsqrtf(square / kStepDim + p.norm_eps);
        static_cast<T*>(p.out.data)[(begin + token) * p.out.ld + channel] =
            FromFloat<T>(o * scale * norm_weight * Sigmoid(ToFloat(gate)));
      }
    }
    item = following;
    following = after_following;
  }
  // Shared memory must outlive the copies out of it.
  if (tid == 0) CopyBulkOutWaitRead();
}

}  // namespace k3::cuda
