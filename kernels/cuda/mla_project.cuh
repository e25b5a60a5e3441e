#pragma once

#include "kernels/cuda/mla_absorbed.cuh"

// The projections around the absorbed form where there are few tokens: into the latent space before, out of it, with
// splits combined and the gate, after. Bound by latency: all that a kernel needs is asked for at once, and it starts
// while the one before runs.
namespace k3::cuda {

constexpr int kProjectTokens = 64;  // that kernels of tiles take

// Partial results of a (token, head): rows of the latent from `first` on, `step` apart.
struct Partials {
  int first, step, count;
};

// args.rows.tiles_per_sequence > 0. With shared splits it waits for the attention.
__device__ __forceinline__ Partials FindPartials(const AbsorbedArgs& args, const SequenceBatch& batch, int token,
                                                 int head) {
  const int sequence = args.rows.one_token_each ? token - args.rows.token_begin : batch.sequence_of_token[token];
  int row;
  MlaSequenceRows(args.rows, batch, sequence, row);
  row = (token - args.rows.token_begin) * args.rows.heads + head - row;  // within the sequence
  const int index = row / kMlaTileRows, tiles = args.rows.tiles_per_sequence;
  if (args.shared_splits > 0) {
    GridDependencyWait();
    const int2 split_of = args.split_of[sequence];
    return {(split_of.x * tiles + index) * kMlaTileRows + row % kMlaTileRows, tiles * kMlaTileRows, split_of.y};
  }
  const MlaTile tile = MlaTileOf(args.rows, batch, sequence, index);
  return {((sequence * tiles + index) * kMlaTileRows + row % kMlaTileRows) * args.splits, 1,
          AbsorbedSplits(args, batch, tile)};
}

// Asks for positions and page tables in the second-level cache, for the kernels to come: the attention waits for one
// after the other before it can ask for lines. By all threads of the grid together.
__device__ __forceinline__ void PrefetchTables(const SequenceBatch& batch) {
  const int64_t block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t id = block * blockDim.x + threadIdx.x, entry = 32 * id;  // 128 bytes each
  if (entry < batch.num_sequences * batch.page_table_stride) PrefetchL2(batch.page_table + entry);
  if (entry < batch.num_tokens) PrefetchL2(batch.position + entry);
}

// Up to four tokens: matrix-vector products.

constexpr int kLatentThreads = 128;
constexpr int kLatentColumns = 128;  // of a block

// latent_q[row] = q_nope Wuk; progress = 0. Grid (heads, tokens, latent / kLatentColumns): thread (group, octet) takes
// 16 inputs of 8 columns.
__global__ void __launch_bounds__(kLatentThreads)
    MlaLatentQueryKernel(Matrix<const bf16> q, int query_dim, const bf16* kv_b, int head_rows, int token_begin,
                         bf16* latent_q, uint32_t* progress, SequenceBatch batch) {
  constexpr int kNope = 128, kGroups = 8;
  float* sums = DynamicShared<float>();  // [kGroups][kLatentColumns]
  const int head = blockIdx.x, octet = threadIdx.x % 16, group = threadIdx.x / 16;
  const int column = blockIdx.z * kLatentColumns + 8 * octet;
  const bf16* weights =
      kv_b + (static_cast<int64_t>(head) * head_rows + group * (kNope / kGroups)) * kAbsorbedLatent + column;
  uint4 w[kNope / kGroups];
#pragma unroll
  for (int k = 0; k < kNope / kGroups; ++k) w[k] = LoadStreaming16(weights + k * kAbsorbedLatent);
  PrefetchTables(batch);
  GridDependencyWait();
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0 && threadIdx.x == 0) StoreRelaxed(progress, 0);
  GridDependencyRelease();  // not before: the next kernel reads lines at once
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

constexpr int kFinishBound = 640;  // for the compiler: 96 registers a thread, which are free beside the kernel before
constexpr int kFinishThreads = 256;
constexpr int kFinishWarps = kFinishThreads / 32;
constexpr int kFinishBlocks = 4;  // of a cluster; each takes 128 columns of the latent
constexpr int kFinishLoads = 17;  // splits of a warp that are on their way together
constexpr int kFinishValue = 128;

struct FinishShared {
  float latent[kFinishWarps][128];  // by warp, then their sums in the first
  float sum[kFinishBlocks][kFinishValue];
};

// out = (combined splits) Wuv^T times the gate, if there is one: a cluster a (head, token). Grid (heads *
// kFinishBlocks, tokens); args.rows.tiles_per_sequence > 0.
__global__ void __launch_bounds__(kFinishBound, 1)
    MlaFinishRowKernel(AbsorbedArgs args, SequenceBatch batch, const bf16* kv_b, int head_rows, Matrix<const bf16> gate,
                       Matrix<bf16> out) {
  constexpr int kRows = kFinishValue / (kFinishThreads / 16);  // of 16 lanes
  FinishShared& s = *DynamicShared<FinishShared>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, octet = threadIdx.x % 16;
  const int head = blockIdx.x / kFinishBlocks, part = blockIdx.x % kFinishBlocks;
  const int token = args.rows.token_begin + blockIdx.y;
  GridDependencyRelease();
  ClusterArrive();
  // The weights of the lanes' rows are on their way while the splits are combined.
  uint4 w[kRows];
  const int first_row = threadIdx.x / 16 * kRows;
  const bf16* weights =
      kv_b + (static_cast<int64_t>(head) * head_rows + args.nope_dim + first_row) * kAbsorbedLatent + 128 * part;
#pragma unroll
  for (int r = 0; r < kRows; ++r) w[r] = LoadStreaming16(weights + r * kAbsorbedLatent + 8 * octet);
  if (args.splits == 1 && args.shared_splits == 0) {
    GridDependencyWait();
    if (threadIdx.x < 128) {
      const int64_t row = static_cast<int64_t>(blockIdx.y) * args.rows.heads + head;
      s.latent[0][threadIdx.x] = ToFloat(args.latent_out[row * kAbsorbedLatent + 128 * part + threadIdx.x]);
    }
  } else {
    const auto [first_row, step, splits] = FindPartials(args, batch, token, head);
    const float* lse = args.partial_lse + first_row;
    const bf16* from = args.partial + static_cast<int64_t>(first_row) * kAbsorbedLatent + 128 * part + 4 * lane;
    const int64_t line_step = static_cast<int64_t>(step) * kAbsorbedLatent;
    constexpr int kEach = 32 / kFinishWarps;
    uint2 x[kFinishLoads];
    float share[(kFinishLoads + kEach - 1) / kEach];  // of splits first + lane, + 32, ...
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < kFinishLoads; ++i) {
        const int split = first + warp + kFinishWarps * i;
        x[i] = split < splits ? *reinterpret_cast<const uint2*>(from + split * line_step) : uint2{};
      }
#pragma unroll
      for (int i = 0; i * kEach < kFinishLoads; ++i) {
        const int split = first + lane + 32 * i;
        share[i] = split < splits ? lse[split * step] : -INFINITY;
      }
    };
    GridDependencyWait();
    load(0);
    float top = -INFINITY;
    for (int i = lane; i < splits; i += 32) top = fmaxf(top, lse[i * step]);
    top = WarpMax(top);
    float sum = 0;
    for (int i = lane; i < splits; i += 32) sum += Exp2(lse[i * step] - top);
    sum = WarpSum(sum);
    float4 total = {};
    for (int first = 0;;) {
#pragma unroll
      for (float& part_share : share) part_share = Exp2(part_share - top);
#pragma unroll
      for (int i = 0; i < kFinishLoads; ++i) {
        AddScaled(total, __shfl_sync(kAllLanes, share[i / kEach], warp + i % kEach * kFinishWarps), x[i]);
      }
      first += kFinishWarps * kFinishLoads;
      if (first >= splits) break;
      load(first);
    }
    const float scale = 1.0f / sum;
    *reinterpret_cast<float4*>(&s.latent[warp][4 * lane]) = {total.x * scale, total.y * scale, total.z * scale,
                                                             total.w * scale};
    __syncthreads();
    if (threadIdx.x < 128) {
      float column = 0;
#pragma unroll
      for (int i = 0; i < kFinishWarps; ++i) column += s.latent[i][threadIdx.x];
      s.latent[0][threadIdx.x] = column;
    }
  }
  __syncthreads();
  float latent[8], sums[kRows] = {};
  LoadFloats(&s.latent[0][8 * octet], latent);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const uint32_t pairs[4] = {w[r].x, w[r].y, w[r].z, w[r].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[r] = fmaf(latent[2 * i], LowBf16(pairs[i]), sums[r]);
      sums[r] = fmaf(latent[2 * i + 1], HighBf16(pairs[i]), sums[r]);
    }
  }
  WarpSumEachStep<kRows, kRows / 2>(sums, lane);  // lane l holds row l % kRows
