#pragma once

#include <cuda.h>

#include "kernels/cuda/group_mma.cuh"
#include "kernels/cuda/mla.cuh"
#include "kernels/cuda/mla_splits.cuh"

// Absorbed MLA attention on the tensor cores, bf16 lines of 512 + 64: a tile of 32 or 64 rows walks its keys 64 at a
// time, the keys of one split. Keys and values are the same lines, so a line is read once, by all rows of the tile.
//
// All products are transposed: 64 keys or 64 columns of the latent are a product's rows, the tile's rows its columns,
// so that the 32 heads of a decode fill the matrix unit. Warpgroups have roles: one copies lines, one makes scores [64
// keys, rows] and probabilities, which pass through shared memory, two sum 256 columns of the output each in their
// registers. Scores of the next 64 keys are made while values are summed.
namespace k3::cuda {

constexpr int kAbsorbedKeys = kSplitKeys;  // of a step
constexpr int kAbsorbedLatent = 512;
constexpr int kAbsorbedRope = 64;
constexpr int kAbsorbedLine = kAbsorbedLatent + kAbsorbedRope;
constexpr int kAbsorbedColumns = kAbsorbedLine / 64;  // 64-element columns of swizzled atoms
constexpr int kAbsorbedStages = 2;
constexpr int kAbsorbedGroupBytes = 8 * 128 * kAbsorbedColumns;  // of 8 lines, which lie together: column by column
// Warpgroups: 0 and 1 sum values, 2 makes scores, 3 copies.
constexpr int kAbsorbedThreads = 512;
// For the compiler: 80 registers a thread of small tiles, so that the kernels before and after find room beside them.
template <int kRows>
constexpr int kAbsorbedBound = kRows == 32 ? 768 : kAbsorbedThreads;
// Named barriers: of the scoring warpgroup; queries are there; of a summing warpgroup, its sums lie in shared memory.
constexpr int kScoreBarrier = 1, kQueryBarrier = 2, kStagedBarrier = 3;
constexpr int kAbsorbedStaged = kAbsorbedLatent + 8;  // elements from row to row of sums on their way out

template <int kRows>
struct AbsorbedShared {
  static constexpr int kTurns = kRows == 32 ? 2 : 1;  // buffers of probabilities
  alignas(1024) unsigned char q[kAbsorbedColumns][kRows * 128];
  alignas(1024) unsigned char lines[kAbsorbedStages][kAbsorbedKeys / 8][kAbsorbedColumns][8 * 128];
  alignas(1024) unsigned char probabilities[kTurns][kRows * 128];  // [row][key]
  float shrink[kTurns][kRows];
  float partial[2][4][kRows];  // by step and warp
  float scale[kRows];
  int limit[kRows];  // keys that a row sees
  SequenceSplit split;
  // Full: the copying threads, or the copy engine. Scored: the scoring threads. Empty, summed: the summing warps.
  // Scaled: the lanes that write `scale`.
  uint64_t full[kAbsorbedStages], empty[kAbsorbedStages];
  uint64_t scored[kTurns], summed[kTurns];
  uint64_t scaled;
};

struct AbsorbedArgs {
  MlaRows rows;
  MlaPages pages;
  const bf16* latent_q;  // [rows, 512]
  Matrix<const bf16> q;  // [tokens, heads * (nope + 64)]
  int nope_dim;
  bool rope_aligned;   // rope parts start on 16 bytes
  bool boxes;          // the copy engine brings lines: pages hold a multiple of 64
  float scale_log2;    // score scale times log2(e)
  int splits;          // of each tile, or
  int shared_splits;   // not 0: of all sequences together, see ForSplits
  bool whole;          // with shared splits: sequences that have one go to latent_out
  bool paced;          // with shared splits: blocks do not get ahead of each other, see kPacePolls
  int2* split_of;      // [sequences] of shared splits: those before the sequence's, its own; written by the blocks
  uint32_t* progress;  // of all blocks together, kProgressUnits a block; zeroed by the launch before
  bf16* latent_out;    // [rows, 512], where there is one split
  bf16* partial;       // otherwise normalised outputs: [tiles, 64, splits, 512]; of shared splits [blocks, 64, 512]
  float* partial_lse;  // the same without the 512: base-2 logarithm of the sum, -inf where a split has no key
};

// Blocks do not all get memory equally fast, and the last one decides. With `paced` none starts a step while it is more
// than half a step ahead of the mean of all, in proportion to its work, so that the others get what it leaves. For
// speed only: it asks kPacePolls times at most, in case that not all blocks run at once.
constexpr int kPacePolls = 16;
constexpr unsigned kProgressUnits = 1 << 24;

// The operand `bytes` further on in shared memory.
__device__ __forceinline__ uint64_t OperandAt(uint64_t operand, int bytes) { return operand + (bytes >> 4); }

// Keys of a split: multiples of 64, decided by the tile's own length alone.
__device__ __forceinline__ int AbsorbedSplitKeys(int keys, int splits) {
  return max(kAbsorbedKeys, (keys + splits * kAbsorbedKeys - 1) / (splits * kAbsorbedKeys) * kAbsorbedKeys);
}

// Brings the lines of keys [begin, end) of a sequence, 64 a stage, rows beyond the end as zeros or, with boxes, as
// whatever the page holds there. By the 128 threads of a warpgroup; with boxes by one of them. `blocks`: that keep
// pace.
template <int kRows>
__device__ __forceinline__ void CopyAbsorbedLines(AbsorbedShared<kRows>& s, const CUtensorMap& boxes,
                                                  const AbsorbedArgs& args, const SequenceBatch& batch, int sequence,
                                                  int begin, int end, int blocks) {
  const int thread = threadIdx.x % 128, piece = thread % 8;
  const int steps = (end - begin + kAbsorbedKeys - 1) / kAbsorbedKeys;
  if (args.boxes) {
    if (thread != 0) return;
    const int32_t* table = batch.page_table + sequence * batch.page_table_stride;
    const int page_size = args.pages.page_size;
    int page = table[begin / page_size], line = begin % page_size;
    const uint32_t unit = kProgressUnits / static_cast<uint32_t>(steps);
    for (int step = 0; step < steps; ++step) {
      const int stage = step % kAbsorbedStages;
      int next = page, next_line = line + kAbsorbedKeys;
      if (next_line >= page_size) {
        next_line = 0;
        const int key = begin + (step + 1) * kAbsorbedKeys;
        if (key < end) next = table[key / page_size];
      }
      const bool paced = args.paced && step > 0;
      uint32_t progress = paced ? LoadRelaxed(args.progress) : 0;
      BarrierWait(&s.empty[stage], (step / kAbsorbedStages & 1) ^ 1);
      if (args.paced) AddRelaxed(args.progress, unit);
      if (paced) {
        const uint32_t enough = unit / 2 * static_cast<uint32_t>(2 * step - 1) * static_cast<uint32_t>(blocks);
        for (int i = 0; i < kPacePolls && progress < enough; ++i) progress = LoadRelaxed(args.progress);
      }
      BarrierArriveExpect(&s.full[stage], sizeof(s.lines[0]));
#pragma unroll
      for (int i = 0; i < kAbsorbedKeys / 8; ++i) {
        // Page -1 lies outside the tensor: zeros.
        CopyTensor4(s.lines[stage][i], &boxes, 0, line + 8 * i, 0, page, &s.full[stage]);
      }
      page = next;
      line = next_line;
    }
    return;
  }
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kAbsorbedStages;
    BarrierWait(&s.empty[stage], (step / kAbsorbedStages & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < kAbsorbedKeys / 16; ++i) {
      const int row = thread / 8 + 16 * i, key = begin + step * kAbsorbedKeys + row;
      const bf16* line = key < end ? MlaLine<const bf16>(args.pages, batch, sequence, key, kAbsorbedLine) : nullptr;
#pragma unroll
      for (int c = 0; c < kAbsorbedColumns; ++c) {
        CopyAsync16(s.lines[stage][row / 8][c] + Swizzle128(row % 8, piece),
                    line != nullptr ? line + 64 * c + 8 * piece : args.latent_q, line != nullptr);
      }
    }
    CopyAsyncCommit();
    if (step > 0) {
      CopyAsyncWait<1>();
      FenceSharedForMatrix();
      BarrierArrive(&s.full[(step - 1) % kAbsorbedStages]);
    }
  }
  CopyAsyncWait<0>();
  FenceSharedForMatrix();
  BarrierArrive(&s.full[(steps - 1) % kAbsorbedStages]);
}

// Of 8 lanes that differ in lane / 4 and hold v[0..P-1] each, lane g gets the maxima of v[g P / 8 ..] in v[0 .. P / 8).
template <int P, int kHalf = P / 2, int kLane = 16>
__device__ __forceinline__ void ColumnMaxEach(float (&v)[P], int lane) {
  if constexpr (kLane >= 4) {
    const bool upper = (lane & kLane) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float give = upper ? v[i] : v[i + kHalf];
      const float keep = upper ? v[i + kHalf] : v[i];
      v[i] = fmaxf(keep, __shfl_xor_sync(kAllLanes, give, kLane));
    }
    ColumnMaxEach<P, kHalf / 2, kLane / 2>(v, lane);
  }
}

