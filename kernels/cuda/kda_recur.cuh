#pragma once

#include "kernels/cuda/kda_chunk.cuh"

// Serial part of the chunked KDA (spec 4.1, 4.7). A warp owns 16 value columns of one (segment, head) and walks its
// chunks; value columns are independent, so warps share nothing but the chunk data in shared memory. All products are
// transposed, so that what one leaves in accumulators is the next one's A operand as it lies:
//   S^T [16 values, 128 keys] fp32, V^T = U^T - S^T W^T, O^T = S^T (q e^G)^T + V^T M^T, S^T <- S^T diag(e^G_C) + V^T
//   K'.
namespace k3::cuda {

constexpr int kValueBlock = 16;  // value columns of a warp
constexpr int kValueBlocks = kChunkDim / kValueBlock;
constexpr int kStages = 2;

struct KdaStage {
  alignas(128) unsigned char data[kKdaOutputBytes];
};

// What the gated norm needs in shared memory: by parity of the chunk, each warp's part of the rows' sums of squares,
// and the gates, padded so that the rows of a fragment lie in different banks.
struct KdaNormShared {
  float squares[2][kChunkRows][kValueBlocks];
  alignas(16) bf16 gate[2][kChunkRows][kChunkDim + 8];
};

// Bytes of dynamic shared memory. Without the norm there is room for two blocks on a multiprocessor, which is why U
// does not pass through it: only one warp wants each of its values.
constexpr size_t KdaRecurShared(bool norm) {
  return kStages * sizeof(KdaStage) + (norm ? sizeof(KdaNormShared) : 0) + kStages * sizeof(uint64_t);
}

// Puts a chunk's gates on their way to shared memory: 16 bytes a copy, by all threads. Zeros behind the chunk's
// end.
__device__ __forceinline__ void FetchGates(const KdaParams& p, const KdaChunk& rows, int head,
                                           bf16 (*to)[kChunkDim + 8]) {
  constexpr int kPacks = kChunkDim / 8;
  const bf16* from = static_cast<const bf16*>(p.gate.data) + head * kChunkDim;
  for (int i = threadIdx.x; i < kChunkRows * kPacks; i += blockDim.x) {
    const int row = rows.begin + i / kPacks;
    CopyAsync16(&to[i / kPacks][i % kPacks * 8], from + min(row, rows.end - 1) * p.gate.ld + i % kPacks * 8,
                row < rows.end);
  }
  CopyAsyncCommit();
}

// Lanes whose bit 2 kHalf differs exchange half of their sums.
template <int kHalf>
__device__ __forceinline__ void HalveSums(float (&sum)[16], int lane) {
  const bool upper = (lane & (2 * kHalf)) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float give = upper ? sum[i] : sum[i + kHalf];
    const float keep = upper ? sum[i + kHalf] : sum[i];
    sum[i] = keep + __shfl_xor_sync(kAllLanes, give, 2 * kHalf);
  }
}

// Sums of squares over a warp's 16 value columns from the fragments of O^T: lane (g, t) gets those of tokens 8 g + 2 t
// and the next.
__device__ __forceinline__ float2 SquaresOfTokens(const float (&o)[8][4], int lane) {
  float sum[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float low = o[i / 2][i % 2], high = o[i / 2][i % 2 + 2];
    sum[i] = fmaf(low, low, high * high);
  }
  HalveSums<8>(sum, lane);
  HalveSums<4>(sum, lane);
  HalveSums<2>(sum, lane);
  return {sum[0], sum[1]};
}

// Two outputs of a row, normed and gated.
__device__ __forceinline__ uint32_t NormGate(uint32_t outputs, float scale, float2 weight, uint32_t gates) {
  return PackBf16(LowBf16(outputs) * scale * weight.x * Sigmoid(LowBf16(gates)),
                  HighBf16(outputs) * scale * weight.y * Sigmoid(HighBf16(gates)));
}

// A state piece as accumulator fragments: 16 tiles of [16 values, 8 keys], from or to [K, V] memory.
template <typename StateT>
__device__ __forceinline__ void LoadState(const StateT* from, int value, int lane, float (&state)[16][4]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      state[n][e] = ToFloat(from[(8 * n + 2 * t + e % 2) * kChunkDim + value + g + e / 2 * 8]);
    }
  }
}
template <typename StateT>
__device__ __forceinline__ void StoreState(StateT* to, int value, int lane, const float (&state)[16][4]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[(8 * n + 2 * t + e % 2) * kChunkDim + value + g + e / 2 * 8] = FromFloat<StateT>(state[n][e]);
    }
  }
}

