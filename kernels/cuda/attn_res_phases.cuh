#pragma once

#include <type_traits>

#include "kernels/cuda/attn_res.cuh"
#include "kernels/op_params.h"

// Block attention residuals in two phases (spec C.2). Phase 1: the closed blocks mixed for up to eight sites at once,
// by matrix products. Phase 2, a site: the live sum advanced and added to its mix by a softmax of two, then normed.
namespace k3::cuda {

constexpr int kClosedSources = 8;  // closed blocks of the fast kernel at most
constexpr int kClosedBlocks = 4;   // of a cluster, which has two rows
constexpr int kClosedRows = 2;
constexpr int kClosedThreads = kAttnResThreads / kClosedBlocks;

// What a mix lies in memory as: bf16 activations get fp16 under a power of two for each row and site, fp32 itself.
template <typename T>
using MixElement = std::conditional_t<std::is_same_v<T, bf16>, uint16_t, float>;

// Of a row and a site: the greatest score of its closed blocks, the sum of exp(score - top) over them, and what the
// stored elements are to be multiplied by to give the mix (with weights that add up to 1).
struct alignas(16) MixPart {
  float top, sum, unit, unused;
};

template <typename T>
struct AttnResClosedArgs {
  const T* bank;
  int64_t block_stride;
  int64_t rows;
  int closed;
  int cols;
  int sites;
  float eps;
  const float* query[kAttnResSites];
  MixElement<T>* mix;  // [site][rows, cols]
  MixPart* part;       // [site][rows]
};

template <typename T>
struct AttnResSiteArgs {
  const MixElement<T>* mix;  // [rows, cols] of this site
  const MixPart* part;       // [rows]
  T* live;                   // [rows, cols]
  int cols;
  Matrix<const T> delta;
  bool restart;
  const float* query;
  float mix_eps;
  const float* norm_weight;
  float norm_eps;
  Matrix<T> out;
};

// The power of two (and its inverse) that brings values up to `bound` below 2^15, the largest that it may be.
__device__ __forceinline__ void MixUnit(float bound, float& scale, float& unit) {
  const int exponent = min(max(static_cast<int>(__float_as_uint(bound) >> 23), 15), 254);
  scale = __uint_as_float(static_cast<uint32_t>(268 - exponent) << 23);
  unit = __uint_as_float(static_cast<uint32_t>(exponent - 14) << 23);
}

struct AttnResClosedShared {
  alignas(16) float4 score[kClosedThreads / 32][32];          // of a warp: see AttnResClosedKernel
  alignas(16) float square[kClosedRows * kClosedSources][8];  // [row, source][warp]
  alignas(16) float4 all_score[kClosedBlocks][32];            // of a block
  alignas(16) float all_square[kClosedBlocks][kClosedRows * kClosedSources];
  alignas(16) float weight[kClosedRows][kAttnResSites][kClosedSources];
  uint64_t full;  // barrier that counts the bytes of all_score and all_square
};
// Two rows of eight vectors each: first the closed blocks, then the mixes in their place.
__host__ __device__ constexpr int ClosedPitch(int threads) { return threads * 8 + 8; }
constexpr size_t AttnResClosedBytes(int threads) {
  return sizeof(AttnResClosedShared) + kClosedRows * kClosedSources * ClosedPitch(threads) * sizeof(bf16);
}

// Weights of the closed blocks of one row for one site; lane g * 4 + t has source g and what is reduced lies in lanes
// of the same t. Returns the weight times the scale of the stored mix.
__device__ __forceinline__ float AttnResClosedWeight(float score, float norm, bool valid, MixPart& part) {
  part.top = valid ? score : -INFINITY;
#pragma unroll
  for (int o = 4; o < 32; o *= 2) part.top = fmaxf(part.top, __shfl_xor_sync(kAllLanes, part.top, o));
  const float power = valid ? Exp2((score - part.top) * kLog2E) : 0.0f;
  part.sum = power;
  float bound = valid ? power * norm : 0.0f;
#pragma unroll
  for (int o = 4; o < 32; o *= 2) {
    part.sum += __shfl_xor_sync(kAllLanes, part.sum, o);
    bound += __shfl_xor_sync(kAllLanes, bound, o);
  }
  const float inverse = Reciprocal(part.sum);
  float scale;
  MixUnit(bound * inverse, scale, part.unit);
  part.unused = 0;
  return power * inverse * scale;
}

// Two rows for a cluster; a warp has 256 columns of both. Products by m16n8k16:
//   scores [2 rows x 8 sources, 8 sites] = sources x queries, the queries as three bf16 terms, so as exact as fp32;
//   mix [16 columns, 8 sites] = sources^T x weights, as two bf16 terms one after the other in k.
// No product mixes two rows: what one holds, NaN too, is nothing to the other.
__global__ void __launch_bounds__(kClosedThreads, 3)
    AttnResClosedKernel(const __grid_constant__ AttnResClosedArgs<bf16> args) {
  AttnResClosedShared& s = *DynamicShared<AttnResClosedShared>();
  bf16* tile = reinterpret_cast<bf16*>(&s + 1);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  const int rank = static_cast<int>(ClusterRank());
  const int64_t first_row = blockIdx.x / kClosedBlocks * kClosedRows;
  const int pitch = ClosedPitch(static_cast<int>(blockDim.x));
  const int first = warp * 256;                                      // column within the block
  const int from = rank * static_cast<int>(blockDim.x) * 8 + first;  // within the row
  if (threadIdx.x == 0) {
    BarrierInit(&s.full, 1);
    BarrierInitFence();
    BarrierArriveExpect(&s.full, sizeof(s.all_score) + sizeof(s.all_square));
  }
  __syncwarp();
  ClusterArriveRelaxed();

  // Query g at columns 16 k + 2 t (even) and 16 k + 8 + 2 t (odd places).
  const float* query_line = args.query[g] + from + 2 * t;
  const auto load_query = [&](int k) {
    const bool valid = g < args.sites && from + 8 * k + 2 * t < args.cols;
    return valid ? *reinterpret_cast<const float2*>(query_line + 8 * k) : float2{};
  };
  float2 query[32];
#pragma unroll
  for (int k = 0; k < 32; ++k) query[k] = load_query(k);
  GridDependencyWait();
  GridDependencyRelease();
  const int column = from + lane * 8;
  const bool active = column < args.cols;
#pragma unroll
  for (int r = 0; r < kClosedRows; ++r) {
    const bf16* source = args.bank + min(first_row + r, args.rows - 1) * args.cols + (active ? column : 0);
    for (int j = 0; j < args.closed; ++j) {
      CopyAsync16(tile + (r * kClosedSources + j) * pitch + first + lane * 8, source + j * args.block_stride, active);
    }
  }
  CopyAsyncCommit();
  CopyAsyncWait<0>();
  __syncwarp();

  // Rows beyond the closed blocks stand for the last of them and get no weight.
  const int mine = min(lane % 8, args.closed - 1);
  const bf16* rows16 = tile + (lane / 8 % 2 * kClosedSources + mine) * pitch + first + lane / 16 * 8;
  float score[4] = {}, own[2][4] = {};
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    uint32_t a[4];
    LoadMatrix4(a, rows16 + 16 * k);
    MmaBf16(own[0], a, a[0], a[2]);
    MmaBf16(own[1], a, a[1], a[3]);
    float2 low = query[2 * k], high = query[2 * k + 1];
#pragma unroll
    for (int term = 0; term < 3; ++term) {
      const uint32_t b0 = PackBf16(low.x, low.y), b1 = PackBf16(high.x, high.y);
      MmaBf16(score, a, b0, b1);
      low.x -= LowBf16(b0), low.y -= HighBf16(b0);
      high.x -= LowBf16(b1), high.y -= HighBf16(b1);
    }
  }
  s.score[warp][lane] = make_float4(score[0], score[1], score[2], score[3]);
  if (t == g / 2) {
    s.square[g][warp] = g % 2 == 0 ? own[0][0] : own[0][1];
    s.square[kClosedSources + g][warp] = g % 2 == 0 ? own[1][2] : own[1][3];
  }
  ClusterWait();  // the other blocks have started
  __syncthreads();
  if (warp == 0) {
    float4 sum = s.score[0][lane];
    float square = lane < kClosedRows * kClosedSources ? s.square[lane][0] : 0.0f;
    for (int w = 1; w < warps; ++w) {
      const float4 more = s.score[w][lane];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      if (lane < kClosedRows * kClosedSources) square += s.square[lane][w];
    }
#pragma unroll
    for (int b = 0; b < kClosedBlocks; ++b) {
      float* to = &s.all_score[rank][lane].x;
      StoreAsync(to, sum.x, &s.full, b);
      StoreAsync(to + 1, sum.y, &s.full, b);
      StoreAsync(to + 2, sum.z, &s.full, b);
      StoreAsync(to + 3, sum.w, &s.full, b);
      if (lane < kClosedRows * kClosedSources) StoreAsync(&s.all_square[rank][lane], square, &s.full, b);
    }
    BarrierWait(&s.full, 0);  // nothing is sent to this block after that
    float4 total = s.all_score[0][lane];
    float squares[kClosedRows] = {s.all_square[0][g], s.all_square[0][kClosedSources + g]};
#pragma unroll
    for (int b = 1; b < kClosedBlocks; ++b) {
      const float4 more = s.all_score[b][lane];
      total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
      squares[0] += s.all_square[b][g];
      squares[1] += s.all_square[b][kClosedSources + g];
    }
    const float per_col = Reciprocal(static_cast<float>(args.cols));
    const float products[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i / 2, site = 2 * t + i % 2;
      MixPart part;
      const float weight = AttnResClosedWeight(products[i] * ReciprocalRoot(fmaf(squares[r], per_col, args.eps)),
                                               sqrtf(squares[r]), g < args.closed, part);
      s.weight[r][site][g] = weight;
      if (rank == 0 && g == 0 && site < args.sites && first_row + r < args.rows) {
        args.part[site * args.rows + first_row + r] = part;
      }
    }
  }
  __syncthreads();

#pragma unroll
  for (int r = 0; r < kClosedRows; ++r) {
    const float2 w = *reinterpret_cast<const float2*>(&s.weight[r][g][2 * t]);
    const uint32_t upper = PackBf16(w.x, w.y);
    const uint32_t lower = PackBf16(w.x - LowBf16(upper), w.y - HighBf16(upper));
    const bf16* sources = tile + (r * kClosedSources + mine) * pitch + first + lane / 8 * 8;
    bf16* mixes = tile + (r * kClosedSources + lane % 8) * pitch + first + lane / 8 * 8;
#pragma unroll 4
    for (int k = 0; k < 256; k += 32) {
      uint32_t v[4], pairs[4];
      LoadMatrix4Transposed(v, sources + k);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t a[4] = {v[2 * half], v[2 * half + 1], v[2 * half], v[2 * half + 1]};
        float mix[4] = {};
        MmaBf16(mix, a, upper, lower);
        pairs[2 * half] = PackF16(mix[0], mix[1]);
        pairs[2 * half + 1] = PackF16(mix[2], mix[3]);
      }
      StoreMatrix4Transposed(mixes + k, pairs);
    }
  }
  __syncwarp();
  if (!active) return;
