#pragma once

#include "kernels/cuda/group_mma.cuh"
#include "kernels/cuda/mla.cuh"

// Absorbed MLA attention on the tensor cores, bf16 lines of 512 + 64: a tile of 64 rows walks its keys 64 at a time,
// the keys of one split. Keys and values are the same lines, so a line is read once, by all rows of the tile.
//
// Two warpgroups share a block. For the scores [64, 64] each takes 32 keys; for the output [64, 512] each takes 256
// columns, whose sums stay in its registers. The probabilities pass through shared memory.
namespace k3::cuda {

constexpr int kAbsorbedThreads = 256;
constexpr int kAbsorbedKeys = 64;
constexpr int kAbsorbedLatent = 512;
constexpr int kAbsorbedRope = 64;
constexpr int kAbsorbedLine = kAbsorbedLatent + kAbsorbedRope;
constexpr int kAbsorbedColumns = kAbsorbedLine / 64;  // 64-element columns of swizzled atoms
constexpr int kAbsorbedStages = 2;

struct AbsorbedShared {
  alignas(1024) unsigned char q[kAbsorbedColumns][kMlaTileRows * 128];
  alignas(1024) unsigned char lines[kAbsorbedStages][kAbsorbedColumns][kAbsorbedKeys * 128];
  alignas(1024) unsigned char probabilities[kMlaTileRows * 128];
  float top[2][kMlaTileRows];  // by warpgroup
  float sum[2][kMlaTileRows];
  MlaTile tile;
};

struct AbsorbedArgs {
  MlaRows rows;
  MlaPages pages;
  const bf16* latent_q;  // [rows, 512]
  Matrix<const bf16> q;  // [tokens, heads * (nope + 64)]
  int nope_dim;
  bool rope_aligned;  // rope parts start on 16 bytes
  float scale_log2;   // score scale times log2(e)
  int splits;
  bf16* latent_out;    // [rows, 512], when there is one split
  float* partial;      // [tiles, 64, splits, 512] otherwise: normalised outputs
  float* partial_lse;  // [tiles, 64, splits]: base-2 logarithm of the sum, -inf where a split has no key
};

// Keys of a split: multiples of 64, decided by the tile's own length alone.
__device__ __forceinline__ int AbsorbedSplitKeys(int keys, int splits) {
  return max(kAbsorbedKeys, (keys + splits * kAbsorbedKeys - 1) / (splits * kAbsorbedKeys) * kAbsorbedKeys);
}

// Grid (tiles, splits).
__global__ void __launch_bounds__(kAbsorbedThreads, 1) MlaAbsorbedKernel(AbsorbedArgs args, SequenceBatch batch) {
  AbsorbedShared& s = *DynamicShared<AbsorbedShared>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4;
  if (warp == 0) {
    const MlaTile found = FindMlaTile(args.rows, batch, blockIdx.x, lane);
    if (lane == 0) s.tile = found;
  }
  __syncthreads();
  const MlaTile tile = s.tile;
  const int heads = args.rows.heads;
  const auto position_of = [&](int row) { return batch.position[args.rows.token_begin + row / heads]; };
  const int keys = position_of(tile.row + tile.count - 1) + 1;  // of the last row, which sees the most
  const int split_keys = AbsorbedSplitKeys(keys, args.splits);
  const int key_begin = blockIdx.y * split_keys;
  const int key_end = min(keys, key_begin + split_keys);
  if (key_begin >= key_end) {  // nothing to do; the combination does not read it
    return;
  }

  // Lines of 64 keys into a stage: eight threads a line and column, 16 bytes each; zeros beyond the end.
  const int piece = threadIdx.x % 8;
  const auto fetch = [&](int key, int stage) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = threadIdx.x / 8 + 32 * half;
      const bf16* line = key + row < key_end
                             ? MlaLine<const bf16>(args.pages, batch, tile.sequence, key + row, kAbsorbedLine)
                             : nullptr;
#pragma unroll
      for (int c = 0; c < kAbsorbedColumns; ++c) {
        CopyAsync16(s.lines[stage][c] + Swizzle128(row, piece),
                    line != nullptr ? line + 64 * c + 8 * piece : args.latent_q, line != nullptr);
      }
    }
  };
  // Queries: latent parts, then rope parts, zeros for rows that do not exist.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = threadIdx.x / 8 + 32 * half;
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
  }
  fetch(key_begin, 0);
  CopyAsyncCommit();
  if (key_begin + kAbsorbedKeys < key_end) fetch(key_begin + kAbsorbedKeys, 1);
  CopyAsyncCommit();

  // This thread's rows of the tile: `row` and row + 8.
  const int g = lane / 4, t = lane % 4;
  const int row = warp % 4 * 16 + g;
  int limit[2];  // keys that the row may see
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) limit[i] = row + 8 * i < tile.count ? position_of(tile.row + row + 8 * i) + 1 : 0;
  float out[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) out[i] = 0;

  for (int key = key_begin, step = 0; key < key_end; key += kAbsorbedKeys, ++step) {
    const int stage = step % kAbsorbedStages;
    CopyAsyncWait<1>();
    FenceSharedForMatrix();
    __syncthreads();

    float score[16] = {};
    GroupMmaFence();
#pragma unroll
    for (int c = 0; c < kAbsorbedColumns; ++c) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        GroupMma<32>(score, SharedOperand(s.q[c] + 32 * k),
                     SharedOperand(s.lines[stage][c] + group * 32 * 128 + 32 * k), c > 0 || k > 0);
      }
    }
    GroupMmaCommit();
    GroupMmaWait<0>();

    const int first_key = key + group * 32 + 2 * t;
    float block_top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int i = j / 2 % 2;
      score[j] = first_key + j / 4 * 8 + j % 2 < limit[i] ? score[j] * args.scale_log2 : -INFINITY;
      block_top[i] = fmaxf(block_top[i], score[j]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      block_top[i] = fmaxf(block_top[i], __shfl_xor_sync(kAllLanes, block_top[i], 1));
      block_top[i] = fmaxf(block_top[i], __shfl_xor_sync(kAllLanes, block_top[i], 2));
      if (t == 0) s.top[group][row + 8 * i] = block_top[i];
    }
    __syncthreads();
    float shrink[2], base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float new_top = fmaxf(top[i], fmaxf(s.top[0][row + 8 * i], s.top[1][row + 8 * i]));
      base[i] = new_top == -INFINITY ? 0.0f : new_top;
      shrink[i] = Exp2(top[i] - base[i]);
      top[i] = new_top;
      sum[i] *= shrink[i];
    }
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      const int i = j / 2 % 2;
      const float x = Exp2(score[j] - base[i]), y = Exp2(score[j + 1] - base[i]);
      sum[i] += x + y;
      *reinterpret_cast<uint32_t*>(s.probabilities + Swizzle128(row + 8 * i, 4 * group + j / 4) + 4 * t) =
          PackBf16(x, y);
    }
    FenceSharedForMatrix();
    __syncthreads();
    if (shrink[0] != 1.0f || shrink[1] != 1.0f) {
#pragma unroll
      for (int j = 0; j < 128; ++j) out[j] *= shrink[j / 2 % 2];
    }
    GroupMmaFence();