// kOutput: grid (value groups of blockDim / 32 warps, heads, segments of the round); writes the outputs to p.out, final
// states and snapshots. kNorm, for blocks that hold all of a head: the outputs are normed and gated; 16-byte rows.
// Otherwise the norm is to follow. Without kOutput the first pass over split runs, which leaves each segment's
// transition and its result from a zero state; then the value groups count the 128 columns of the transition as well.
// kSliced: walks `slice` of the only run; the state passes from slice to slice through border.in, in fp32.
template <bool kOutput, bool kNorm, bool kSliced, typename StateT>
__global__ void KdaRecurKernel(KdaParams p, SequenceBatch batch, KdaScratch scratch, int round, KdaSlice slice,
                               bool pairs_aligned) {
  if constexpr (kSliced) GridDependencyRelease();  // the preparation of the next slice
  const int first_segment = scratch.plan->segment_begin[round];
  const int segment_index = first_segment + blockIdx.z;
  if (segment_index >= scratch.plan->segment_begin[round + 1]) return;
  const KdaSegment whole = scratch.segments[segment_index];
  const int chunk_begin = whole.chunk_begin + (kSliced ? slice.begin : 0);
  const int chunk_end = kSliced ? min(whole.chunk_end, chunk_begin + slice.chunks) : whole.chunk_end;
  if (kSliced && chunk_begin >= chunk_end) return;
  const bool to_slice = kSliced && chunk_end < whole.chunk_end;
  const KdaSegment segment = {chunk_begin, chunk_end, whole.sequence,
                              kSliced ? whole.first && slice.begin == 0 : whole.first,
                              kSliced ? whole.last && !to_slice : whole.last};
  const int warps = blockDim.x / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y;
  const int block = blockIdx.x * warps + warp;  // of 16 columns
  const bool transition = !kOutput && block >= kValueBlocks;
  if (!kOutput && (segment.last || (segment.first && blockIdx.x * warps >= kValueBlocks))) return;
  const int value = block % kValueBlocks * kValueBlock;

  unsigned char* shared = DynamicShared<unsigned char>();
  KdaStage* stages = reinterpret_cast<KdaStage*>(shared);
  unsigned char* behind = shared + kStages * sizeof(KdaStage);
  KdaNormShared* norm = reinterpret_cast<KdaNormShared*>(behind);
  uint64_t* full = reinterpret_cast<uint64_t*>(behind + (kNorm ? sizeof(KdaNormShared) : 0));
  constexpr uint32_t kBytes = kOutput ? kKdaOutputBytes : kKdaStateBytes;
  const bool with_u = kOutput || !transition;
  const int round_begin = round * scratch.round_chunks;
  const auto data_of = [&](int chunk) {
    return &scratch.data[static_cast<int64_t>(chunk - round_begin) * p.heads + head];
  };
  const auto fetch = [&](int chunk) {
    const int stage = (chunk - segment.chunk_begin) % kStages;
    BarrierArriveExpect(&full[stage], kBytes);
    CopyBulk(stages[stage].data, data_of(chunk), kBytes, &full[stage]);
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) BarrierInit(&full[stage], 1);
    BarrierInitFence();
    for (int chunk = segment.chunk_begin; chunk < min(segment.chunk_end, segment.chunk_begin + kStages); ++chunk)
      fetch(chunk);
  }

  const int slot = batch.state_slot[segment.sequence];
  const int64_t home = static_cast<int64_t>(head) * kChunkDim * kChunkDim;
  KdaSegmentData& border = scratch.border[static_cast<int64_t>(blockIdx.z) * p.heads + head];
  float state[16][4];
  if (transition) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state[n][e] = 8 * n + 2 * t + e % 2 == value + g + e / 2 * 8 ? 1.0f : 0.0f;
    }
  } else if (segment.first && slot >= 0) {
    LoadState(reinterpret_cast<const StateT*>(KdaStateSlot(p, slot)) + home, value, lane, state);
  } else if (kOutput && !segment.first) {
    LoadState(border.in, value, lane, state);
  } else {
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state[n][e] = 0;
    }
  }
  if constexpr (kNorm) FetchGates(p, scratch.chunks[segment.chunk_begin], head, norm->gate[0]);
  __syncthreads();

  const int g = lane / 4, t = lane % 4;
  float2 weight[2];  // of the lane's columns
