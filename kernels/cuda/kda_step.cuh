#pragma once

#include "kernels/cuda/kda_common.cuh"

// The fused KDA step for sequences of few tokens: convolution, norms, gates, recurrence and gated norm in one launch,
// the state read once and written once, in place, and held in registers between.
//
// A block works on one (sequence, head), whose state is 64 KiB of consecutive memory. Its loads are issued before
// anything is computed. A warp owns 16 value columns of all 128 rows, so that the recurrence needs no barrier: a
// token's prediction S'^T k and output come from the decayed state together, o = S'^T q + (k . q) u, are summed over
// the rows by shuffles, and u returns the same way. Only the gated norm couples the columns; it follows after the last
// token. Up to kChunk tokens are prepared at once: thread t % 64 of the four quarters of the block has two channels of
// q, k, v and the decays. q and k stay unnormalised, their scales are applied to the sums. kChunk = 1 and 8 give the
// same bits.
//
// States are touched with the evict-first policy: they come back a whole step later, and would push the small inputs of
// this and other kernels out of the second-level cache.
namespace k3::cuda {

constexpr int kStepDim = 128;
constexpr int kStepTaps = 4;
constexpr int kStepChunk = 8;  // most tokens that are prepared at once
constexpr int kStepWarps = 8;
constexpr int kStepThreads = 32 * kStepWarps;
constexpr int kStepQuads = 4;  // quadruples of state rows of a lane

template <typename T, int kChunk>
struct KdaStepShared {
  alignas(16) float q[kChunk][kStepDim];  // after the convolution, not yet normalised
  float k[kChunk][kStepDim];
  float v[kChunk][kStepDim];
  float decay[kChunk][kStepDim];  // exp(g) - 1: near 1 a rounded exp(g) would err alike at every token
  float o[kChunk][kStepDim];
  T raw[kChunk + kStepTaps - 1][4][kStepDim];  // inputs as they lie in memory: q, k, v from three rows before, decays
  float beta[kChunk];
  float scale_q[kChunk], scale_k[kChunk], key_query[kChunk];
};

// N elements by one access where rows are aligned.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> LoadPack(const T* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const Pack<T, N>*>(from);
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.v[i] = from[i];
  return pack;
}

// Two neighbouring channels as they lie in memory.
template <typename T>
struct Pair;
template <>
struct alignas(4) Pair<bf16> {
  uint32_t bits;
  __device__ __forceinline__ float Get(int e) const { return e == 0 ? LowBf16(bits) : HighBf16(bits); }
};
template <>
struct alignas(8) Pair<float> {
  uint32_t bits[2];
  __device__ __forceinline__ float Get(int e) const { return __uint_as_float(bits[e]); }
};
__device__ __forceinline__ Pair<bf16> LoadPair(const bf16* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const Pair<bf16>*>(from);
  const auto* halves = reinterpret_cast<const unsigned short*>(from);
  return {halves[0] | static_cast<uint32_t>(halves[1]) << 16};
}
__device__ __forceinline__ Pair<float> LoadPair(const float* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const Pair<float>*>(from);
  return {{__float_as_uint(from[0]), __float_as_uint(from[1])}};
}

// The values are used behind this point only.
__device__ __forceinline__ void PinPair(Pair<bf16>& pair) { Pin(pair.bits); }
__device__ __forceinline__ void PinPair(Pair<float>& pair) { Pin(pair.bits[0]), Pin(pair.bits[1]); }

// Starts the copy of two neighbouring elements to shared memory; zeros where not valid.
template <bool kAligned, typename T>
__device__ __forceinline__ void CopyPair(T* shared, const T* from, bool valid) {
  if constexpr (kAligned) {
    CopyAsyncSmall<2 * sizeof(T)>(shared, from, valid);
  } else {
    *reinterpret_cast<Pair<T>*>(shared) = valid ? LoadPair(from, false) : Pair<T>{};
  }
}