#pragma unroll
    for (int k = 0; k < kAbsorbedKeys / 16; ++k) {
      GroupMma<256, true>(out, SharedOperand(s.probabilities + 32 * k),
                          SharedOperand(s.lines[stage][4 * group] + 2048 * k, 1024, kAbsorbedKeys * 128));
    }
    GroupMmaCommit();
    GroupMmaWait<0>();
    __syncthreads();
    if (key + kAbsorbedStages * kAbsorbedKeys < key_end) fetch(key + kAbsorbedStages * kAbsorbedKeys, stage);
    CopyAsyncCommit();
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(kAllLanes, sum[i], 1);
    sum[i] += __shfl_xor_sync(kAllLanes, sum[i], 2);
    if (t == 0) s.sum[group][row + 8 * i] = sum[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = row + 8 * i;
    if (r >= tile.count) continue;
    const float total = s.sum[0][r] + s.sum[1][r];
    const float scale = total > 0 ? 1.0f / total : 0.0f;
    const int column = 256 * group + 2 * t;
    if (args.splits == 1) {
      bf16* to = args.latent_out + static_cast<int64_t>(tile.row + r) * kAbsorbedLatent + column;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        *reinterpret_cast<uint32_t*>(to + 8 * j) = PackBf16(out[4 * j + 2 * i] * scale, out[4 * j + 2 * i + 1] * scale);
      }
    } else {
      const int64_t slot = (static_cast<int64_t>(blockIdx.x) * kMlaTileRows + r) * args.splits + blockIdx.y;
      float* to = args.partial + slot * kAbsorbedLatent + column;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        *reinterpret_cast<float2*>(to + 8 * j) = {out[4 * j + 2 * i] * scale, out[4 * j + 2 * i + 1] * scale};
      }
      if (group == 0 && t == 0) args.partial_lse[slot] = total > 0 ? top[i] + log2f(total) : -INFINITY;
    }
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

constexpr int kCombineThreads = 128;