#pragma unroll
  for (int distance = kRows; distance < 16; distance *= 2) {
    sums[0] += __shfl_xor_sync(kAllLanes, sums[0], distance);
  }
  ClusterWait();
  if (octet < kRows) InBlock(&s, 0)->sum[part][first_row + octet] = sums[0];
  ClusterArrive();
  ClusterWait();
  if (part == 0 && threadIdx.x < kFinishValue) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < kFinishBlocks; ++i) total += s.sum[i][threadIdx.x];
    const int64_t column = static_cast<int64_t>(head) * kFinishValue + threadIdx.x;
    const float scale = gate.data != nullptr ? Sigmoid(ToFloat(gate.Row(token)[column])) : 1.0f;
    out.Row(token)[column] = FromFloat<bf16>(total * scale);
  }
}

// More tokens: 32 at a time on the tensor cores. The order of a contraction is free, so a lane takes 8 of 32 inputs in
// a row where an instruction wants two times two: k = 32 i + 8 t + 0..3 in product 2 i, + 4..7 in 2 i + 1.

constexpr int kTileTokens = 32;

constexpr int kLatentTileThreads = 128;
constexpr int kLatentTileColumns = 128;  // of a block: a warp takes 64 of them for 16 tokens

// latent_q[row] = q_nope Wuk; progress = 0. Grid (heads, latent / kLatentTileColumns, tokens / kTileTokens).
__global__ void __launch_bounds__(kLatentTileThreads)
    MlaLatentQueryTileKernel(Matrix<const bf16> q, int query_dim, const bf16* kv_b, int head_rows, int token_begin,
                             int tokens, bf16* latent_q, uint32_t* progress, SequenceBatch batch) {
  constexpr int kNope = 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.x, heads = gridDim.x;
  // Column 8 g + j of the warp is column g of its product j.
  const int column = blockIdx.y * kLatentTileColumns + warp % 2 * 64;
  const bf16* weights = kv_b + (static_cast<int64_t>(head) * head_rows + 8 * t) * kAbsorbedLatent + column + 8 * g;
  uint4 w[kNope / 32][8];
#pragma unroll
  for (int i = 0; i < kNope / 32; ++i) {
#pragma unroll
    for (int k = 0; k < 8; ++k) w[i][k] = *reinterpret_cast<const uint4*>(weights + (32 * i + k) * kAbsorbedLatent);
  }
  PrefetchTables(batch);
  GridDependencyWait();
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0 && threadIdx.x == 0) StoreRelaxed(progress, 0);
  GridDependencyRelease();                                         // not before: the next kernel reads lines at once
  const int token = blockIdx.z * kTileTokens + warp / 2 * 16 + g;  // and + 8
  uint4 x[2][kNope / 32];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool exists = token + 8 * i < tokens;
    const bf16* query = q.Row(token_begin + (exists ? token + 8 * i : 0)) + head * query_dim + 8 * t;
