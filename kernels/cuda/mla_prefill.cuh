#pragma once

#include "kernels/cuda/group_mma.cuh"
#include "kernels/cuda/mla.cuh"

// MLA for many queries of one sequence, with keys and values expanded from the latents (spec 3.4): per pair of query
// and key a third of the absorbed form's arithmetic. Lines of a block of keys are gathered, one product with kv_b
// expands them for all heads, and this kernel runs causal attention over the block, carrying the softmax from block to
// block.
namespace k3::cuda {

constexpr int kPrefillThreads = 256;
constexpr int kPrefillQueries = 128;  // of a block: 64 a warpgroup
constexpr int kPrefillKeys = 64;      // of a stage
constexpr int kPrefillStages = 4;
constexpr int kPrefillNope = 128;
constexpr int kPrefillRope = 64;
constexpr int kPrefillValue = 128;
constexpr int kPrefillLatent = 512;
constexpr int kPrefillLine = kPrefillLatent + kPrefillRope;
constexpr int kPrefillExpanded = kPrefillNope + kPrefillValue;  // of a head

struct PrefillStage {
  unsigned char k[3][kPrefillKeys * 128];  // nope, nope, rope: 64 columns each
  unsigned char v[2][kPrefillKeys * 128];
};
struct PrefillShared {
  alignas(1024) unsigned char q[3][kPrefillQueries * 128];
  alignas(1024) PrefillStage stage[kPrefillStages];
};

struct PrefillArgs {
  Matrix<const bf16> q;  // rows of the queries, [heads * 192]
  Matrix<bf16> out;      // the same rows, [heads * 128]
  int queries;
  int query_position;  // of the first
  int heads;
  const bf16* lines;     // [keys, 576]
  const bf16* expanded;  // [keys, heads, 256]
  int keys;
  int key_position;  // of the first
  float scale_log2;
  bool first, last;       // block of keys
  float* carry;           // [queries, heads, 128] sums not yet divided, unless first and last
  float2* carry_softmax;  // [queries, heads] base-2 maximum and sum
};

// Copies the lines of positions [first, first + keys) of a sequence together: a warp a line.
__global__ void MlaGatherKernel(MlaPages pages, SequenceBatch batch, int sequence, int first, int keys, int line,
                                bf16* to) {
  const int key = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (key >= keys) return;
  const bf16* from = MlaLine<const bf16>(pages, batch, sequence, first + key, line);
  for (int i = threadIdx.x % 32; i < line / 8; i += 32) {
    reinterpret_cast<uint4*>(to + static_cast<int64_t>(key) * line)[i] =
        from != nullptr ? reinterpret_cast<const uint4*>(from)[i] : uint4{};
  }
}

// Grid (heads, query tiles).
__global__ void __launch_bounds__(kPrefillThreads, 1) MlaPrefillKernel(PrefillArgs args) {
  PrefillShared& s = *DynamicShared<PrefillShared>();
  const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
  const int head = blockIdx.x;
  const int first_query = (gridDim.y - 1 - blockIdx.y) * kPrefillQueries;  // the longest first
  const int queries = min(kPrefillQueries, args.queries - first_query);
  const int seen = args.query_position + first_query + queries - args.key_position;  // keys of the last query
  const int keys = max(0, min(args.keys, seen));
  const int tiles = (keys + kPrefillKeys - 1) / kPrefillKeys;

  const int piece = threadIdx.x % 8, copy_row = threadIdx.x / 8;
  const auto fetch = [&](int tile) {
    if (tile < tiles) {
      PrefillStage& stage = s.stage[tile % kPrefillStages];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = copy_row + 32 * half;
        const int64_t key = tile * kPrefillKeys + row;
        const bool valid = key < keys;
        const bf16* expanded =
            valid ? args.expanded + (key * args.heads + head) * kPrefillExpanded + 8 * piece : args.expanded;
        const bf16* line = valid ? args.lines + key * kPrefillLine + kPrefillLatent + 8 * piece : args.lines;
        const int to = Swizzle128(row, piece);
        CopyAsync16(stage.k[0] + to, expanded, valid);
        CopyAsync16(stage.k[1] + to, expanded + 64, valid);
        CopyAsync16(stage.k[2] + to, line, valid);
        CopyAsync16(stage.v[0] + to, expanded + kPrefillNope, valid);
        CopyAsync16(stage.v[1] + to, expanded + kPrefillNope + 64, valid);
      }
    }
    CopyAsyncCommit();
  };
#pragma unroll
  for (int i = 0; i < kPrefillQueries / 32; ++i) {
    const int row = copy_row + 32 * i;
    const bool valid = row < queries;
    const bf16* q = args.q.Row(first_query + (valid ? row : 0)) + head * (kPrefillNope + kPrefillRope) + 8 * piece;
#pragma unroll
    for (int c = 0; c < 3; ++c) CopyAsync16(s.q[c] + Swizzle128(row, piece), q + 64 * c, valid);
  }
#pragma unroll
  for (int tile = 0; tile < kPrefillStages - 1; ++tile) fetch(tile);