#pragma unroll
  for (int i = 0; kNorm && i < 2; ++i) {
    weight[i] = *reinterpret_cast<const float2*>(p.norm_weight + value + 8 * i + 2 * t);
  }
  uint4 next_u[4];  // U of the next chunk, on its way while one is computed
  const auto fetch_u = [&](int chunk) {
#pragma unroll
    for (int a = 0; a < 4; ++a) next_u[a] = data_of(chunk)->u[block % kValueBlocks][a][lane];
  };
  if (with_u) fetch_u(segment.chunk_begin);
  for (int chunk = segment.chunk_begin; chunk < segment.chunk_end; ++chunk) {
    const int step = chunk - segment.chunk_begin;
    const int stage = step % kStages;
    BarrierWait(&full[stage], step / kStages % 2);
    const KdaChunkData& data = *reinterpret_cast<const KdaChunkData*>(stages[stage].data);

    // V^T = U^T - S^T W^T and the inter-chunk part of O^T.
    float v[8][4] = {};
    float o[8][4] = {};
    if (with_u) {
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const uint32_t pairs[4] = {next_u[a].x, next_u[a].y, next_u[a].z, next_u[a].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 u_pair = UnpackF16(pairs[e]);
          v[2 * a + e / 2][e % 2 * 2] = u_pair.x;
          v[2 * a + e / 2][e % 2 * 2 + 1] = u_pair.y;
        }
      }
      if (chunk + 1 < segment.chunk_end) fetch_u(chunk + 1);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t rows[4] = {PackF16(state[2 * k][0], state[2 * k][1]), PackF16(state[2 * k][2], state[2 * k][3]),
                                PackF16(state[2 * k + 1][0], state[2 * k + 1][1]),
                                PackF16(state[2 * k + 1][2], state[2 * k + 1][3])};
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const uint4 w = data.minus_w[a][k][lane];
        MmaF16(v[2 * a], rows, w.x, w.y);
        MmaF16(v[2 * a + 1], rows, w.z, w.w);
        if constexpr (kOutput) {
          const uint4 q = data.decayed_q[a][k][lane];
          MmaF16(o[2 * a], rows, q.x, q.y);
          MmaF16(o[2 * a + 1], rows, q.z, q.w);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float2 decay = *reinterpret_cast<const float2*>(&data.decay[8 * n + 2 * t]);
      state[n][0] *= decay.x;
      state[n][1] *= decay.y;
      state[n][2] *= decay.x;
      state[n][3] *= decay.y;
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t rows[4] = {PackF16(v[2 * b][0], v[2 * b][1]), PackF16(v[2 * b][2], v[2 * b][3]),
                                PackF16(v[2 * b + 1][0], v[2 * b + 1][1]), PackF16(v[2 * b + 1][2], v[2 * b + 1][3])};
      if constexpr (kOutput) {
#pragma unroll
        for (int a = b; a < 4; ++a) {
          const uint4 m = data.scores[a * (a + 1) / 2 + b][lane];
          MmaF16(o[2 * a], rows, m.x, m.y);
          MmaF16(o[2 * a + 1], rows, m.z, m.w);
        }
      }
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const uint4 restored = data.restored_k[b][k][lane];
        MmaF16(state[2 * k], rows, restored.x, restored.y);
        MmaF16(state[2 * k + 1], rows, restored.z, restored.w);
      }
    }
    if constexpr (kNorm) {
      const float2 squares = SquaresOfTokens(o, lane);
      norm->squares[step % 2][8 * g + 2 * t][warp] = squares.x;
      norm->squares[step % 2][8 * g + 2 * t + 1][warp] = squares.y;
      CopyAsyncWait<0>();  // the gates of this chunk
    }
    __syncthreads();
    if (threadIdx.x == 0 && chunk + kStages < segment.chunk_end) fetch(chunk + kStages);
    if constexpr (kNorm) {
      // Nobody reads the other half of the buffers any more.
      if (chunk + 1 < segment.chunk_end) FetchGates(p, scratch.chunks[chunk + 1], head, norm->gate[(step + 1) % 2]);
    }

    if constexpr (kOutput) {
      const KdaChunk rows = scratch.chunks[chunk];
      bf16* out = static_cast<bf16*>(p.out.data) + head * kChunkDim + value + 2 * t;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        uint32_t low = TransposeFragment(PackBf16(o[n][0], o[n][1]));
        uint32_t high = TransposeFragment(PackBf16(o[n][2], o[n][3]));
        const int row = rows.begin + 8 * n + g;
        if constexpr (kNorm) {
          const float4* parts = reinterpret_cast<const float4*>(norm->squares[step % 2][8 * n + g]);
          const float4 a = parts[0], b = parts[1];
          const float sum = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
          const float scale = rsqrtf(sum / kChunkDim + p.norm_eps);
          const bf16* gates = &norm->gate[step % 2][8 * n + g][value + 2 * t];
          low = NormGate(low, scale, weight[0], *reinterpret_cast<const uint32_t*>(gates));
          high = NormGate(high, scale, weight[1], *reinterpret_cast<const uint32_t*>(gates + 8));
        }
        if (row < rows.end) {
          bf16* target = out + row * p.out.ld;
          if (pairs_aligned) {
            *reinterpret_cast<uint32_t*>(target) = low;
            *reinterpret_cast<uint32_t*>(target + 8) = high;
          } else {
            target[0] = FromFloat<bf16>(LowBf16(low));
            target[1] = FromFloat<bf16>(HighBf16(low));
            target[8] = FromFloat<bf16>(LowBf16(high));
            target[9] = FromFloat<bf16>(HighBf16(high));
          }
        }
      }
      if (rows.snapshot) {
        for (int i = FirstSnapshot(batch, rows.end - 1);
             i < batch.num_snapshots && batch.snapshot_row[i] == rows.end - 1; ++i) {
          StoreState(reinterpret_cast<StateT*>(KdaStateSlot(p, batch.snapshot_slot[i])) + home, value, lane, state);
        }
      }
    }
  }
  if constexpr (kOutput) {
    if (kSliced && to_slice) {
      StoreState(border.in, value, lane, state);
    } else if (segment.last && slot >= 0) {
      StoreState(reinterpret_cast<StateT*>(KdaStateSlot(p, slot)) + home, value, lane, state);
    }
  } else if (transition) {
    StoreState(border.transition, value, lane, state);
  } else if (segment.first) {
    StoreState((&border)[p.heads].in, value, lane, state);  // of the next segment
  } else {
    StoreState(border.zero, value, lane, state);
  }
}