// Scores and softmax of keys [begin, end), transposed: a product's rows are keys, its columns the tile's rows, so that
// no half of the matrix unit's work is lost on the few rows of a decode. Thread (g, t) of warp w holds keys 16 w + g
// and + 8 of columns 8 j + 2 t and + 1.
template <int kRows>
__device__ __forceinline__ void ScoreAbsorbed(AbsorbedShared<kRows>& s, const AbsorbedArgs& args, int begin, int end,
                                              float* lse, int64_t lse_step, int rows) {
  constexpr int kColumns = kRows / 4;  // of a thread
  constexpr int kOwned = kRows / 32;   // whose maxima a lane keeps: lane + 32 i
  constexpr int kTurns = AbsorbedShared<kRows>::kTurns;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  const int steps = (end - begin + kAbsorbedKeys - 1) / kAbsorbedKeys;
  float top[kOwned], sum[kColumns];
#pragma unroll
  for (int i = 0; i < kOwned; ++i) top[i] = -INFINITY;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sum[i] = 0;
  const uint64_t queries = SharedOperand(s.q[0]);
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kAbsorbedStages, turn = step % kTurns, key = begin + step * kAbsorbedKeys;
    BarrierWait(&s.full[stage], step / kAbsorbedStages & 1);
    if (args.boxes && key + kAbsorbedKeys > end) {
      for (int row = end - key + warp; row < kAbsorbedKeys; row += 4) {
        for (int i = lane; i < 8 * kAbsorbedColumns; i += 32) {
          *reinterpret_cast<uint4*>(s.lines[stage][row / 8][i / 8] + Swizzle128(row % 8, i % 8)) = uint4{};
        }
      }
      FenceSharedForMatrix();
      NamedBarrierSync(kScoreBarrier, 128);
    }
    float score[kRows / 2];
    const uint64_t lines = SharedOperand(s.lines[stage][0][0], kAbsorbedGroupBytes);
    GroupMmaFence();
#pragma unroll
    for (int c = 0; c < kAbsorbedColumns; ++c) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        GroupMma<kRows>(score, OperandAt(lines, 1024 * c + 32 * k), OperandAt(queries, kRows * 128 * c + 32 * k),
                        c > 0 || k > 0);
      }
    }
    GroupMmaCommit();
    GroupMmaWait<0>();

    if (key + kAbsorbedKeys > s.limit[0]) {  // of the first row, which sees the least
      const int first_key = key + 16 * warp + g;
#pragma unroll
      for (int j = 0; j < kRows / 2; ++j) {
        if (first_key + j / 2 % 2 * 8 >= s.limit[j / 4 * 8 + 2 * t + j % 2]) score[j] = -INFINITY;
      }
    }
    float(&partial)[4][kRows] = s.partial[step % 2];
    float most[kColumns];  // column 8 j + 2 t + e at 2 j + e
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      most[j] = fmaxf(score[j / 2 * 4 + j % 2], score[j / 2 * 4 + j % 2 + 2]);
    }
    ColumnMaxEach<kColumns>(most, lane);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const int j = g * kOwned + i;
      partial[warp][j / 2 * 8 + 2 * t + j % 2] = most[i];
    }
    NamedBarrierSync(kScoreBarrier, 128);
    float base[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const int row = lane + 32 * i;
      const float tile_top = fmaxf(fmaxf(partial[0][row], partial[1][row]), fmaxf(partial[2][row], partial[3][row]));
      const float new_top = fmaxf(top[i], tile_top * args.scale_log2);
      base[i] = new_top == -INFINITY ? 0.0f : new_top;
      const float shrink = Exp2(top[i] - base[i]);
      top[i] = new_top;
      most[i] = shrink;
    }
    BarrierWait(&s.summed[turn], (step / kTurns & 1) ^ 1);
    if (warp == 0) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) s.shrink[turn][lane + 32 * i] = most[i];
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int row = j / 2 * 8 + 2 * t + j % 2;
      sum[j] *= __shfl_sync(kAllLanes, most[j / 8], row % 32);
      const float column_base = __shfl_sync(kAllLanes, base[j / 8], row % 32);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = score[j / 2 * 4 + j % 2 + 2 * i];
        x = Exp2(fmaf(x, args.scale_log2, -column_base));
        sum[j] += x;
      }
    }