// latent_out[row] = sum over splits of their outputs, weighted by their share of the softmax. Grid (64, tiles).
__global__ void __launch_bounds__(kCombineThreads) MlaCombineKernel(AbsorbedArgs args, SequenceBatch batch) {
  float* weight = DynamicShared<float>();  // [splits], then the tile
  MlaTile& shared_tile = *reinterpret_cast<MlaTile*>(weight + args.splits);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    const MlaTile found = FindMlaTile(args.rows, batch, blockIdx.y, lane);
    if (lane == 0) shared_tile = found;
  }
  __syncthreads();
  const MlaTile tile = shared_tile;
  if (static_cast<int>(blockIdx.x) >= tile.count) return;
  const int splits = AbsorbedSplits(args, batch, tile);
  const int64_t slot = (static_cast<int64_t>(blockIdx.y) * kMlaTileRows + blockIdx.x) * args.splits;
  float top = -INFINITY;
  for (int i = lane; i < splits; i += 32) top = fmaxf(top, args.partial_lse[slot + i]);
  top = WarpMax(top);
  float sum = 0;
  for (int i = lane; i < splits; i += 32) {
    const float x = Exp2(args.partial_lse[slot + i] - top);
    if (threadIdx.x < 32) weight[i] = x;
    sum += x;
  }
  sum = WarpSum(sum);
  __syncthreads();
  float4 out = {};
  const float4* from = reinterpret_cast<const float4*>(args.partial + slot * kAbsorbedLatent) + threadIdx.x;
#pragma unroll 4
  for (int i = 0; i < splits; ++i) {
    const float4 x = from[i * (kAbsorbedLatent / 4)];
    out.x = fmaf(weight[i], x.x, out.x);
    out.y = fmaf(weight[i], x.y, out.y);
    out.z = fmaf(weight[i], x.z, out.z);
    out.w = fmaf(weight[i], x.w, out.w);
  }
  const float scale = 1.0f / sum;
  uint2* to =
      reinterpret_cast<uint2*>(args.latent_out + static_cast<int64_t>(tile.row + blockIdx.x) * kAbsorbedLatent) +
      threadIdx.x;
  *to = {PackBf16(out.x * scale, out.y * scale), PackBf16(out.z * scale, out.w * scale)};
}

// For a handful of tokens the products with the projection are matrix-vector products, bound by latency.

constexpr int kLatentThreads = 128;
constexpr int kLatentColumns = 128;  // of a block

