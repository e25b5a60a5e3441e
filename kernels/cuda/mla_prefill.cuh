#pragma once

#include <cuda.h>

#include "kernels/cuda/group_mma.cuh"
#include "kernels/cuda/mla.cuh"

// MLA for many queries of one sequence, with keys and values expanded from the latents (spec 3.4): per pair of query
// and key a third of the absorbed form's arithmetic. Lines of a block of keys are gathered, one product with kv_b
// expands them for all heads, and this kernel runs causal attention over the block, carrying the softmax from block to
// block.
//
// Resident blocks take tile after tile (128 queries of a head), the longest first, by a counter. One thread brings
// tiles by the copy engine; two warpgroups own 64 queries each. A warpgroup's softmax runs beside its own product with
// the values before and beside the other's products.
namespace k3::cuda {

constexpr int kPrefillQueries = 128;  // of a tile: 64 a warpgroup
constexpr int kPrefillKeys = 128;     // of a stage
constexpr int kPrefillStages = 2;
constexpr int kPrefillMultiplyThreads = 256;
constexpr int kPrefillThreads = kPrefillMultiplyThreads + 128;
constexpr int kPrefillNope = 128;
constexpr int kPrefillRope = 64;
constexpr int kPrefillValue = 128;
constexpr int kPrefillLatent = 512;
constexpr int kPrefillLine = kPrefillLatent + kPrefillRope;
constexpr int kPrefillExpanded = kPrefillNope + kPrefillValue;  // of a head
constexpr int kPrefillColumn = 128 * 128;                       // bytes of 64 columns of a tile

struct PrefillShared {
  alignas(1024) unsigned char q[3][kPrefillColumn];  // nope, nope, rope: 64 columns each
  alignas(1024) unsigned char k[kPrefillStages][3][kPrefillColumn];
  alignas(1024) unsigned char v[kPrefillStages][2][kPrefillColumn];
  // Full: the thread that copies, and its copies. Empty: every multiplying warp.
  uint64_t q_full, q_empty;
  uint64_t k_full[kPrefillStages], k_empty[kPrefillStages];
  uint64_t v_full[kPrefillStages], v_empty[kPrefillStages];
  uint64_t number_full[2], number_empty[2];
  int number[2];  // of tiles, handed out in turns
};

struct PrefillArgs {
  Matrix<bf16> out;  // rows of the queries, [heads * 128]
  int queries;
  int query_position;  // of the first
  int heads;
  int head_group;  // heads whose tiles run together, so that their keys and values stay in the second-level cache
  int keys;
  int key_position;  // of the first
  float scale_log2;
  bool first, last;       // block of keys
  float* carry;           // [queries, heads, 128] sums not yet divided, unless first and last
  float2* carry_softmax;  // [queries, heads] base-2 maximum and sum
  int* counter;           // tiles taken, 0 at the start
};

struct PrefillTile {
  int head, first_query, queries, key_tiles;
};

__device__ __forceinline__ int PrefillTiles(const PrefillArgs& args) {
  return (args.queries + kPrefillQueries - 1) / kPrefillQueries * args.heads;
}

// Groups of heads one after the other; within a group the last queries, which see most, first.
__device__ __forceinline__ PrefillTile MakePrefillTile(const PrefillArgs& args, int number) {
  const int rows = (args.queries + kPrefillQueries - 1) / kPrefillQueries;
  const int group = number / (rows * args.head_group);
  const int first_head = group * args.head_group, heads = min(args.head_group, args.heads - first_head);
  number -= first_head * rows;
  PrefillTile tile;
  tile.head = first_head + number % heads;
  tile.first_query = (rows - 1 - number / heads) * kPrefillQueries;
  tile.queries = min(kPrefillQueries, args.queries - tile.first_query);
  const int seen = args.query_position + tile.first_query + tile.queries - args.key_position;  // by the last query
  tile.key_tiles = (max(0, min(args.keys, seen)) + kPrefillKeys - 1) / kPrefillKeys;
  return tile;
}

// Copies the lines of positions [first, first + keys) of a sequence together: a warp a line. Clears the counter of the
// tiles that follow.
__global__ void MlaGatherKernel(MlaPages pages, SequenceBatch batch, int sequence, int first, int keys, int line,
                                bf16* to, int* counter) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *counter = 0;
  const int key = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (key >= keys) return;
  const bf16* from = MlaLine<const bf16>(pages, batch, sequence, first + key, line);
  for (int i = threadIdx.x % 32; i < line / 8; i += 32) {
    reinterpret_cast<uint4*>(to + static_cast<int64_t>(key) * line)[i] =
        from != nullptr ? reinterpret_cast<const uint4*>(from)[i] : uint4{};
  }
}