constexpr int kComposeThreads = 256;

// Composes the segments of each split run: in(s + 1) = P(s) in(s) + zero(s), tf32 products with fp32 sums. A block owns
// 16 value columns of a (run, head), its warps 16 keys each. Grid (value blocks, heads, segments of the round).
__global__ void __launch_bounds__(kComposeThreads) KdaComposeKernel(KdaScratch scratch, int heads, int round) {
  constexpr int kStride = kChunkDim + 4;
  float* current = DynamicShared<float>();  // [16 values][kStride keys]
  const int first_segment = scratch.plan->segment_begin[round];
  if (first_segment + static_cast<int>(blockIdx.z) >= scratch.plan->segment_begin[round + 1]) return;
  const KdaSegment* segments = scratch.segments + first_segment;
  int s = blockIdx.z;
  if (!segments[s].first || segments[s].last || segments[s + 1].last) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int value = blockIdx.x * kValueBlock;
  const auto border = [&](int segment) -> KdaSegmentData& {
    return scratch.border[static_cast<int64_t>(segment) * heads + blockIdx.y];
  };
  ++s;  // the first segment's result is already in place
  for (int i = threadIdx.x; i < kValueBlock * kChunkDim; i += kComposeThreads) {
    current[i % kValueBlock * kStride + i / kValueBlock] =
        border(s).in[i / kValueBlock * kChunkDim + value + i % kValueBlock];
  }
  for (; !segments[s].last; ++s) {
    const KdaSegmentData& data = border(s);
    // Each float4 holds four consecutive columns of P: two 8-wide steps whose contraction index is permuted alike in
    // both operands (index t of a step is column 4t or 4t + 2, index t + 4 the next).
    float4 p[2][8];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        p[n][k] =
            *reinterpret_cast<const float4*>(&data.transition[(16 * warp + 8 * n + g) * kChunkDim + 16 * k + 4 * t]);
      }
    }
    float sum[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[n][e] = data.zero[(16 * warp + 8 * n + 2 * t + e % 2) * kChunkDim + value + g + e / 2 * 8];
      }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float4 low = *reinterpret_cast<const float4*>(&current[g * kStride + 16 * k + 4 * t]);
      const float4 high = *reinterpret_cast<const float4*>(&current[(g + 8) * kStride + 16 * k + 4 * t]);
      const uint32_t rows0[4] = {ToTf32(low.x), ToTf32(high.x), ToTf32(low.y), ToTf32(high.y)};
      const uint32_t rows1[4] = {ToTf32(low.z), ToTf32(high.z), ToTf32(low.w), ToTf32(high.w)};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        MmaTf32(sum[n], rows0, ToTf32(p[n][k].x), ToTf32(p[n][k].y));
        MmaTf32(sum[n], rows1, ToTf32(p[n][k].z), ToTf32(p[n][k].w));
      }
    }
    __syncthreads();
    float* next = border(s + 1).in;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = 16 * warp + 8 * n + 2 * t + e % 2, row = g + e / 2 * 8;
        current[row * kStride + key] = sum[n][e];
        next[key * kChunkDim + value + row] = sum[n][e];
      }
    }
  }
}