#pragma unroll
    for (int j = 0; j < kRows / 8; j += 2) {
      const uint32_t fragment[4] = {
          PackBf16(score[4 * j], score[4 * j + 1]), PackBf16(score[4 * j + 2], score[4 * j + 3]),
          PackBf16(score[4 * j + 4], score[4 * j + 5]), PackBf16(score[4 * j + 6], score[4 * j + 7])};
      StoreMatrix4Transposed(
          s.probabilities[turn] + Swizzle128(8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2), fragment);
    }
    FenceSharedForMatrix();
    BarrierArrive(&s.scored[turn]);
  }
  // The sums of all keys, by warp, then over warps.
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) sum[j] += __shfl_xor_sync(kAllLanes, sum[j], distance);
  }
  NamedBarrierSync(kScoreBarrier, 128);  // the last maxima have been read
  if (g == 0) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) s.partial[0][warp][j / 2 * 8 + 2 * t + j % 2] = sum[j];
  }
  NamedBarrierSync(kScoreBarrier, 128);
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const int row = lane + 32 * i;
      const float total = (s.partial[0][0][row] + s.partial[0][1][row]) + (s.partial[0][2][row] + s.partial[0][3][row]);
      s.scale[row] = total > 0 ? 1.0f / total : 0.0f;
      if (lse != nullptr && row < rows) lse[row * lse_step] = total > 0 ? top[i] + log2f(total) : -INFINITY;
    }
    BarrierArrive(&s.scaled);
  }
}

