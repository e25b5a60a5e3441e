#pragma once

#include "kernels/cuda/group_mma.cuh"
#include "kernels/cuda/kda_tiles.cuh"
#include "kernels/kda_split.h"

// What follows the walk of runs that were split into segments: their states in turn, and the outputs that depend on
// them (spec 4.7).
namespace k3::cuda {

constexpr int kComposeWarps = kTileDim / 16;
constexpr int kComposeBarrier = 1;
constexpr int kComposeStride = kTileDim / 2 + 4;  // words: rows of ldmatrix in different banks

struct KdaComposeShared {
  // By parity of segments: [values][keys] of the state before in fp16, keys k and k + 8 in word k / 16 * 8 + k % 8.
  alignas(16) uint32_t current[2][16][kComposeStride];
  uint64_t written[kMostKdaSegments + 1];  // the block's part of KdaBorder::half of a segment
};

// Byte offset in KdaBorder::half of an element of the state before a segment: a plain operand b of warpgroup products,
// two blocks of 64 keys. Column 32 m + 8 t + 2 n + e lies at 32 m + 8 n + 2 t + e, so that a lane has eight columns of
// the product in a row.
__device__ __forceinline__ int HalfPlace(int key, int value) {
  const int row = value / 32 * 32 + value / 2 % 4 * 8 + value / 8 % 4 * 2 + value % 2;
  return key / 64 * (kTileDim * 128) + Swizzle128(row, key % 64 / 8) + key % 8 * 2;
}

// States after segments and snapshots: out = P in + zero, fp16 products with fp32 sums. A block owns 16 value columns
// of a (sequence, head), its warps 16 keys each, whose rows of the next segment's transition are loaded as those of
// this one are used up. The correction runs beside it: a segment's KdaBorder::ready says that the state before it is
// there. With kTeller a warp of its own says so, because the fence before it takes as long as a segment; without one
// there are registers for two blocks. Grid (value blocks, heads, sequences of the order).
constexpr int ComposeThreads(bool teller) { return 32 * (kComposeWarps + (teller ? 1 : 0)); }
template <bool kTeller, typename StateT>
__global__ void __launch_bounds__(ComposeThreads(kTeller), kTeller ? 1 : 2)
    KdaComposeKernel(const __grid_constant__ KdaParams p, const __grid_constant__ SequenceBatch batch,
                     const __grid_constant__ KdaOrder order, const __grid_constant__ KdaSplit split) {
  KdaComposeShared& s = *DynamicShared<KdaComposeShared>();
  const int sequence = order.sequence[blockIdx.z], head = blockIdx.y;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; kTeller && i <= kMostKdaSegments; i += ComposeThreads(true)) {
    BarrierInit(&s.written[i], kComposeWarps * kWarpArrivals);
  }
  GridDependencyWait();
  GridDependencyRelease();
  const int begin = batch.token_begin[sequence], end = batch.token_begin[sequence + 1];
  const int origin = begin - batch.context[sequence] % kTileRows, slot = batch.state_slot[sequence];
  if (origin + split.first >= end) return;  // one segment
  if (kTeller) __syncthreads();
  const auto border = [&](int segment) -> KdaBorder& {
    return split.border[(static_cast<int64_t>(blockIdx.z) * split.segments + segment) * p.heads + head];
  };
  if (kTeller && warp == kComposeWarps) {
    if (lane > 0) return;
    for (int segment = 1; origin + split.Begin(segment) < end; ++segment) {
      BarrierWait(&s.written[segment], 0);
      AddRelease(&border(segment).ready, 1);
    }
    return;
  }
  const int g = lane / 4, t = lane % 4;
  const int value = blockIdx.x * 16;
  const int64_t home = static_cast<int64_t>(head) * kTileDim * kTileDim;
  const auto place = [&](int n, int e) {  // of sum[n][e] in a [K, V] matrix
    return (16 * warp + 8 * n + 2 * t + e % 2) * kTileDim + value + g + e / 2 * 8;
  };
  // What the lane takes of a transition: of each 16 columns two operands of 8 keys.
  uint4 rows[8];
  const auto load_rows = [&](const uint32_t* transition, int k) {
    rows[k] = __ldcg(reinterpret_cast<const uint4*>(transition) + (8 * warp + k) * 32 + lane);
  };
  // sum += P current, with P's rows in `rows`, which are then those of `next` if there is one.
  const auto apply = [&](int parity, const uint32_t* next, float(&sum)[2][4]) {
    float odd[2][4] = {};  // two chains instead of one
    const uint32_t current = SharedAddress(&s.current[parity][lane % 16][lane / 16 * 4]);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      uint32_t values[4];
      LoadMatrix4<0>(values, current + 32 * k);
      MmaF16(k % 2 ? odd[0] : sum[0], values, rows[k].x, rows[k].y);
      MmaF16(k % 2 ? odd[1] : sum[1], values, rows[k].z, rows[k].w);
      if (next != nullptr) load_rows(next, k);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] += odd[i / 4][i % 4];
  };
  const auto load_zero = [&](const KdaBorder& data, float(&sum)[2][4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = data.zero[place(i / 4, i % 4)];
  };
  // x: the state before `segment`, at `place`.
  const auto publish = [&](int segment, const float(&x)[2][4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s.current[segment % 2][g + e / 2 * 8][8 * warp + 2 * t + e % 2] = PackF16(x[0][e], x[1][e]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = i / 2, e = i % 2 * 2, key = 16 * warp + 8 * n + 2 * t;
      *reinterpret_cast<uint32_t*>(border(segment).half + HalfPlace(key, value + g + 4 * e)) =
          PackF16(x[n][e], x[n][e + 1]);
    }
  };
  {
    float in[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) in[i / 4][i % 4] = border(1).in[place(i / 4, i % 4)];
    publish(1, in);
  }
  if (kTeller) ArriveAsWarp(&s.written[1], lane);
  const auto load_all = [&](const uint32_t* transition) {
#pragma unroll
    for (int k = 0; k < 8; ++k) load_rows(transition, k);
  };
  load_all(border(1).transition);
  float sum[2][4];
  load_zero(border(1), sum);
  int snapshot = batch.num_snapshots > 0 ? FirstSnapshot(batch, origin + split.first) : 0;
  for (int segment = 1;; ++segment) {
    const int last = min(end, origin + split.Begin(segment + 1));
    const bool more = last < end;
    NamedBarrierSync(kComposeBarrier, 32 * kComposeWarps);
    if (!kTeller && threadIdx.x == 0) AddRelease(&border(segment).ready, 1);
    if (snapshot < batch.num_snapshots && batch.snapshot_row[snapshot] < last) {
      for (; snapshot < batch.num_snapshots && batch.snapshot_row[snapshot] < last; ++snapshot) {
        StateT* to = reinterpret_cast<StateT*>(KdaStateSlot(p, batch.snapshot_slot[snapshot])) + home;
        const uint32_t* transition =
            split.snapshots + (snapshot * static_cast<int64_t>(p.heads) + head) * kTransitionWords;
        float state[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) state[i / 4][i % 4] = ToFloat(to[place(i / 4, i % 4)]);
        load_all(transition);
        apply(segment % 2, nullptr, state);
#pragma unroll
        for (int i = 0; i < 8; ++i) to[place(i / 4, i % 4)] = FromFloat<StateT>(state[i / 4][i % 4]);
      }
      load_all(border(segment).transition);
    }
    float next_sum[2][4];
    if (more) load_zero(border(segment + 1), next_sum);
    apply(segment % 2, more ? border(segment + 1).transition : nullptr, sum);
    if (!more) break;
    publish(segment + 1, sum);
    if (kTeller) ArriveAsWarp(&s.written[segment + 1], lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = next_sum[i / 4][i % 4];
  }
  if (slot < 0) return;
  StateT* to = reinterpret_cast<StateT*>(KdaStateSlot(p, slot)) + home;
#pragma unroll
  for (int i = 0; i < 8; ++i) to[place(i / 4, i % 4)] = FromFloat<StateT>(sum[i / 4][i % 4]);
}

constexpr int kCorrectRows = 128;  // of a block's turn, 64 a warpgroup
constexpr int kCorrectTurns = 4;   // of a block, at most: fewer where blocks are few
constexpr int kCorrectThreads = 256;
constexpr int kFewSegments = 8;

struct KdaCorrectShared {
  alignas(1024) unsigned char queries[2][2][2][64 * 128];       // of a warpgroup, by parity of turns: blocks of 64 keys
  alignas(1024) unsigned char state[kTileDim * kTileRowBytes];  // KdaBorder::half
};

// The turns of a block of KdaCorrectKernel, each kCorrectRows tokens of a segment, from its first token; taken from the
// last to the first.
struct KdaCorrectShare {
  int segment;
  int first, last;
};
__host__ __device__ constexpr int CorrectBlocks(int tokens, int turns) {
  return (tokens + kCorrectRows * turns - 1) / (kCorrectRows * turns);
}
// Blocks of a sequence and head: those of the segments that are corrected, then with kNorm those of the first. What was
// written last lies in the second-level cache still: each segment's last rows come first; with few segments, whose
// states are all there soon, those of all of them.
inline unsigned CorrectBlocks(const KdaSplit& split, bool norm, int turns) {
  return static_cast<unsigned>((split.segments - 1) * CorrectBlocks(split.tokens, turns) +
                               (norm ? CorrectBlocks(split.first, turns) : 0));
}
__device__ __forceinline__ KdaCorrectShare FindCorrectShare(const KdaSplit& split, int turns, int block) {
  const int each = CorrectBlocks(split.tokens, turns), count = split.segments - 1;
  int segment = 0, part = block - count * each;
  if (part < 0) {
    const bool few = count < kFewSegments;
    segment = 1 + (few ? block % count : block / each);
    part = each - 1 - (few ? block / count : block % each);
  }
  const int tokens = split.Begin(segment + 1) - split.Begin(segment);
  const int first = turns * part;
  return {segment, first, min((tokens - 1) / kCorrectRows, first + turns - 1)};
}

// Outputs of all segments but the first: those from zero plus queries times the state before the segment. With kNorm
// then the gated norm, also of the first segments'. Starts when all blocks of the composition have. A block's
// warpgroups take 64 rows each a turn, the next turn's while they multiply. Grid (heads, CorrectBlocks, sequences of
// the order).
template <bool kNorm>
__global__ void __launch_bounds__(kCorrectThreads, 2)
    KdaCorrectKernel(const __grid_constant__ KdaParams p, const __grid_constant__ SequenceBatch batch,
                     const __grid_constant__ KdaOrder order, const __grid_constant__ KdaSplit split, int turns) {
  KdaCorrectShared& s = *DynamicShared<KdaCorrectShared>();
  const int sequence = order.sequence[blockIdx.z], head = blockIdx.x;
  const int begin = batch.token_begin[sequence], end = batch.token_begin[sequence + 1];
  const int origin = begin - batch.context[sequence] % kTileRows;
  const KdaCorrectShare share = FindCorrectShare(split, turns, blockIdx.y);
  // One block makes the launch end after the composition.
  if (blockIdx.x == 0 && blockIdx.y + 1 == gridDim.y && blockIdx.z + 1 == gridDim.z) GridDependencyWait();
  const int segment_begin = origin + split.Begin(share.segment);
  const int segment_end = min(end, origin + split.Begin(share.segment + 1));
  if (segment_begin + kCorrectRows * share.first >= end) return;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int64_t width = static_cast<int64_t>(p.heads) * kTileDim, home = static_cast<int64_t>(head) * kTileDim;
  KdaBorder* borders = split.border + static_cast<int64_t>(blockIdx.z) * split.segments * p.heads + head;
  if (origin + split.first < end) {
    if (threadIdx.x == 0) {
      const uint32_t* ready = &borders[max(share.segment, 1) * p.heads].ready;
      while (LoadAcquire(ready) < kTileDim / 16) __nanosleep(100);
    }
    __syncthreads();
  } else {
    GridDependencyWait();
  }
  const bool corrected = share.segment > 0;
  const auto row_of = [&](int turn) { return segment_begin + kCorrectRows * turn + 64 * group; };
  const auto fetch = [&](int turn) {
    if (!corrected) return;
    const int piece = thread % 16;
    unsigned char* to = s.queries[group][turn % 2][piece / 8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 8 * i + thread / 16;
      CopyAsync16(to + Swizzle128(row, piece % 8),
                  split.queries + min(row_of(turn) + row, segment_end - 1) * width + home + 8 * piece,
                  row_of(turn) + row < segment_end);
    }
  };
  // Outputs from zero, a lane's eight in a row at a time.
  const auto output = [&](int turn, int half) {
    const int row = row_of(turn) + thread / 32 * 16 + 8 * half + g;
    return std::pair{max(begin, min(row, segment_end - 1)), row >= begin && row < segment_end};
  };
  uint4 before[2][4];
  const auto load = [&](int turn) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bf16* out = static_cast<const bf16*>(p.out.data) + output(turn, half).first * p.out.ld + home + 8 * t;
#pragma unroll
      for (int m = 0; m < 4; ++m) before[half][m] = *reinterpret_cast<const uint4*>(out + 32 * m);
    }
  };
  int turn = share.last;
  while (segment_begin + kCorrectRows * turn >= end) --turn;
  if (corrected) {
    const unsigned char* state = borders[share.segment * p.heads].half;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(s.state) / 16 / kCorrectThreads); ++i) {
      const int place = 16 * (i * kCorrectThreads + static_cast<int>(threadIdx.x));
      CopyAsync16(s.state + place, state + place);
    }
  }
  fetch(turn);
  CopyAsyncCommit();
  load(turn);
  CopyAsyncWait<0>();
  FenceSharedForMatrix();
  __syncthreads();
  for (; turn >= share.first; --turn) {
    float o[64];
    if (corrected) {
      GroupMmaFence();
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        GroupMmaSharedF16<128>(o, SharedOperand(s.queries[group][turn % 2][k / 4] + 32 * (k % 4)),
                               SharedOperand(s.state + k / 4 * (kTileDim * 128) + 32 * (k % 4)), k > 0);
      }
      GroupMmaCommit();
      if (turn > share.first) fetch(turn - 1);
      CopyAsyncCommit();
      GroupMmaWait<0>();
    } else {
#pragma unroll
      for (int i = 0; i < 64; ++i) o[i] = 0;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto [row, exists] = output(turn, half);
      float scale = 1;
      float square = 0;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const uint32_t words[4] = {before[half][m].x, before[half][m].y, before[half][m].z, before[half][m].w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float* x = o + 4 * (4 * m + n) + 2 * half;
          x[0] += LowBf16(words[n]);
          x[1] += HighBf16(words[n]);
          if constexpr (kNorm) square = fmaf(x[0], x[0], fmaf(x[1], x[1], square));
        }
      }
      if constexpr (kNorm) {
        square += __shfl_xor_sync(kAllLanes, square, 1);
        square += __shfl_xor_sync(kAllLanes, square, 2);
        scale = rsqrtf(square / kTileDim + p.norm_eps);
      }
      bf16* out = static_cast<bf16*>(p.out.data) + row * p.out.ld + home + 8 * t;
      const bf16* gates = static_cast<const bf16*>(p.gate.data) + row * p.gate.ld + home + 8 * t;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        uint32_t words[4];
        uint4 gate = {};
        if constexpr (kNorm) gate = *reinterpret_cast<const uint4*>(gates + 32 * m);
        const uint32_t gate_words[4] = {gate.x, gate.y, gate.z, gate.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float x = o[4 * (4 * m + n) + 2 * half], y = o[4 * (4 * m + n) + 2 * half + 1];
          if constexpr (kNorm) {
            const float2 weight = *reinterpret_cast<const float2*>(p.norm_weight + 32 * m + 8 * t + 2 * n);
            x *= scale * weight.x * Sigmoid(LowBf16(gate_words[n]));
            y *= scale * weight.y * Sigmoid(HighBf16(gate_words[n]));
          }
          words[n] = PackBf16(x, y);
        }
        if (exists) *reinterpret_cast<uint4*>(out + 32 * m) = {words[0], words[1], words[2], words[3]};
      }
    }
    if (turn == share.first) break;
    load(turn - 1);
    CopyAsyncWait<0>();
    FenceSharedForMatrix();
    NamedBarrierSync(1 + group, 128);
  }
}