#pragma unroll
    for (int k = 0; k < kNope / 32; ++k) {
      x[i][k] = exists ? *reinterpret_cast<const uint4*>(query + 32 * k) : uint4{};
    }
  }
  float sum[8][4] = {};
#pragma unroll
  for (int i = 0; i < kNope / 32; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4(&v)[8] = w[i];
      const int k = 4 * half;
      const uint32_t a[4] = {half == 0 ? x[0][i].x : x[0][i].z, half == 0 ? x[1][i].x : x[1][i].z,
                             half == 0 ? x[0][i].y : x[0][i].w, half == 0 ? x[1][i].y : x[1][i].w};
      const auto products = [&](int j, uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3) {
        MmaBf16(sum[j], a, __byte_perm(v0, v1, 0x5410), __byte_perm(v2, v3, 0x5410));
        MmaBf16(sum[j + 1], a, __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x7632));
      };
      products(0, v[k].x, v[k + 1].x, v[k + 2].x, v[k + 3].x);
      products(2, v[k].y, v[k + 1].y, v[k + 2].y, v[k + 3].y);
      products(4, v[k].z, v[k + 1].z, v[k + 2].z, v[k + 3].z);
      products(6, v[k].w, v[k + 1].w, v[k + 2].w, v[k + 3].w);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (token + 8 * i >= tokens) continue;
    bf16* to = latent_q + (static_cast<int64_t>(token + 8 * i) * heads + head) * kAbsorbedLatent + column + 16 * t;
#pragma unroll
    for (int e = 0; e < 2; ++e) {  // columns 2 t and 2 t + 1 of every product
      const int n = 2 * i + e;
      *reinterpret_cast<uint4*>(to + 8 * e) = {PackBf16(sum[0][n], sum[1][n]), PackBf16(sum[2][n], sum[3][n]),
                                               PackBf16(sum[4][n], sum[5][n]), PackBf16(sum[6][n], sum[7][n])};
    }
  }
}