// latent_q[row] = q_nope Wuk. Grid (heads, tokens, latent / kLatentColumns): thread (group, octet) takes 16 inputs of 8
// columns.
__global__ void __launch_bounds__(kLatentThreads)
    MlaLatentQueryKernel(Matrix<const bf16> q, int query_dim, const bf16* kv_b, int head_rows, int token_begin,
                         bf16* latent_q) {
  constexpr int kNope = 128, kGroups = 8;
  float* sums = DynamicShared<float>();  // [kGroups][kLatentColumns]
  const int head = blockIdx.x, octet = threadIdx.x % 16, group = threadIdx.x / 16;
  const int column = blockIdx.z * kLatentColumns + 8 * octet;
  const bf16* weights =
      kv_b + (static_cast<int64_t>(head) * head_rows + group * (kNope / kGroups)) * kAbsorbedLatent + column;
  uint4 w[kNope / kGroups];
#pragma unroll
  for (int k = 0; k < kNope / kGroups; ++k) w[k] = LoadStreaming16(weights + k * kAbsorbedLatent);
  const bf16* query = q.Row(token_begin + blockIdx.y) + head * query_dim + group * (kNope / kGroups);
  float sum[8] = {};
#pragma unroll
  for (int k = 0; k < kNope / kGroups; ++k) {
    const float x = ToFloat(query[k]);
    const uint32_t pairs[4] = {w[k].x, w[k].y, w[k].z, w[k].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] = fmaf(x, LowBf16(pairs[i]), sum[2 * i]);
      sum[2 * i + 1] = fmaf(x, HighBf16(pairs[i]), sum[2 * i + 1]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[group * kLatentColumns + 8 * octet + i] = sum[i];
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) total += sums[g * kLatentColumns + threadIdx.x];
  const int64_t row = static_cast<int64_t>(blockIdx.y) * gridDim.x + head;
  latent_q[row * kAbsorbedLatent + blockIdx.z * kLatentColumns + threadIdx.x] = FromFloat<bf16>(total);
}

constexpr int kFinishRowThreads = 512;
constexpr int kFinishRowParts = kFinishRowThreads / 128;  // each takes every kFinishRowParts-th split

// out = (combined splits) Wuv^T times the gate, if there is one. Grid (heads, tokens); args.rows.tiles_per_sequence >
// 0.
__global__ void __launch_bounds__(kFinishRowThreads)
    MlaFinishRowKernel(AbsorbedArgs args, SequenceBatch batch, const bf16* kv_b, int head_rows, Matrix<const bf16> gate,
                       Matrix<bf16> out) {
  constexpr int kValue = 128, kWarps = kFinishRowThreads / 32, kRows = kValue / kWarps;
  float* latent = DynamicShared<float>();                      // [parts][512]
  float* weight = latent + kFinishRowParts * kAbsorbedLatent;  // [splits]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = blockIdx.x, token = args.rows.token_begin + blockIdx.y;
  // The weights of the warp's rows are on their way while the splits are combined.
  uint4 w[kRows][2];
  const bf16* weights =
      kv_b + (static_cast<int64_t>(head) * head_rows + args.nope_dim + warp * kRows) * kAbsorbedLatent + 8 * lane;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      w[r][half] = LoadStreaming16(weights + r * kAbsorbedLatent + 256 * half);
    }
  }
  const int sequence = batch.sequence_of_token[token];
  MlaTile tile{};
  const int rows = MlaSequenceRows(args.rows, batch, sequence, tile.row);
  const int row = (token - args.rows.token_begin) * args.rows.heads + head - tile.row;  // within the sequence
  const int index = row / kMlaTileRows;
  tile.row += index * kMlaTileRows;
  tile.count = min(kMlaTileRows, rows - index * kMlaTileRows);
  if (args.splits == 1) {
    const bf16* from = args.latent_out + (static_cast<int64_t>(blockIdx.y) * args.rows.heads + head) * kAbsorbedLatent;
    for (int c = threadIdx.x; c < kAbsorbedLatent; c += kFinishRowThreads) {
      latent[c] = ToFloat(from[c]);
#pragma unroll
      for (int part = 1; part < kFinishRowParts; ++part) latent[part * kAbsorbedLatent + c] = 0;
    }
  } else {
    const int splits = AbsorbedSplits(args, batch, tile);
    const int64_t slot =
        (static_cast<int64_t>(sequence * args.rows.tiles_per_sequence + index) * kMlaTileRows + row % kMlaTileRows) *
        args.splits;
    float top = -INFINITY;
    for (int i = lane; i < splits; i += 32) top = fmaxf(top, args.partial_lse[slot + i]);
    top = WarpMax(top);
    float sum = 0;
    for (int i = lane; i < splits; i += 32) {
      const float x = Exp2(args.partial_lse[slot + i] - top);
      if (warp == 0) weight[i] = x;
      sum += x;
    }
    sum = WarpSum(sum);
    __syncthreads();
    const int part = threadIdx.x / 128, column = threadIdx.x % 128 * 4;
    float4 total = {};
    const float* from = args.partial + slot * kAbsorbedLatent + column;
#pragma unroll 8
    for (int i = part; i < splits; i += kFinishRowParts) {
      const float4 x = *reinterpret_cast<const float4*>(from + static_cast<int64_t>(i) * kAbsorbedLatent);
      total.x = fmaf(weight[i], x.x, total.x);
      total.y = fmaf(weight[i], x.y, total.y);
      total.z = fmaf(weight[i], x.z, total.z);
      total.w = fmaf(weight[i], x.w, total.w);
    }
    const float scale = 1.0f / sum;
    *reinterpret_cast<float4*>(latent + part * kAbsorbedLatent + column) = {total.x * scale, total.y * scale,
                                                                            total.z * scale, total.w * scale};
  }
  __syncthreads();
  float sums[kRows] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int c = 256 * half + 8 * lane + i;
      x[i] = latent[c];
#pragma unroll
      for (int part = 1; part < kFinishRowParts; ++part) x[i] += latent[part * kAbsorbedLatent + c];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t pairs[4] = {w[r][half].x, w[r][half].y, w[r][half].z, w[r][half].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[r] = fmaf(x[2 * i], LowBf16(pairs[i]), sums[r]);
        sums[r] = fmaf(x[2 * i + 1], HighBf16(pairs[i]), sums[r]);
      }
    }
  }
  WarpSumEach<kRows>(sums, lane);
  if (lane < kRows) {
    const int64_t column = static_cast<int64_t>(head) * kValue + warp * kRows + lane;
    const float scale = gate.data != nullptr ? Sigmoid(ToFloat(gate.Row(token)[column])) : 1.0f;
    out.Row(token)[column] = FromFloat<bf16>(sums[0] * scale);
  }
}

}  // namespace k3::cuda