constexpr int kFinishThreads = 256;

// Gated RMSNorm in place over the outputs of the round's chunks: grid (heads, chunks of the round), a warp a row.
// Behind row scratch.round_chunks one more row of blocks a sequence: convolution states after snapshots and after the
// step. The grid begins at row `first`.
__global__ void __launch_bounds__(kFinishThreads) KdaFinishKernel(KdaParams p, SequenceBatch batch, KdaScratch scratch,
                                                                  int round, int step_tokens, bool aligned, int first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = blockIdx.x;
  const int grid_row = first + blockIdx.y;
  if (grid_row >= scratch.round_chunks) {
    const int sequence = grid_row - scratch.round_chunks;
    const int begin = batch.token_begin[sequence], end = batch.token_begin[sequence + 1];
    const int slot = batch.state_slot[sequence];
    if (end - begin <= step_tokens) return;
    const KdaInputs<bf16> inputs = MakeKdaInputs<bf16>(p, begin, slot);
    const int64_t width = static_cast<int64_t>(p.heads) * kChunkDim;
    for (int c = threadIdx.x; c < 3 * kChunkDim; c += kFinishThreads) {
      const int64_t channel = c / kChunkDim * width + head * kChunkDim + c % kChunkDim;
      for (int i = batch.num_snapshots > 0 ? FirstSnapshot(batch, begin) : 0;
           i < batch.num_snapshots && batch.snapshot_row[i] < end; ++i) {
        StoreConvChannel(inputs, batch.snapshot_row[i] + 1 - begin, channel, KdaConvSlot(p, batch.snapshot_slot[i]));
      }
      if (slot >= 0) StoreConvChannel(inputs, end - begin, channel, KdaConvSlot(p, slot));
    }
    return;
  }
  const int index = round * scratch.round_chunks + grid_row;
  if (index >= scratch.plan->chunks) return;
  const KdaChunk chunk = scratch.chunks[index];
  const int64_t column = static_cast<int64_t>(head) * kChunkDim + 4 * lane;
  float weight[4];
  LoadFloats<4>(p.norm_weight + 4 * lane, weight);
  constexpr int kRows = kChunkRows / (kFinishThreads / 32);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = chunk.begin + warp + i * (kFinishThreads / 32);
    if (row >= chunk.end) continue;
    bf16* out = static_cast<bf16*>(p.out.data) + row * p.out.ld + column;
    const bf16* gates = static_cast<const bf16*>(p.gate.data) + row * p.gate.ld + column;
    float x[4], gate[4];
    if (aligned) {
      LoadFloats<4>(out, x);
      LoadFloats<4>(gates, gate);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = ToFloat(out[e]);
        gate[e] = ToFloat(gates[e]);
      }
    }
    float square = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) square = fmaf(x[e], x[e], square);
    const float scale = rsqrtf(WarpSum(square) / kChunkDim + p.norm_eps);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = x[e] * scale * weight[e] * Sigmoid(gate[e]);
    if (aligned) {
      StoreFloats<4>(out, x);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[e] = FromFloat<bf16>(x[e]);
    }
  }
}

}  // namespace k3::cuda