// Four neighbouring elements of a state.
__device__ __forceinline__ void LoadState(const float* from, uint64_t policy, float (&out)[4]) {
  const uint4 v = LoadHinted16(from, policy);
  out[0] = __uint_as_float(v.x), out[1] = __uint_as_float(v.y);
  out[2] = __uint_as_float(v.z), out[3] = __uint_as_float(v.w);
}
__device__ __forceinline__ void LoadState(const bf16* from, uint64_t, float (&out)[4]) { LoadFloats<4>(from, out); }
__device__ __forceinline__ void StoreState(float* to, const float (&v)[4], uint64_t policy) {
  StoreHinted16(to, {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])},
                policy);
}
__device__ __forceinline__ void StoreState(bf16* to, const float (&v)[4], uint64_t) { StoreFloats<4>(to, v); }

// Starts the copy of four neighbouring elements of a state to shared memory.
__device__ __forceinline__ void CopyState(float* shared, const float* from, uint64_t policy) {
  CopyAsyncHinted16(shared, from, policy);
}
__device__ __forceinline__ void CopyState(bf16* shared, const bf16* from, uint64_t) {
  CopyAsyncSmall<8>(shared, from, true);
}

// exp(x ln 2) - 1 for x <= 0 with a small relative error near 0.
__device__ __forceinline__ float Exp2Minus1(float x) {
  const float g = x * 0.6931471805599453f;
  const float tail = fmaf(g, fmaf(g, fmaf(g, 1.0f / 120, 1.0f / 24), 1.0f / 6), 0.5f);
  return x > -0.18f ? fmaf(g * g, tail, g) : Exp2(x) - 1.0f;
}

// exp(g) - 1. bf16 backends take the fast functions, as the chunked path does.
template <typename T>
__device__ __forceinline__ float KdaDecayMinus1(const KdaParams& p, float a_log, float logit, float bias) {
  if constexpr (sizeof(T) == 4) {
    return expm1f(KdaLogDecay(p, expf(a_log), logit + bias));
  } else {
    const float rate = Exp2(a_log * kLog2E);
    return Exp2Minus1(p.gate_kind == KdaGate::kBounded ? KdaLog2DecayFast<true>(p.gate_lower_bound, rate, logit, bias)
                                                       : KdaLog2DecayFast<false>(0, rate, logit, bias));
  }
}

// Factors of q, with the 1 / sqrt(d) of the output, and of k; k . q of the scaled vectors.
struct KdaTokenScales {
  float q, k, key_query;
};

// By a whole warp.
__device__ __forceinline__ KdaTokenScales ComputeTokenScales(const float* q_row, const float* k_row, int lane) {
  float q[4], k[4];
  LoadFloats<4>(q_row + 4 * lane, q);
  LoadFloats<4>(k_row + 4 * lane, k);
  float qq = 0, kk = 0, kq = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    qq = fmaf(q[e], q[e], qq);
    kk = fmaf(k[e], k[e], kk);
    kq = fmaf(k[e], q[e], kq);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    qq += __shfl_xor_sync(kAllLanes, qq, offset);
    kk += __shfl_xor_sync(kAllLanes, kk, offset);
    kq += __shfl_xor_sync(kAllLanes, kq, offset);
  }
  KdaTokenScales scales;
  scales.q = rsqrtf(qq + kL2NormEps) * 0.08838834764831845f;
  scales.k = rsqrtf(kk + kL2NormEps);
  scales.key_query = kq * scales.q * scales.k;
  return scales;
}

// What the gated norm of one token and head takes beside the output of the recurrence; lane l of a warp has channels 4
// l to 4 l + 3.
template <typename T>
struct KdaGated {
  Pack<T, 4> gate;
  float4 weight;
};

template <bool kAligned, typename T>
__device__ __forceinline__ KdaGated<T> FetchGated(const KdaParams& p, int64_t row, int head, int lane) {
  KdaGated<T> in;
  in.gate = LoadPack<4>(static_cast<const T*>(p.gate.data) + row * p.gate.ld + head * kStepDim + 4 * lane, kAligned);
  in.weight = *reinterpret_cast<const float4*>(p.norm_weight + 4 * lane);
  return in;
}