#pragma unroll
  for (int r = 0; r < kClosedRows; ++r) {
    if (first_row + r >= args.rows) break;
    uint16_t* to = args.mix + (first_row + r) * args.cols + column;
    const bf16* line = tile + r * kClosedSources * pitch + first + lane * 8;
    for (int site = 0; site < args.sites; ++site) {
      *reinterpret_cast<uint4*>(to + site * args.rows * args.cols) =
          *reinterpret_cast<const uint4*>(line + site * pitch);
    }
  }
}

// What the warps of a row tell each other.
struct AttnResSiteShared {
  alignas(16) float4 sums[32];  // of a warp: live . query, live^2, live . mix, mix^2
  alignas(16) float square[32];
};

// A row for a block of threads that have kPacks packs of 8 columns each. kSettled: the mix is older than the launch
// before this, so that it can be loaded while that runs. The same bits.
template <int kThreads, int kPacks, bool kSettled>
__global__ void __launch_bounds__(kThreads, kAttnResThreads / kThreads) AttnResSiteKernel(AttnResSiteArgs<bf16> args) {
  AttnResSiteShared& s = *DynamicShared<AttnResSiteShared>();
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const float per_col = Reciprocal(static_cast<float>(args.cols));
  HeldPack mix[kPacks], live[kPacks], delta[kPacks];
  bool active[kPacks];
  int column[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    column[p] = (p * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * 8;
    active[p] = column[p] < args.cols;
    if (!active[p]) column[p] = 0;
  }
  const auto load_mix = [&] {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      mix[p].words = *reinterpret_cast<const uint4*>(args.mix + row * args.cols + column[p]);
    }
  };
  if constexpr (kSettled) load_mix();
  GridDependencyWait();
  GridDependencyRelease();
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    live[p] = LoadHeld(args.live + row * args.cols + column[p]);
    if (args.delta.data != nullptr) delta[p] = LoadHeld(args.delta.Row(row) + column[p]);
  }
  if constexpr (!kSettled) load_mix();
  const MixPart part = args.part[row];
  float sums[4] = {};
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!active[p]) continue;
    float query[8];
    LoadFloats<8>(args.query + column[p], query);
    if (args.delta.data != nullptr) {
      live[p] = AttnResAdvance(live[p], delta[p], args.restart, args.live + row * args.cols + column[p]);
    }
    const uint32_t words[4] = {mix[p].words.x, mix[p].words.y, mix[p].words.z, mix[p].words.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float2 m = UnpackF16(words[c]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float l = live[p][2 * c + i], mixed = i == 0 ? m.x : m.y;
        sums[0] = fmaf(l, query[2 * c + i], sums[0]);
        sums[1] = fmaf(l, l, sums[1]);
        sums[2] = fmaf(l, mixed, sums[2]);
        sums[3] = fmaf(mixed, mixed, sums[3]);
      }
    }
  }
  WarpSumEach<4>(sums, lane);
  if (lane < 4) reinterpret_cast<float*>(&s.sums[warp])[lane] = sums[0];
  __syncthreads();
  float4 all = lane < warps ? s.sums[lane] : float4{};