// Output columns [256 group, + 256) of all rows, transposed: a product's rows are columns of the latent.
template <int kRows>
__device__ __forceinline__ void SumAbsorbed(AbsorbedShared<kRows>& s, int steps, float (&out)[4][kRows / 2]) {
  constexpr int kTurns = AbsorbedShared<kRows>::kTurns;
  const int group = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) out[m][j] = 0;
  }
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kAbsorbedStages, turn = step % kTurns;
    BarrierWait(&s.full[stage], step / kAbsorbedStages & 1);
    BarrierWait(&s.scored[turn], step / kTurns & 1);
    float shrink[kRows / 4];
    bool shrinks = false;
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      shrink[j] = s.shrink[turn][j / 2 * 8 + 2 * t + j % 2];
      shrinks = shrinks || shrink[j] != 1.0f;
    }
    if (__any_sync(kAllLanes, shrinks)) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int j = 0; j < kRows / 2; ++j) out[m][j] *= shrink[j / 4 * 2 + j % 2];
      }
    }
    const uint64_t lines = SharedOperand(s.lines[stage][0][4 * group], kAbsorbedGroupBytes);
    const uint64_t probabilities = SharedOperand(s.probabilities[turn]);
    GroupMmaFence();
#pragma unroll
    for (int k = 0; k < kAbsorbedKeys / 16; ++k) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        GroupMma<kRows, false, true>(out[m], OperandAt(lines, 2 * k * kAbsorbedGroupBytes + 1024 * m),
                                     OperandAt(probabilities, 32 * k));
      }
    }
    GroupMmaCommit();
    GroupMmaWait<0>();
    if (lane == 0) {
      BarrierArrive(&s.empty[stage]);
      BarrierArrive(&s.summed[turn]);
    }
  }
}