// The thread that copies.
__device__ __forceinline__ void CopyPrefillTiles(PrefillShared& s, const CUtensorMap& queries, const CUtensorMap& lines,
                                                 const CUtensorMap& expanded, const PrefillArgs& args) {
  const int tiles = PrefillTiles(args);
  int step = 0;  // key tiles so far
  for (int turn = 0;; ++turn) {
    const int number = atomicAdd(args.counter, 1);
    BarrierWait(&s.number_empty[turn % 2], (turn / 2 & 1) ^ 1);
    s.number[turn % 2] = number;
    BarrierArrive(&s.number_full[turn % 2]);
    if (number >= tiles) return;
    const PrefillTile tile = MakePrefillTile(args, number);
    BarrierWait(&s.q_empty, (turn & 1) ^ 1);
    BarrierArriveExpect(&s.q_full, sizeof(s.q));
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      CopyTensor3(s.q[c], &queries, tile.head * (kPrefillNope + kPrefillRope) + 64 * c, tile.first_query, 0, &s.q_full);
    }
#pragma unroll 1
    for (int i = 0; i < tile.key_tiles; ++i, ++step) {
      const int stage = step % kPrefillStages;
      const uint32_t parity = (step / kPrefillStages & 1) ^ 1;
      const int column = tile.head * kPrefillExpanded, key = i * kPrefillKeys;
      BarrierWait(&s.k_empty[stage], parity);
      BarrierArriveExpect(&s.k_full[stage], sizeof(s.k[0]));
      CopyTensor3(s.k[stage][0], &expanded, column, key, 0, &s.k_full[stage]);
      CopyTensor3(s.k[stage][1], &expanded, column + 64, key, 0, &s.k_full[stage]);
      CopyTensor3(s.k[stage][2], &lines, kPrefillLatent, key, 0, &s.k_full[stage]);
      BarrierWait(&s.v_empty[stage], parity);
      BarrierArriveExpect(&s.v_full[stage], sizeof(s.v[0]));
      CopyTensor3(s.v[stage][0], &expanded, column + kPrefillNope, key, 0, &s.v_full[stage]);
      CopyTensor3(s.v[stage][1], &expanded, column + kPrefillNope + 64, key, 0, &s.v_full[stage]);
    }
  }
}