#pragma unroll
  for (int o = 16; o > 0; o /= 2) {
    all.x += __shfl_xor_sync(kAllLanes, all.x, o);
    all.y += __shfl_xor_sync(kAllLanes, all.y, o);
    all.z += __shfl_xor_sync(kAllLanes, all.z, o);
    all.w += __shfl_xor_sync(kAllLanes, all.w, o);
  }
  const float score = all.x * ReciprocalRoot(fmaf(all.y, per_col, args.mix_eps));
  const float top = fmaxf(score, part.top);
  const float closed = part.sum * Exp2((part.top - top) * kLog2E), own = Exp2((score - top) * kLog2E);
  const float inverse = Reciprocal(closed + own);
  const float mix_weight = closed * inverse * part.unit, live_weight = own * inverse;
  // The mix's sum of squares from the products. Where its terms cancel it is summed again from the mix itself.
  const float squares = fmaf(live_weight * live_weight, all.y, mix_weight * mix_weight * all.w);
  float square = fmaf(2 * live_weight * mix_weight, all.z, squares);
  const auto mixed = [&](int p, float(&out)[8]) {
    const uint32_t words[4] = {mix[p].words.x, mix[p].words.y, mix[p].words.z, mix[p].words.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float2 m = UnpackF16(words[c]);
      out[2 * c] = fmaf(live_weight, live[p][2 * c], mix_weight * m.x);
      out[2 * c + 1] = fmaf(live_weight, live[p][2 * c + 1], mix_weight * m.y);
    }
  };
  if (!(square > 0.01f * squares)) {
    square = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      float v[8];
      mixed(p, v);
#pragma unroll
      for (int i = 0; i < 8; ++i) square = active[p] ? fmaf(v[i], v[i], square) : square;
    }
    square = BlockSum(square, s.square);
  }
  const float scale = ReciprocalRoot(fmaf(square, per_col, args.norm_eps));
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    float norm[8], v[8];
    LoadFloats<8>(args.norm_weight + column[p], norm);
    mixed(p, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= scale * norm[i];
    if (active[p]) StoreFloats<8>(args.out.Row(row) + column[p], v);
  }
}