// Grid (tiles, splits), with shared splits (tiles of a sequence, splits); tiles of at most kRows rows. `boxes`: the
// pages as LineBoxes, used if args.boxes.
template <int kRows, bool kShared>
__global__ void __launch_bounds__(kAbsorbedBound<kRows>, 1)
    MlaAbsorbedKernel(const __grid_constant__ CUtensorMap boxes, AbsorbedArgs args, SequenceBatch batch) {
  AbsorbedShared<kRows>& s = *DynamicShared<AbsorbedShared<kRows>>();
  GridDependencyRelease();
  const int lane = threadIdx.x % 32, heads = args.rows.heads;
  const auto position_of = [&](int row) { return batch.position[args.rows.token_begin + row / heads]; };
  MlaTile tile;
  int key_begin, key_end;
  if constexpr (!kShared) {
    tile = FindMlaTile(args.rows, batch, blockIdx.x, lane);
    const int keys = position_of(tile.row + tile.count - 1) + 1;  // of the last row, which sees the most
    const int split_keys = AbsorbedSplitKeys(keys, args.splits);
    key_begin = blockIdx.y * split_keys;
    key_end = min(keys, key_begin + split_keys);
    if (key_begin >= key_end) return;  // nothing to do; the combination does not read it
  } else if (__shfl_sync(kAllLanes, threadIdx.x / 32, 0) == 12) {
    const SequenceSplit split = FindSplit(args.rows, batch, blockIdx.y, args.shared_splits, lane);
    if (lane == 0) {
      s.split = split;
      if (split.sequence >= 0 && split.index == 0 && blockIdx.x == 0) {
        args.split_of[split.sequence] = {static_cast<int>(blockIdx.y), split.splits};
      }
    }
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kAbsorbedStages; ++i) {
      BarrierInit(&s.full[i], args.boxes ? 1 : 128);
      BarrierInit(&s.empty[i], 8);
    }
    for (int i = 0; i < s.kTurns; ++i) {
      BarrierInit(&s.scored[i], 128);
      BarrierInit(&s.summed[i], 8);
    }
    BarrierInit(&s.scaled, 32);
    BarrierInitFence();
  }
  __syncthreads();
  int blocks = 0;
  bool partial = args.splits > 1;
  if constexpr (kShared) {
    const SequenceSplit split = s.split;
    if (split.sequence < 0) return;
    blocks = split.all * gridDim.x;
    partial = !args.whole || split.splits > 1;
    tile = MlaTileOf(args.rows, batch, split.sequence, blockIdx.x);
    key_begin = split.Begin(split.index);
    key_end = split.Begin(split.index + 1);
    key_begin = __shfl_sync(kAllLanes, key_begin, 0);  // says that they are the same in all lanes
    key_end = __shfl_sync(kAllLanes, key_end, 0);
  }
  const int role = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  if (role == 3) {
    GiveRegisters<kRows == 32 ? 24 : 40>();
    CopyAbsorbedLines(s, boxes, args, batch, tile.sequence, key_begin, key_end, blocks);
    return;
  }
  GridDependencyWait();  // lines and tables are older than the launch before
  // Queries: latent parts, then rope parts, zeros for rows that do not exist.
  const int piece = threadIdx.x % 8;
  for (int r = threadIdx.x / 8; r < kRows; r += 48) {
    const bool exists = r < tile.count;
    const int row = tile.row + r;
    const bf16* latent = args.latent_q + static_cast<int64_t>(row) * kAbsorbedLatent;
#pragma unroll
    for (int c = 0; c < kAbsorbedColumns - 1; ++c) {
      CopyAsync16(s.q[c] + Swizzle128(r, piece), exists ? latent + 64 * c + 8 * piece : args.latent_q, exists);
    }
    const bf16* rope = args.q.Row(args.rows.token_begin + row / heads) + row % heads * (args.nope_dim + kAbsorbedRope) +
                       args.nope_dim + 8 * piece;
    unsigned char* to = s.q[kAbsorbedColumns - 1] + Swizzle128(r, piece);
    if (args.rope_aligned) {
      CopyAsync16(to, exists ? rope : args.latent_q, exists);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) reinterpret_cast<bf16*>(to)[i] = exists ? rope[i] : FromFloat<bf16>(0.0f);
    }
    if (piece == 0) s.limit[r] = exists ? position_of(row) + 1 : 0;
  }
  CopyAsyncCommit();
  CopyAsyncWait<0>();
  FenceSharedForMatrix();
  NamedBarrierSync(kQueryBarrier, 384);

  // Of row 0, and from row to row.
  const int64_t slot = kShared ? (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * kMlaTileRows
                               : static_cast<int64_t>(blockIdx.x) * kMlaTileRows * args.splits + blockIdx.y;
  const int slot_step = kShared ? 1 : args.splits;
  if (role == 2) {
    if constexpr (kRows == 32) {
      TakeRegisters<88>();
    } else {
      GiveRegisters<104>();
    }
    ScoreAbsorbed(s, args, key_begin, key_end, partial ? args.partial_lse + slot : nullptr, slot_step, tile.count);
    return;
  }
  TakeRegisters<kRows == 32 ? 104 : 184>();
  float out[4][kRows / 2];
  SumAbsorbed(s, (key_end - key_begin + kAbsorbedKeys - 1) / kAbsorbedKeys, out);
  BarrierWait(&s.scaled, 0);
  // Through the memory of the queries, which nobody reads any more, so that whole lines are stored.
  bf16* staged = reinterpret_cast<bf16*>(s.q) + 256 * role;
  const int t = lane % 4, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int j = 0; j < kRows / 8; j += 2) {
    float scale[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scale[i] = s.scale[8 * (j + i / 2) + 2 * t + i % 2];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      uint32_t fragment[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        fragment[i] =
            PackBf16(out[m][4 * j + 2 * i] * scale[i / 2 * 2], out[m][4 * j + 2 * i + 1] * scale[i / 2 * 2 + 1]);
      }
      StoreMatrix4Transposed(
          staged + (8 * (j + lane / 16) + lane % 8) * kAbsorbedStaged + 64 * m + 16 * warp + lane / 8 % 2 * 8,
          fragment);
    }
  }
  NamedBarrierSync(kStagedBarrier + role, 128);
  bf16* to = partial ? args.partial + slot * kAbsorbedLatent
                     : args.latent_out + static_cast<int64_t>(tile.row) * kAbsorbedLatent;
  for (int r = warp; r < tile.count; r += 4) {
    *reinterpret_cast<uint4*>(to + static_cast<int64_t>(r) * slot_step * kAbsorbedLatent + 256 * role + 8 * lane) =
        *reinterpret_cast<const uint4*>(staged + r * kAbsorbedStaged + 8 * lane);
  }
}