// By a whole warp.
template <bool kAligned, typename T>
__device__ __forceinline__ void StoreGatedNorm(const KdaParams& p, const float* output, const KdaGated<T>& in,
                                               int64_t row, int head, int lane) {
  float o[4];
  LoadFloats<4>(output + 4 * lane, o);
  float square = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) square = fmaf(o[e], o[e], square);
  square = WarpSum(square);
  const float scale = rsqrtf(fmaf(square, 1.0f / kStepDim, p.norm_eps));
  const float weight[4] = {in.weight.x, in.weight.y, in.weight.z, in.weight.w};
  Pack<T, 4> result;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    result.v[e] = FromFloat<T>(o[e] * scale * weight[e] * Sigmoid(ToFloat(in.gate.v[e])));
  }
  T* out = static_cast<T*>(p.out.data) + row * p.out.ld + head * kStepDim + 4 * lane;
  if (kAligned) {
    *reinterpret_cast<Pack<T, 4>*>(out) = result;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) out[e] = result.v[e];
  }
}

// Sequences of more than max_tokens are left alone. kAligned: rows of q, k, v, the gates and the output start at
// multiples of four elements. settled: KdaParams::slots_settled, of use to single tokens.
template <typename T, typename StateT, int kChunk, bool kAligned>
__global__ void __launch_bounds__(kStepThreads, 2)
    KdaStepKernel(const KdaParams p, const SequenceBatch batch, int max_tokens, bool settled) {
  using Shared = KdaStepShared<T, kChunk>;
  if (kChunk > 1 || !settled) {
    GridDependencyWait();
    GridDependencyRelease();
  }
  Shared& s = *DynamicShared<Shared>();
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int head = blockIdx.x, sequence = blockIdx.y;
  const int begin = batch.token_begin[sequence], tokens = batch.token_begin[sequence + 1] - begin;
  const int slot = batch.state_slot[sequence];
  if (tokens < 1 || tokens > max_tokens) {
    GridDependencyWait();
    return;
  }
  const int64_t width = static_cast<int64_t>(p.heads) * kStepDim;
  // The state: lane (group, quarter) of a warp holds columns 16 warp + 4 quarter .. + 3 of rows 32 j + 4 group + e.
  const int group = lane / 4, column = 16 * warp + lane % 4 * 4;
  const int corner = (head * kStepDim + 4 * group) * kStepDim + column;
  const uint64_t policy = EvictFirstPolicy();
  float state[4 * kStepQuads][4];
  const auto load_state = [&] {
    if (slot >= 0) {
      const StateT* from = reinterpret_cast<const StateT*>(KdaStateSlot(p, slot)) + corner;
#pragma unroll
      for (int i = 0; i < 4 * kStepQuads; ++i) {
        LoadState(from + (i / 4 * 32 + i % 4) * kStepDim, policy, state[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4 * kStepQuads; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state[i][e] = 0;
      }
    }
  };
  if (kChunk == 1 && settled) {
    load_state();
    GridDependencyWait();
    GridDependencyRelease();
  }
  int snapshot = batch.num_snapshots > 0 ? FirstSnapshot(batch, begin) : 0;

  for (int first = 0; first < tokens; first += kChunk) {
    const int count = kChunk == 1 ? 1 : min(kChunk, tokens - first);
    const bool last = first + kChunk >= tokens;
    {
      const int part = tid / 64, c = tid % 64 * 2;  // q, k, v, decay; the first of two channels
      const int64_t channel = static_cast<int64_t>(head) * kStepDim + c;
      // The raw inputs of this thread's channels, from three rows before the chunk on; nobody else reads them.
      T* const raw = &s.raw[0][part][c];
      constexpr int kRow = 4 * kStepDim;
      T beta_logit = {};
      float4 taps[2];
      if (part < 3) {
        const T* stored =
            slot < 0 ? nullptr : reinterpret_cast<const T*>(KdaConvSlot(p, slot)) + part * width + channel;
        const T* row = static_cast<const T*>(p.qkv.data) + (begin + first) * p.qkv.ld + part * width + channel;
#pragma unroll
        for (int i = 0; i < kStepTaps - 1; ++i) {
          const int token = first - (kStepTaps - 1) + i;
          const bool valid = token >= 0 || stored != nullptr;
          const T* from = !valid       ? row
                          : token >= 0 ? row + (i - (kStepTaps - 1)) * p.qkv.ld
                                       : stored + (kStepTaps - 1 + token) * 3 * width;
          CopyPair<kAligned>(raw + i * kRow, from, valid);
        }
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          if (i < count) CopyPair<kAligned>(raw + (kStepTaps - 1 + i) * kRow, row, true);
          row += p.qkv.ld;
        }
        const float* from = p.conv_taps + (part * width + channel) * kStepTaps;
        taps[0] = *reinterpret_cast<const float4*>(from);
        taps[1] = *reinterpret_cast<const float4*>(from + kStepTaps);
      } else {
        const T* row = static_cast<const T*>(p.decay.data) + (begin + first) * p.decay.ld + channel;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          if (i < count) CopyPair<kAligned>(raw + i * kRow, row, true);
          row += p.decay.ld;
        }
        if (tid % 64 < count) {
          beta_logit = static_cast<const T*>(p.beta.data)[(begin + first + tid % 64) * p.beta.ld + head];
        }
        taps[0].x = p.dt_bias[channel], taps[0].y = p.dt_bias[channel + 1];
        taps[0].z = p.a_log[head];
      }
      CopyAsyncCommit();
      if (warp < count) {
        PrefetchL2(static_cast<const T*>(p.gate.data) + (begin + first + warp) * p.gate.ld + head * kStepDim +
                   4 * lane);
      }
      if (first == 0 && (kChunk > 1 || !settled)) load_state();
      CopyAsyncWait<0>();
      const auto pair = [&](int i) { return *reinterpret_cast<const Pair<T>*>(raw + i * kRow); };
      if (part < 3) {
        float* to = (part == 0 ? s.q[0] : part == 1 ? s.k[0] : s.v[0]) + c;
        Pair<T> x0 = pair(0), x1 = pair(1), x2 = pair(2);
#pragma unroll(kChunk == 1 ? 1 : 2)
        for (int t = 0; t < count; ++t) {
          const Pair<T> x3 = pair(t + 3);
          float sums[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float y = taps[e].x * x0.Get(e);
            y = fmaf(taps[e].y, x1.Get(e), y);
            y = fmaf(taps[e].z, x2.Get(e), y);
            y = fmaf(taps[e].w, x3.Get(e), y);
            sums[e] = Rounded<T>(Silu(y));
          }
          StoreFloats<2>(to + t * kStepDim, sums);
          x0 = x1, x1 = x2, x2 = x3;
        }
        const auto store_window = [&](int to_slot, const Pair<T>& a, const Pair<T>& b, const Pair<T>& c) {
          T* conv = reinterpret_cast<T*>(KdaConvSlot(p, to_slot)) + part * width + channel;
          *reinterpret_cast<Pair<T>*>(conv) = a;
          *reinterpret_cast<Pair<T>*>(conv + 3 * width) = b;
          *reinterpret_cast<Pair<T>*>(conv + 6 * width) = c;
        };
        if (last && slot >= 0) store_window(slot, x0, x1, x2);
        for (int i = snapshot; i < batch.num_snapshots && batch.snapshot_row[i] < begin + first + count; ++i) {
          const int t = batch.snapshot_row[i] - begin - first;
          store_window(batch.snapshot_slot[i], pair(t + 1), pair(t + 2), pair(t + 3));
        }
      } else {
#pragma unroll(kChunk == 1 ? 1 : 2)
        for (int t = 0; t < count; ++t) {
          const Pair<T> z = pair(t);
          const float decay[2] = {KdaDecayMinus1<T>(p, taps[0].z, z.Get(0), taps[0].x),
                                  KdaDecayMinus1<T>(p, taps[0].z, z.Get(1), taps[0].y)};
          StoreFloats<2>(&s.decay[t][c], decay);
        }
        if (tid % 64 < count) s.beta[tid % 64] = Sigmoid(ToFloat(beta_logit));
      }
    }
    __syncthreads();
    KdaTokenScales scales;
    if constexpr (kChunk == 1) {
      scales = ComputeTokenScales(s.q[0], s.k[0], lane);
    } else {
      if (warp < count) {
        scales = ComputeTokenScales(s.q[warp], s.k[warp], lane);
        if (lane == 0) s.scale_q[warp] = scales.q, s.scale_k[warp] = scales.k, s.key_query[warp] = scales.key_query;
      }
      __syncthreads();
    }
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      if constexpr (kChunk > 1) scales = {s.scale_q[t], s.scale_k[t], s.key_query[t]};
      float k[4 * kStepQuads], prediction[4] = {}, output[4] = {};
#pragma unroll
      for (int j = 0; j < kStepQuads; ++j) {
        float q[4], d[4], kj[4];
        LoadFloats<4>(&s.k[t][32 * j + 4 * group], kj);
        LoadFloats<4>(&s.q[t][32 * j + 4 * group], q);
        LoadFloats<4>(&s.decay[t][32 * j + 4 * group], d);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float(&row)[4] = state[4 * j + e];
          k[4 * j + e] = kj[e];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            row[i] = fmaf(row[i], d[e], row[i]);
            prediction[i] = fmaf(row[i], kj[e], prediction[i]);
            output[i] = fmaf(row[i], q[e], output[i]);
          }
        }
      }
      // Sums over the groups. Of the lanes with equal lane % 4 the lower four end with a prediction each, the upper
      // four with an output.
      const bool upper = (lane & 16) != 0, odd = (lane & 8) != 0, single = (lane & 4) != 0;
      float sum[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[i] =
            (upper ? output[i] : prediction[i]) + __shfl_xor_sync(kAllLanes, upper ? prediction[i] : output[i], 16);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[i] = (odd ? sum[i + 2] : sum[i]) + __shfl_xor_sync(kAllLanes, odd ? sum[i] : sum[i + 2], 8);
      }
      sum[0] = (single ? sum[1] : sum[0]) + __shfl_xor_sync(kAllLanes, single ? sum[0] : sum[1], 4);
      const int own = column + (lane / 4) % 4;
      const float own_u = s.beta[t] * fmaf(-scales.k, sum[0], s.v[t][own]);
      float u[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) u[i] = __shfl_sync(kAllLanes, own_u, lane % 4 + 4 * i) * scales.k;
      const float lower_u = __shfl_sync(kAllLanes, own_u, lane % 16);
      if (upper) s.o[t][own] = fmaf(scales.key_query, lower_u, scales.q * sum[0]);