// One element of a mix as stored; part.unit times it is the mix.
__device__ __forceinline__ float StoredMix(float stored) { return stored; }
__device__ __forceinline__ float StoredMix(uint16_t stored) { return UnpackF16(stored).x; }
__device__ __forceinline__ void StoreMix(float* to, float scaled) { *to = scaled; }
__device__ __forceinline__ void StoreMix(uint16_t* to, float scaled) {
  *to = static_cast<uint16_t>(PackF16(scaled, 0));
}

// Phase 1 for any width, alignment and number of blocks, a row for a block of threads: the blocks are read twice a
// site.
template <typename T>
__global__ void AttnResClosedAnyKernel(const __grid_constant__ AttnResClosedArgs<T> args) {
  float* partial = DynamicShared<float>();         // one a warp
  float* root = partial + 32;                      // [closed] of the mean square, inverse
  float* norm = root + RoundUp(args.closed, 4);    // [closed] root of the sum of squares
  float* weight = norm + RoundUp(args.closed, 4);  // [closed]
  const int64_t row = blockIdx.x;
  const auto source = [&](int j) { return args.bank + j * args.block_stride + row * args.cols; };
  for (int site = 0; site < args.sites; ++site) {
    const float* query = args.query[site];
    for (int j = 0; j < args.closed; ++j) {
      float product = 0, square = 0;
      for (int c = threadIdx.x; c < args.cols; c += blockDim.x) {
        const float x = ToFloat(source(j)[c]);
        product = fmaf(x, query[c], product);
        square = fmaf(x, x, square);
      }
      product = BlockSum(product, partial);
      __syncthreads();
      square = BlockSum(square, partial);
      __syncthreads();
      if (threadIdx.x == 0) {
        root[j] = rsqrtf(square / args.cols + args.eps);
        norm[j] = sqrtf(square);
        weight[j] = product * root[j];
      }
    }
    if (threadIdx.x == 0) {
      MixPart part = {weight[0], 0, 1, 0};
      for (int j = 1; j < args.closed; ++j) part.top = fmaxf(part.top, weight[j]);
      for (int j = 0; j < args.closed; ++j) part.sum += weight[j] = __expf(weight[j] - part.top);
      float bound = 0, scale = 1;
      for (int j = 0; j < args.closed; ++j) bound += weight[j] / part.sum * norm[j];
      if constexpr (std::is_same_v<T, bf16>) MixUnit(bound, scale, part.unit);
      for (int j = 0; j < args.closed; ++j) weight[j] *= scale / part.sum;
      args.part[site * args.rows + row] = part;
    }
    __syncthreads();
    for (int c = threadIdx.x; c < args.cols; c += blockDim.x) {
      float mix = 0;
      for (int j = 0; j < args.closed; ++j) mix = fmaf(weight[j], ToFloat(source(j)[c]), mix);
      StoreMix(args.mix + (site * args.rows + row) * args.cols + c, mix);
    }
    __syncthreads();
  }
}