// The two warpgroups that multiply.
__device__ __forceinline__ void MultiplyPrefillTiles(PrefillShared& s, const PrefillArgs& args) {
  // Through a shuffle, so that the compiler knows it to be one value per warp.
  const int group = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool speaks = lane == 0;                               // for its warp
  const int row = 64 * group + threadIdx.x / 32 % 4 * 16 + g;  // this thread's rows: `row` and row + 8
  const int tiles = PrefillTiles(args);

  float out[64], score[64];
  float top[2], sum[2], shrink[2];
  int limit;  // keys that the first of the two rows sees; the second sees 8 more
  uint32_t probabilities[kPrefillKeys / 16][4];
  int step = 0;  // key tiles so far

  const auto issue_scores = [&](int n) {
    const int stage = n % kPrefillStages;
    BarrierWait(&s.k_full[stage], n / kPrefillStages & 1);
    GroupMmaFence();
#pragma unroll
    for (int c = 0; c < 3; ++c) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        GroupMma<128>(score, SharedOperand(s.q[c] + 64 * 128 * group + 32 * k), SharedOperand(s.k[stage][c] + 32 * k),
                      c > 0 || k > 0);
      }
    }
    GroupMmaCommit();
  };
  // A loop that ends when the values are there. Also what keeps the compiler from moving the wait for products that
  // follows it up, before the softmax that should run beside them.
  const auto wait_for_values = [&](int n) { BarrierWait(&s.v_full[n % kPrefillStages], n / kPrefillStages & 1); };
  const auto issue_values = [&](int n) {
    const int stage = n % kPrefillStages;
    GroupMmaFence();
#pragma unroll
    for (int k = 0; k < kPrefillKeys / 16; ++k) {
      GroupMma<128, true>(out, probabilities[k], SharedOperand(s.v[stage][0] + 2048 * k, 1024, kPrefillColumn));
    }
    GroupMmaCommit();
  };
  // Scores become probabilities over the new maximum, in place; `shrink` is what earlier sums must be multiplied by.
  const auto softmax = [&](int tile) {
    if ((tile + 1) * kPrefillKeys > __shfl_sync(kAllLanes, limit, 0)) {
      const int first_key = tile * kPrefillKeys + 2 * t;
#pragma unroll
      for (int j = 0; j < 64; ++j) {
        if (first_key + j / 4 * 8 + j % 2 >= limit + j / 2 % 2 * 8) score[j] = -INFINITY;
      }
    }
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float tile_top = fmaxf(score[2 * i], score[2 * i + 1]);
#pragma unroll
      for (int j = 4; j < 64; j += 4) tile_top = fmaxf(tile_top, fmaxf(score[j + 2 * i], score[j + 2 * i + 1]));
      tile_top = fmaxf(tile_top, __shfl_xor_sync(kAllLanes, tile_top, 1));
      tile_top = fmaxf(tile_top, __shfl_xor_sync(kAllLanes, tile_top, 2));
      const float new_top = fmaxf(top[i], tile_top * args.scale_log2);
      base[i] = new_top == -INFINITY ? 0.0f : new_top;
      shrink[i] = Exp2(top[i] - base[i]);
      top[i] = new_top;
      sum[i] *= shrink[i];
    }