constexpr int kConvStateThreads = 256;

// Convolution states after snapshots and after the step. Grid (heads, sequences).
__global__ void __launch_bounds__(kConvStateThreads)
    KdaConvStateKernel(const __grid_constant__ KdaParams p, const __grid_constant__ SequenceBatch batch,
                       int step_tokens) {
  const int head = blockIdx.x, sequence = blockIdx.y;
  const int begin = batch.token_begin[sequence], end = batch.token_begin[sequence + 1];
  const int slot = batch.state_slot[sequence];
  if (end - begin <= step_tokens) return;
  const KdaInputs<bf16> inputs = MakeKdaInputs<bf16>(p, begin, slot);
  const int64_t width = static_cast<int64_t>(p.heads) * kTileDim;
  for (int c = threadIdx.x; c < 3 * kTileDim; c += kConvStateThreads) {
    const int64_t channel = c / kTileDim * width + head * kTileDim + c % kTileDim;
    for (int i = batch.num_snapshots > 0 ? FirstSnapshot(batch, begin) : 0;
         i < batch.num_snapshots && batch.snapshot_row[i] < end; ++i) {
      StoreConvChannel(inputs, batch.snapshot_row[i] + 1 - begin, channel, KdaConvSlot(p, batch.snapshot_slot[i]));
    }
    if (slot >= 0) StoreConvChannel(inputs, end - begin, channel, KdaConvSlot(p, slot));
  }
}

}  // namespace k3::cuda