constexpr int kFinishTileThreads = 256;
constexpr int kFinishTileWarps = kFinishTileThreads / 32;
constexpr int kFinishTileRow = 160;  // elements from token to token: rows 80 words apart, so that lanes hit all banks
constexpr int kFinishTileValues = kFinishValue / kFinishBlocks;  // that a block sums up and stores
constexpr int kFinishTileLoads = 4;   // partial results of a token that are on their way together,
constexpr int kFinishLongLoads = 16;  // where tokens are taken one by one

struct FinishTileShared {
  bf16 latent[kTileTokens][kFinishTileRow];
  float sum[kFinishBlocks][kTileTokens][kFinishTileValues + 4];
  Partials partials[kProjectTokens];  // of a token
};

// out = (combined splits) Wuv^T times the gate, if there is one: a cluster a head, 32 tokens at a time, a block 128
// columns of the latent. Grid (heads * kFinishBlocks); shared splits.
__global__ void __launch_bounds__(kFinishBound, 1)
    MlaFinishTileKernel(AbsorbedArgs args, SequenceBatch batch, const bf16* kv_b, int head_rows,
                        Matrix<const bf16> gate, Matrix<bf16> out) {
  constexpr int kTokens = kTileTokens / kFinishTileWarps;  // that a warp combines
  FinishTileShared& s = *DynamicShared<FinishTileShared>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.x / kFinishBlocks, part = blockIdx.x % kFinishBlocks;
  const int tokens = args.rows.token_end - args.rows.token_begin;
  GridDependencyRelease();
  ClusterArrive();
  // A warp multiplies with the weights of 16 values, a lane sums up four in a row: 4 t + 2 j and + 1 in product j.
  uint4 w[2][4];
  const bf16* weights =
      kv_b +
      (static_cast<int64_t>(head) * head_rows + args.nope_dim + 16 * warp + g / 2 * 4 + g % 2) * kAbsorbedLatent +
      128 * part + 8 * t;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[j][i] = LoadStreaming16(weights + 2 * j * kAbsorbedLatent + 32 * i);
  }
  // Of token threadIdx.x: its sequence, and its first row if that one's splits began with the first block.
  int sequence = -1, first_row = 0;
  const int tiles = args.rows.tiles_per_sequence;
  if (threadIdx.x < tokens) {
    sequence = args.rows.one_token_each ? static_cast<int>(threadIdx.x)
                                        : batch.sequence_of_token[args.rows.token_begin + threadIdx.x];
    int row;
    MlaSequenceRows(args.rows, batch, sequence, row);
    row = static_cast<int>(threadIdx.x) * args.rows.heads + head - row;
    first_row = row;
  }
  const bf16* from = args.partial + 128 * part + 4 * lane;
  const auto line = [&](const Partials& partials, int split) {
    return split < partials.count
               ? *reinterpret_cast<const uint2*>(from + static_cast<int64_t>(partials.first + split * partials.step) *
                                                            kAbsorbedLatent)
               : uint2{};
  };
  const auto lse = [&](const Partials& partials, int split) {
    return split < partials.count ? args.partial_lse[partials.first + split * partials.step] : -INFINITY;
  };
  const auto keep = [&](int token, const float4& x) {
    *reinterpret_cast<uint2*>(&s.latent[token][4 * lane]) = {PackBf16(x.x, x.y), PackBf16(x.z, x.w)};
  };
  GridDependencyWait();
  if (threadIdx.x < kProjectTokens) {
    const int2 split_of = sequence < 0 ? int2{} : args.split_of[sequence];
    s.partials[threadIdx.x] = {first_row + split_of.x * tiles * kMlaTileRows, tiles * kMlaTileRows, split_of.y};
  }
  __syncthreads();
  for (int first = 0; first < tokens; first += kTileTokens) {
    int most = 0, in_turn = 0;  // the longest; rounds of loads, tokens one by one
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int count = s.partials[first + warp + kFinishTileWarps * i].count;
      most = max(most, count);
      in_turn += (count + kFinishLongLoads - 1) / kFinishLongLoads;
    }
    if (most <= 32 && (most + kFinishTileLoads - 1) / kFinishTileLoads <= max(1, in_turn)) {
      const Partials* partials = &s.partials[first + warp];
      float share[kTokens];  // of split `lane`
#pragma unroll
      for (int i = 0; i < kTokens; ++i) share[i] = lse(partials[kFinishTileWarps * i], lane);
      uint2 x[kTokens][kFinishTileLoads];
      const auto load = [&](int begin) {
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
#pragma unroll
          for (int k = 0; k < kFinishTileLoads; ++k) x[i][k] = line(partials[kFinishTileWarps * i], begin + k);
        }
      };
      load(0);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const float top = WarpMax(share[i]);
        const float weight = top == -INFINITY ? 0.0f : Exp2(share[i] - top);
        const float sum = WarpSum(weight);
        share[i] = sum > 0 ? weight / sum : 0.0f;
      }
      float4 total[kTokens] = {};
      for (int begin = 0;;) {
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
#pragma unroll
          for (int k = 0; k < kFinishTileLoads; ++k) {
            AddScaled(total[i], __shfl_sync(kAllLanes, share[i], begin + k), x[i][k]);
          }
        }
        begin += kFinishTileLoads;
        if (begin >= most) break;
        load(begin);
      }
