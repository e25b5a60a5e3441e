#pragma once

#include "kernels/cuda/kda_tiles.cuh"

// What follows the walk of runs that were split into segments: their states in turn, and the outputs that depend on
// them (spec 4.7).
namespace k3::cuda {

constexpr int kComposeThreads = 256;
constexpr int kComposeStride = kTileDim + 16;  // floats: two rows of 16-byte accesses in different banks

// kStages: transitions that are fetched ahead of the chain; one leaves room for two blocks on a multiprocessor.
template <int kStages>
struct KdaComposeShared {
  alignas(16) float current[16][kComposeStride];              // [values][keys] of the state, rounded to tf32
  alignas(16) float rows[kStages][kTileDim][kComposeStride];  // transitions; a warp touches its own 16 rows only
};

// An element of the state before a segment for KdaCorrectKernel: columns 16 m + 4 t + 2 n + e lie at 16 m + 8 n + 2 t +
// e, so that a lane of the product has four columns in a row.
__device__ __forceinline__ void StoreHalf(KdaBorder& border, int key, int value, float x) {
  const int place = value / 16 * 16 + value / 2 % 2 * 8 + value / 4 % 4 * 2 + value % 2;
  *reinterpret_cast<uint16_t*>(border.half + TilePiece(key, place / 8) + place % 8 * 2) =
      static_cast<uint16_t>(PackF16(x, 0.0f));
}

// States after segments and snapshots: out = P in + zero, tf32 products with fp32 sums. A block owns 16 value columns
// of a (sequence, head), its warps 16 keys each. Grid (value blocks, heads, sequences of the order). The correction
// runs beside it: a segment's KdaBorder::ready says that the state before it is there.
template <int kStages, typename StateT>
__global__ void __launch_bounds__(kComposeThreads, kStages > 1 ? 1 : 2)
    KdaComposeKernel(const __grid_constant__ KdaParams p, const __grid_constant__ SequenceBatch batch,
                     const __grid_constant__ KdaOrder order, const __grid_constant__ KdaSplit split) {
  KdaComposeShared<kStages>& s = *DynamicShared<KdaComposeShared<kStages>>();
  const int sequence = order.sequence[blockIdx.z], head = blockIdx.y;
  GridDependencyWait();
  GridDependencyRelease();
  const int begin = batch.token_begin[sequence], end = batch.token_begin[sequence + 1];
  const int origin = begin - batch.context[sequence] % kTileRows, slot = batch.state_slot[sequence];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int value = blockIdx.x * 16;
  const int64_t home = static_cast<int64_t>(head) * kTileDim * kTileDim;
  const auto border = [&](int segment) -> KdaBorder& {
    return split.border[(static_cast<int64_t>(blockIdx.z) * split.segments + segment) * p.heads + head];
  };
  const auto place = [&](int n, int e) {  // of sum[n][e] in a [K, V] matrix
    return (16 * warp + 8 * n + 2 * t + e % 2) * kTileDim + value + g + e / 2 * 8;
  };
  // sum += P current; row(n) is where the lane reads P. Each float4 holds four consecutive columns: two 8-wide steps of
  // the contraction, whose index is permuted alike in both operands (index t of a step is column 4t or 4t + 2, index
  // t + 4 the next).
  const auto apply = [&](const auto& row, float(&sum)[2][4]) {
    float odd[2][4] = {};  // two chains instead of one
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float4 low = *reinterpret_cast<const float4*>(&s.current[g][16 * k + 4 * t]);
      const float4 high = *reinterpret_cast<const float4*>(&s.current[g + 8][16 * k + 4 * t]);
      const uint32_t first[4] = {__float_as_uint(low.x), __float_as_uint(high.x), __float_as_uint(low.y),
                                 __float_as_uint(high.y)};
      const uint32_t second[4] = {__float_as_uint(low.z), __float_as_uint(high.z), __float_as_uint(low.w),
                                  __float_as_uint(high.w)};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float4 columns = *reinterpret_cast<const float4*>(row(n) + 16 * k);
        MmaTf32(sum[n], first, __float_as_uint(columns.x), __float_as_uint(columns.y));
        MmaTf32(odd[n], second, __float_as_uint(columns.z), __float_as_uint(columns.w));
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] += odd[i / 4][i % 4];
  };
  if (origin + split.first >= end) return;  // one segment
  // Puts the warp's rows of a segment's transition on their way, if there is such a segment.
  const auto fetch = [&](int segment) {
    if (origin + split.Begin(segment) < end) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int row = 16 * warp + i;
        CopyAsync16(&s.rows[segment % kStages][row][4 * lane], border(segment).transition + row * kTileDim + 4 * lane);
      }
    }
    CopyAsyncCommit();
  };
  const auto load_zero = [&](const KdaBorder& data, float(&sum)[2][4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = data.zero[place(i / 4, i % 4)];
  };
#pragma unroll
  for (int i = 1; i < max(kStages, 2); ++i) fetch(i);
  for (int i = threadIdx.x; i < 16 * kTileDim; i += kComposeThreads) {
    const float x = border(1).in[i / 16 * kTileDim + value + i % 16];
    s.current[i % 16][i / 16] = __uint_as_float(ToTf32(x));
    StoreHalf(border(1), i / 16, value + i % 16, x);
  }
  float sum[2][4];
  load_zero(border(1), sum);
  int snapshot = batch.num_snapshots > 0 ? FirstSnapshot(batch, origin + split.first) : 0;
  for (int segment = 1;; ++segment) {
    const int last = min(end, origin + split.Begin(segment + 1));
    __syncthreads();
    if (threadIdx.x == 0) AddRelease(&border(segment).ready, 1);
    for (; snapshot < batch.num_snapshots && batch.snapshot_row[snapshot] < last; ++snapshot) {
      StateT* to = reinterpret_cast<StateT*>(KdaStateSlot(p, batch.snapshot_slot[snapshot])) + home;
      const float* transition = split.snapshots + snapshot * static_cast<int64_t>(p.heads) * kTileDim * kTileDim + home;
      float state[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) state[i / 4][i % 4] = ToFloat(to[place(i / 4, i % 4)]);
      apply([&](int n) { return transition + (16 * warp + 8 * n + g) * kTileDim + 4 * t; }, state);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[place(i / 4, i % 4)] = FromFloat<StateT>(state[i / 4][i % 4]);
    }
    const bool more = last < end;
    float next_sum[2][4];
    if (more) load_zero(border(segment + 1), next_sum);
    if constexpr (kStages > 1) fetch(segment + kStages - 1);
    CopyAsyncWait<kStages - 1>();
    __syncwarp();
    apply([&](int n) { return &s.rows[segment % kStages][16 * warp + 8 * n + g][4 * t]; }, sum);
    if (!more) break;
    if constexpr (kStages == 1) {
      __syncwarp();
      fetch(segment + 1);
    }
    __syncthreads();
    KdaBorder& next = border(segment + 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int n = i / 4, e = i % 4;
      const int key = 16 * warp + 8 * n + 2 * t + e % 2, column = g + e / 2 * 8;
      s.current[column][key] = __uint_as_float(ToTf32(sum[n][e]));
      StoreHalf(next, key, value + column, sum[n][e]);
      sum[n][e] = next_sum[n][e];
    }
  }
  if (slot < 0) return;
  StateT* to = reinterpret_cast<StateT*>(KdaStateSlot(p, slot)) + home;
#pragma unroll
  for (int i = 0; i < 8; ++i) to[place(i / 4, i % 4)] = FromFloat<StateT>(sum[i / 4][i % 4]);
}