// Phase 2 for any width and alignment, a row for a block of threads.
template <typename T>
__global__ void AttnResSiteAnyKernel(AttnResSiteArgs<T> args) {
  float* partial = DynamicShared<float>();
  const int64_t row = blockIdx.x;
  T* live = args.live + row * args.cols;
  const MixElement<T>* mix = args.mix + row * args.cols;
  float product = 0, square = 0;
  for (int c = threadIdx.x; c < args.cols; c += blockDim.x) {
    if (args.delta.data != nullptr) {
      const T delta = args.delta.Row(row)[c];
      live[c] = args.restart ? delta : FromFloat<T>(ToFloat(live[c]) + ToFloat(delta));
    }
    const float x = ToFloat(live[c]);
    product = fmaf(x, args.query[c], product);
    square = fmaf(x, x, square);
  }
  product = BlockSum(product, partial);
  __syncthreads();
  square = BlockSum(square, partial);
  __syncthreads();
  const MixPart part = args.part[row];
  const float score = product * rsqrtf(square / args.cols + args.mix_eps), top = fmaxf(score, part.top);
  const float closed = part.sum * __expf(part.top - top), own = __expf(score - top);
  const float mix_weight = closed / (closed + own) * part.unit, live_weight = own / (closed + own);
  const auto mixed = [&](int c) { return fmaf(live_weight, ToFloat(live[c]), mix_weight * StoredMix(mix[c])); };
  square = 0;
  for (int c = threadIdx.x; c < args.cols; c += blockDim.x) square = fmaf(mixed(c), mixed(c), square);
  const float scale = rsqrtf(BlockSum(square, partial) / args.cols + args.norm_eps);
  for (int c = threadIdx.x; c < args.cols; c += blockDim.x) {
    args.out.Row(row)[c] = FromFloat<T>(mixed(c) * scale * args.norm_weight[c]);
  }
}

}  // namespace k3::cuda