#pragma unroll
    for (int j = 0; j < 64; ++j) {
      const int i = j / 2 % 2;
      score[j] = Exp2Here(fmaf(score[j], args.scale_log2, -base[i]));
      sum[i] += score[j];
    }
  };
  // Only while no product is in flight: all of its registers are touched.
  const auto take_over = [&] {
#pragma unroll
    for (int j = 0; j < 64; j += 2) {
      probabilities[j / 8][j / 4 % 2 * 2 + j / 2 % 2] = PackBf16(score[j], score[j + 1]);
    }
#pragma unroll
    for (int j = 0; j < 64; ++j) out[j] *= shrink[j / 2 % 2];
  };

  // The warpgroups issue their products in turns; the first begins.
  if (group == 1) NamedBarrierArrive(1, kPrefillMultiplyThreads);
  for (int turn = 0;; ++turn) {
    BarrierWait(&s.number_full[turn % 2], turn / 2 & 1);
    const int number = s.number[turn % 2];
    __syncwarp();
    if (speaks) BarrierArrive(&s.number_empty[turn % 2]);
    if (number >= tiles) break;
    const PrefillTile tile = MakePrefillTile(args, number);
    limit = args.query_position + tile.first_query + row + 1 - args.key_position;
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = -INFINITY;
      sum[i] = 0;
      if (args.first || row + 8 * i >= tile.queries) continue;
      const int64_t slot = static_cast<int64_t>(tile.first_query + row + 8 * i) * args.heads + tile.head;
      const float2 softmax = args.carry_softmax[slot];
      top[i] = softmax.x;
      sum[i] = t == 0 ? softmax.y : 0.0f;  // summed over the four lanes at the end
      const float* from = args.carry + slot * kPrefillValue + 2 * t;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float2 pair = *reinterpret_cast<const float2*>(from + 8 * j);
        out[4 * j + 2 * i] = pair.x;
        out[4 * j + 2 * i + 1] = pair.y;
      }
    }
    BarrierWait(&s.q_full, turn & 1);
    if (tile.key_tiles > 0) {
      issue_scores(step);
      GroupMmaWait<0>();
      if (speaks) BarrierArrive(&s.k_empty[step % kPrefillStages]);
      softmax(0);
      take_over();
      wait_for_values(step);
      for (int i = 0; i + 1 < tile.key_tiles; ++i, ++step) {
        NamedBarrierSync(1 + group, kPrefillMultiplyThreads);
        issue_scores(step + 1);
        issue_values(step);
        NamedBarrierArrive(2 - group, kPrefillMultiplyThreads);
        GroupMmaWait<1>();
        if (speaks) BarrierArrive(&s.k_empty[(step + 1) % kPrefillStages]);
        softmax(i + 1);  // while the values are summed
        wait_for_values(step + 1);
        GroupMmaWait<0>();
        if (speaks) BarrierArrive(&s.v_empty[step % kPrefillStages]);
        take_over();
      }
      if (speaks) BarrierArrive(&s.q_empty);
      issue_values(step);
      GroupMmaWait<0>();
      if (speaks) BarrierArrive(&s.v_empty[step % kPrefillStages]);
      ++step;
    } else if (speaks) {
      BarrierArrive(&s.q_empty);
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(kAllLanes, sum[i], 1);
      sum[i] += __shfl_xor_sync(kAllLanes, sum[i], 2);
      if (row + 8 * i >= tile.queries) continue;
      const int query = tile.first_query + row + 8 * i;
      if (args.last) {
        const float scale = 1.0f / sum[i];
        bf16* to = args.out.Row(query) + tile.head * kPrefillValue + 2 * t;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          *reinterpret_cast<uint32_t*>(to + 8 * j) =
              PackBf16(out[4 * j + 2 * i] * scale, out[4 * j + 2 * i + 1] * scale);
        }
      } else {
        const int64_t slot = static_cast<int64_t>(query) * args.heads + tile.head;
        if (t == 0) args.carry_softmax[slot] = {top[i], sum[i]};
        float* to = args.carry + slot * kPrefillValue + 2 * t;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          *reinterpret_cast<float2*>(to + 8 * j) = {out[4 * j + 2 * i], out[4 * j + 2 * i + 1]};
        }
      }
    }
  }
}

// Any grid, one block a multiprocessor. Maps: the queries' rows [queries, heads * 192], gathered lines [keys, 576],
// expanded [keys, heads * 256], all in boxes of 128 rows.
__global__ void __launch_bounds__(kPrefillThreads, 1)
    MlaPrefillKernel(const __grid_constant__ CUtensorMap queries, const __grid_constant__ CUtensorMap lines,
                     const __grid_constant__ CUtensorMap expanded, PrefillArgs args) {
  PrefillShared& s = *DynamicShared<PrefillShared>();
  if (threadIdx.x == 0) {
    constexpr int kWarps = kPrefillMultiplyThreads / 32;
    BarrierInit(&s.q_full, 1);
    BarrierInit(&s.q_empty, kWarps);
    for (int stage = 0; stage < kPrefillStages; ++stage) {
      BarrierInit(&s.k_full[stage], 1);
      BarrierInit(&s.k_empty[stage], kWarps);
      BarrierInit(&s.v_full[stage], 1);
      BarrierInit(&s.v_empty[stage], kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      BarrierInit(&s.number_full[i], 1);
      BarrierInit(&s.number_empty[i], kWarps);
    }
    BarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x >= kPrefillMultiplyThreads) {
    GiveRegisters<24>();
    if (threadIdx.x == kPrefillMultiplyThreads) CopyPrefillTiles(s, queries, lines, expanded, args);
  } else {
    TakeRegisters<240>();
    MultiplyPrefillTiles(s, args);
  }
}

}  // namespace k3::cuda