constexpr int kCorrectRows = 128;
constexpr int kCorrectThreads = 256;
constexpr int kFewSegments = 8;

struct KdaCorrectShared {
  alignas(16) unsigned char queries[kCorrectRows * kTileRowBytes];
  alignas(16) unsigned char state[kTileDim * kTileRowBytes];  // KdaBorder::half
};

// Outputs of all segments but the first: those from zero plus queries times the state before the segment. With kNorm
// then the gated norm, also of the first segments'. Starts when all blocks of the composition have. Grid (heads, blocks
// of 128 rows, sequences of the order).
template <bool kNorm>
__global__ void __launch_bounds__(kCorrectThreads, 2)
    KdaCorrectKernel(const __grid_constant__ KdaParams p, const __grid_constant__ SequenceBatch batch,
                     const __grid_constant__ KdaOrder order, const __grid_constant__ KdaSplit split) {
  KdaCorrectShared& s = *DynamicShared<KdaCorrectShared>();
  const int sequence = order.sequence[blockIdx.z], head = blockIdx.x;
  const int begin = batch.token_begin[sequence], end = batch.token_begin[sequence + 1];
  const int origin = begin - batch.context[sequence] % kTileRows;
  // The block's rows, from the origin in units of kCorrectRows. First segments last. With few segments, whose states
  // are all there soon, the last rows of all come first, which lie in the second-level cache still.
  const int firsts = split.first / kCorrectRows, others = gridDim.y - firsts, each = split.tokens / kCorrectRows;
  int block = static_cast<int>(blockIdx.y) < others ? firsts + blockIdx.y : blockIdx.y - others;
  if (static_cast<int>(blockIdx.y) < others && split.segments <= kFewSegments) {
    const int count = split.segments - 1;
    block = firsts + static_cast<int>(blockIdx.y) % count * each + each - 1 - static_cast<int>(blockIdx.y) / count;
  }
  const int from = origin + kCorrectRows * block, to = min(end, from + kCorrectRows);
  const int segment = split.SegmentOf(kCorrectRows * block);
  // One block makes the launch end after the composition.
  if (blockIdx.x == 0 && blockIdx.y + 1 == gridDim.y && blockIdx.z + 1 == gridDim.z) GridDependencyWait();
  if (from >= end || (!kNorm && segment == 0)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int64_t width = static_cast<int64_t>(p.heads) * kTileDim, home = static_cast<int64_t>(head) * kTileDim;
  KdaBorder* borders = split.border + static_cast<int64_t>(blockIdx.z) * split.segments * p.heads + head;
  const KdaBorder& border = borders[segment * p.heads];
  if (origin + split.first < end) {
    if (threadIdx.x == 0) {
      const uint32_t* ready = &borders[max(segment, 1) * p.heads].ready;
      while (LoadAcquire(ready) < kTileDim / 16) __nanosleep(100);
    }
    __syncthreads();
  } else {
    GridDependencyWait();
  }
  const int piece = threadIdx.x % 16;
  const unsigned char* state = border.half;
  for (int row = threadIdx.x / 16; segment > 0 && row < kCorrectRows; row += kCorrectThreads / 16) {
    CopyAsync16(s.queries + TilePiece(row, piece), split.queries + min(from + row, to - 1) * width + home + 8 * piece,
                from + row < to);
    CopyAsync16(s.state + 16 * (16 * row + piece), state + 16 * (16 * row + piece));
  }
  CopyAsyncCommit();
  // Outputs from zero, a lane's four in a row at a time.
  uint2 before[2][8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = max(begin, min(from + 16 * warp + 8 * half + g, to - 1));
    const bf16* out = static_cast<const bf16*>(p.out.data) + row * p.out.ld + home + 4 * t;
#pragma unroll
    for (int m = 0; m < 8; ++m) before[half][m] = *reinterpret_cast<const uint2*>(out + 16 * m);
  }
  float o[16][4] = {};
  CopyAsyncWait<0>();
  __syncthreads();
#pragma unroll 2
  for (int k = 0; segment > 0 && k < 8; ++k) {
    uint32_t rows[4];
    LoadMatrix4(rows, s.queries + TilePiece(16 * warp + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      uint32_t columns[4];
      LoadMatrix4Transposed(columns, s.state + TilePiece(16 * k + lane % 16, 2 * m + lane / 16));
      MmaF16(o[2 * m], rows, columns[0], columns[1]);
      MmaF16(o[2 * m + 1], rows, columns[2], columns[3]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = from + 16 * warp + 8 * half + g;
    const bool exists = row >= begin && row < to;
    const int64_t safe = exists ? row : to - 1;
    bf16* out = static_cast<bf16*>(p.out.data) + safe * p.out.ld + home + 4 * t;
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      o[2 * m][2 * half] += LowBf16(before[half][m].x);
      o[2 * m][2 * half + 1] += HighBf16(before[half][m].x);
      o[2 * m + 1][2 * half] += LowBf16(before[half][m].y);
      o[2 * m + 1][2 * half + 1] += HighBf16(before[half][m].y);
    }
    float scale = 1;
    if constexpr (kNorm) {
      float square = 0;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        square = fmaf(o[n][2 * half], o[n][2 * half], square);
        square = fmaf(o[n][2 * half + 1], o[n][2 * half + 1], square);
      }
      square += __shfl_xor_sync(kAllLanes, square, 1);
      square += __shfl_xor_sync(kAllLanes, square, 2);
      scale = rsqrtf(square / kTileDim + p.norm_eps);
    }
    const bf16* gates = static_cast<const bf16*>(p.gate.data) + safe * p.gate.ld + home + 4 * t;
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      float x[4] = {o[2 * m][2 * half], o[2 * m][2 * half + 1], o[2 * m + 1][2 * half], o[2 * m + 1][2 * half + 1]};
      if constexpr (kNorm) {
        const uint2 gate = *reinterpret_cast<const uint2*>(gates + 16 * m);
        const float4 weight = *reinterpret_cast<const float4*>(p.norm_weight + 16 * m + 4 * t);
        x[0] *= scale * weight.x * Sigmoid(LowBf16(gate.x));
        x[1] *= scale * weight.y * Sigmoid(HighBf16(gate.x));
        x[2] *= scale * weight.z * Sigmoid(LowBf16(gate.y));
        x[3] *= scale * weight.w * Sigmoid(HighBf16(gate.y));
      }
      if (exists) *reinterpret_cast<uint2*>(out + 16 * m) = {PackBf16(x[0], x[1]), PackBf16(x[2], x[3])};
    }
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