#pragma unroll
      for (int i = 0; i < kTokens; ++i) keep(warp + kFinishTileWarps * i, total[i]);
    } else {
#pragma unroll 1
      for (int i = 0; i < kTokens; ++i) {
        const int token = warp + kFinishTileWarps * i;
        const Partials own = s.partials[first + token];
        uint2 x[kFinishLongLoads];
        const auto load = [&](int begin) {
#pragma unroll
          for (int k = 0; k < kFinishLongLoads; ++k) x[k] = line(own, begin + k);
        };
        load(0);
        float top = -INFINITY, sum = 0;
        for (int k = lane; k < own.count; k += 32) top = fmaxf(top, lse(own, k));
        top = WarpMax(top);
        if (top == -INFINITY) top = 0;
        for (int k = lane; k < own.count; k += 32) sum += Exp2(lse(own, k) - top);
        sum = WarpSum(sum);
        const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
        float4 total = {};
        for (int begin = 0;;) {
          const float share = Exp2(lse(own, begin + lane % kFinishLongLoads) - top) * inverse;
#pragma unroll
          for (int k = 0; k < kFinishLongLoads; ++k) AddScaled(total, __shfl_sync(kAllLanes, share, k), x[k]);
          begin += kFinishLongLoads;
          if (begin >= own.count) break;
          load(begin);
        }
        keep(token, total);
      }
    }
    __syncthreads();
    float sum[2][2][4] = {};  // [16 tokens][8 values]
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint4 low = *reinterpret_cast<const uint4*>(&s.latent[16 * m + g][32 * i + 8 * t]);
        const uint4 high = *reinterpret_cast<const uint4*>(&s.latent[16 * m + g + 8][32 * i + 8 * t]);
        const uint32_t even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          MmaBf16(sum[m][j], even, w[j][i].x, w[j][i].y);
          MmaBf16(sum[m][j], odd, w[j][i].z, w[j][i].w);
        }
      }
    }
    ClusterWait();
    auto& to = InBlock(&s, 16 * warp / kFinishTileValues)->sum[part];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float* row = &to[16 * m + g][16 * warp % kFinishTileValues + 4 * t];
      *reinterpret_cast<float4*>(row) = {sum[m][0][0], sum[m][0][1], sum[m][1][0], sum[m][1][1]};
      *reinterpret_cast<float4*>(row + 8 * (kFinishTileValues + 4)) = {sum[m][0][2], sum[m][0][3], sum[m][1][2],
                                                                       sum[m][1][3]};
    }
    ClusterArrive();
    const int token = threadIdx.x / 8, value = threadIdx.x % 8 * 4;
    const bool stores = first + token < tokens;
    const int row = args.rows.token_begin + first + token;
    const int64_t column = static_cast<int64_t>(head) * kFinishValue + kFinishTileValues * part + value;
    float scale[4] = {1, 1, 1, 1};
    if (gate.data != nullptr && stores) {
      LoadFloats(gate.Row(row) + column, scale);
#pragma unroll
      for (float& x : scale) x = Sigmoid(x);
    }
    ClusterWait();
    float4 total = {};
#pragma unroll
    for (int i = 0; i < kFinishBlocks; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(&s.sum[i][token][value]);
      total = {total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w};
    }
    if (first + kTileTokens < tokens) ClusterArrive();  // others may store the sums of the next tokens
    if (!stores) continue;
    *reinterpret_cast<uint2*>(out.Row(row) + column) = {PackBf16(total.x * scale[0], total.y * scale[1]),
                                                        PackBf16(total.z * scale[2], total.w * scale[3])};
  }
}

}  // namespace k3::cuda