  // This thread's rows: `row` and row + 8.
  const int g = lane / 4, t = lane % 4;
  const int row = 64 * group + threadIdx.x / 32 % 4 * 16 + g;
  int limit[2];  // keys that the row sees
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  float out[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) out[i] = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int query = first_query + row + 8 * i;
    limit[i] = row + 8 * i < queries ? args.query_position + query + 1 - args.key_position : 0;
    if (!args.first && row + 8 * i < queries) {
      const int64_t slot = static_cast<int64_t>(query) * args.heads + head;
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
  }

  float score[32] = {};
  float shrink[2];
  uint32_t probabilities[4][4];
  const auto issue_scores = [&](int tile) {
    const PrefillStage& stage = s.stage[tile % kPrefillStages];
#pragma unroll
    for (int c = 0; c < 3; ++c) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        GroupMma<64>(score, SharedOperand(s.q[c] + 64 * 128 * group + 32 * k), SharedOperand(stage.k[c] + 32 * k),
                     c > 0 || k > 0);
      }
    }
    GroupMmaCommit();
  };
  const auto issue_values = [&](int tile) {
    const PrefillStage& stage = s.stage[tile % kPrefillStages];
#pragma unroll
    for (int k = 0; k < kPrefillKeys / 16; ++k) {
      GroupMma<128, true>(out, probabilities[k], SharedOperand(stage.v[0] + 2048 * k, 1024, kPrefillKeys * 128));
    }
    GroupMmaCommit();
  };
  // Scores become probabilities over the new maximum, in place; `shrink` is what earlier sums must be multiplied by.
  const auto softmax = [&](int tile) {
    const int first_key = tile * kPrefillKeys + 2 * t;
    float tile_top[2] = {-INFINITY, -INFINITY};
    const bool masked = (tile + 1) * kPrefillKeys > min(limit[0], limit[1]);
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int i = j / 2 % 2;
      if (masked && first_key + j / 4 * 8 + j % 2 >= limit[i]) score[j] = -INFINITY;
      tile_top[i] = fmaxf(tile_top[i], score[j]);
    }
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tile_top[i] = fmaxf(tile_top[i], __shfl_xor_sync(kAllLanes, tile_top[i], 1));
      tile_top[i] = fmaxf(tile_top[i], __shfl_xor_sync(kAllLanes, tile_top[i], 2));
      const float new_top = fmaxf(top[i], tile_top[i] * args.scale_log2);
      base[i] = new_top == -INFINITY ? 0.0f : new_top;
      shrink[i] = Exp2(top[i] - base[i]);
      top[i] = new_top;
      sum[i] *= shrink[i];
    }
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int i = j / 2 % 2;
      score[j] = Exp2(fmaf(score[j], args.scale_log2, -base[i]));
      sum[i] += score[j];
    }
  };
  // Only while no product is in flight: all of its registers are touched.
  const auto take_over = [&] {
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      probabilities[j / 8][j / 4 % 2 * 2 + j / 2 % 2] = PackBf16(score[j], score[j + 1]);
    }
#pragma unroll
    for (int j = 0; j < 64; ++j) out[j] *= shrink[j / 2 % 2];
  };
  if (tiles > 0) {
    CopyAsyncWait<kPrefillStages - 2>();
    FenceSharedForMatrix();
    __syncthreads();
    GroupMmaFence();
    issue_scores(0);
    GroupMmaWait<0>();
    softmax(0);
    take_over();
    for (int tile = 0; tile + 1 < tiles; ++tile) {
      CopyAsyncWait<kPrefillStages - 3>();
      FenceSharedForMatrix();
      // All threads have waited for the products of the turn before, so that its stage is free.
      __syncthreads();
      fetch(tile + kPrefillStages - 1);
      GroupMmaFence();
      issue_scores(tile + 1);
      issue_values(tile);
      GroupMmaWait<1>();
      softmax(tile + 1);  // while the values are summed
      GroupMmaWait<0>();
      take_over();
    }
    GroupMmaFence();
    issue_values(tiles - 1);
    GroupMmaWait<0>();
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(kAllLanes, sum[i], 1);
    sum[i] += __shfl_xor_sync(kAllLanes, sum[i], 2);
    if (row + 8 * i >= queries) continue;
    const int query = first_query + row + 8 * i;
    if (args.last) {
      const float scale = 1.0f / sum[i];
      bf16* to = args.out.Row(query) + head * kPrefillValue + 2 * t;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        *reinterpret_cast<uint32_t*>(to + 8 * j) = PackBf16(out[4 * j + 2 * i] * scale, out[4 * j + 2 * i + 1] * scale);
      }
    } else {
      const int64_t slot = static_cast<int64_t>(query) * args.heads + head;
      if (t == 0) args.carry_softmax[slot] = {top[i], sum[i]};
      float* to = args.carry + slot * kPrefillValue + 2 * t;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        *reinterpret_cast<float2*>(to + 8 * j) = {out[4 * j + 2 * i], out[4 * j + 2 * i + 1]};
      }
    }
  }
}

}  // namespace k3::cuda