#pragma unroll
      for (int r = 0; r < 4 * kStepQuads; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state[r][i] = fmaf(k[r], u[i], state[r][i]);
      }
      for (; snapshot < batch.num_snapshots && batch.snapshot_row[snapshot] == begin + first + t; ++snapshot) {
        StateT* to = reinterpret_cast<StateT*>(KdaStateSlot(p, batch.snapshot_slot[snapshot])) + corner;
#pragma unroll
        for (int i = 0; i < 4 * kStepQuads; ++i) StoreFloats<4>(to + (i / 4 * 32 + i % 4) * kStepDim, state[i]);
      }
    }
    KdaGated<T> gated = {};
    if (warp < count) gated = FetchGated<kAligned, T>(p, begin + first + warp, head, lane);
    if (last && slot >= 0) {
      StateT* to = reinterpret_cast<StateT*>(KdaStateSlot(p, slot)) + corner;
#pragma unroll
      for (int i = 0; i < 4 * kStepQuads; ++i) {
        StoreState(to + (i / 4 * 32 + i % 4) * kStepDim, state[i], policy);
      }
    }
    __syncthreads();
    if (warp < count) StoreGatedNorm<kAligned>(p, s.o[warp], gated, begin + first + warp, head, lane);
  }
}

}  // namespace k3::cuda