// Splits of a tile that hold keys, and where the partial results of its row `r` begin.
__device__ __forceinline__ int AbsorbedSplits(const AbsorbedArgs& args, const SequenceBatch& batch,
                                              const MlaTile& tile) {
  const int last = args.rows.token_begin + (tile.row + tile.count - 1) / args.rows.heads;
  const int keys = batch.position[last] + 1;
  const int split_keys = AbsorbedSplitKeys(keys, args.splits);
  return (keys + split_keys - 1) / split_keys;
}

// sum += scale * (four bf16).
__device__ __forceinline__ void AddScaled(float4& sum, float scale, uint2 x) {
  sum.x = fmaf(scale, LowBf16(x.x), sum.x);
  sum.y = fmaf(scale, HighBf16(x.x), sum.y);
  sum.z = fmaf(scale, LowBf16(x.y), sum.z);
  sum.w = fmaf(scale, HighBf16(x.y), sum.w);
}

constexpr int kCombineThreads = 128;
constexpr unsigned kCombineBlocks = 4;  // a tile: so few that they all wait beside the attention

struct CombineShared {
  MlaTile tile;
  int64_t first;  // of the tile's first row, in rows of the latent
  int row_step, split_step, splits;
  float weight[1];  // [splits]
};

// latent_out[row] = sum over splits of their outputs, weighted by their share of the softmax. Grid (kCombineBlocks,
// tiles).
__global__ void __launch_bounds__(kCombineThreads) MlaCombineKernel(AbsorbedArgs args, SequenceBatch batch) {
  CombineShared& s = *DynamicShared<CombineShared>();
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    const MlaTile tile = FindMlaTile(args.rows, batch, blockIdx.y, lane);
    GridDependencyWait();
    if (lane == 0) {
      s.tile = tile;
      if (args.shared_splits > 0) {
        const int tiles = args.rows.tiles_per_sequence;
        const int2 split_of = args.split_of[tile.sequence];
        s.first = static_cast<int64_t>(split_of.x * tiles + static_cast<int>(blockIdx.y) % tiles) * kMlaTileRows;
        s.row_step = 1;
        s.split_step = tiles * kMlaTileRows;
        s.splits = split_of.y;
      } else {
        s.first = static_cast<int64_t>(blockIdx.y) * kMlaTileRows * args.splits;
        s.row_step = args.splits;
        s.split_step = 1;
        s.splits = AbsorbedSplits(args, batch, tile);
      }
    }
  } else {
    GridDependencyWait();
  }
  __syncthreads();
  const MlaTile tile = s.tile;
  const int splits = s.splits, step = s.split_step;
  if (args.shared_splits > 0 && splits == 1) return;  // its block wrote to latent_out
  for (int row = static_cast<int>(blockIdx.x); row < tile.count; row += gridDim.x) {
    const int64_t slot = s.first + row * s.row_step;
    const float* lse = args.partial_lse + slot;
    float top = -INFINITY;
    for (int i = lane; i < splits; i += 32) top = fmaxf(top, lse[i * step]);
    top = WarpMax(top);
    float sum = 0;
    for (int i = lane; i < splits; i += 32) {
      const float x = Exp2(lse[i * step] - top);
      if (threadIdx.x < 32) s.weight[i] = x;
      sum += x;
    }
    sum = WarpSum(sum);
    __syncthreads();
    float4 out = {};
    const uint2* from = reinterpret_cast<const uint2*>(args.partial + slot * kAbsorbedLatent) + threadIdx.x;
#pragma unroll 4
    for (int i = 0; i < splits; ++i) {
      AddScaled(out, s.weight[i], from[static_cast<int64_t>(i) * step * (kAbsorbedLatent / 4)]);
    }
    const float scale = 1.0f / sum;
    uint2* to = reinterpret_cast<uint2*>(args.latent_out + static_cast<int64_t>(tile.row + row) * kAbsorbedLatent) +
                threadIdx.x;
    *to = {PackBf16(out.x * scale, out.y * scale), PackBf16(out.z * scale, out.w * scale)};
    __syncthreads();  // the weights have been read
  }
}

}  // namespace k3::cuda
