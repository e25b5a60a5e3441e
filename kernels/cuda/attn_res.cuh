#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"

// Block attention residuals (spec 3.2). A thread has eight columns of a row; every source vector is read once and held
// in registers while its score and its norm are reduced, then mixed and normalised. The kernels of bf16 are made for a
// number of sources, so that neither loads nor sums are behind branches.
namespace k3::cuda {

template <typename T>
struct AttnResArgs {
  T* bank;  // [sources][rows, cols], the last source is the live sum
  int64_t block_stride;
  int sources;
  int cols;
  Matrix<const T> delta;  // data null: the live sum stays as it is
  bool restart;
  const float* query;  // [cols]
  float mix_eps;
  const float* norm_weight;  // [cols]
  float norm_eps;
  Matrix<T> out;
};

constexpr int kAttnResThreads = 896;    // at most: 7168 columns in packs of 8, and registers for nine sources
constexpr int kAttnResMostSources = 9;  // that are held
constexpr float kLog2E = 1.4426950408889634f;
constexpr int kAttnResPitch = 36;  // floats from one sum to the next: a lane reads four of its own without conflicts

// What the warps of a row tell each other. One order of operations however many blocks share a row: columns in lanes
// and packs, then lanes, then warps.
struct AttnResShared {
  alignas(16) float sums[32][kAttnResPitch];  // [2 j] product with the query, [2 j + 1] squares of source j; [warp]
  alignas(16) float weights[16];              // of the sources
  alignas(16) float norm_partial[32];         // of a warp: sum of squares of the mix
  uint64_t sums_full, norm_full;              // clusters: barriers that count the bytes of sums and norm_partial
};

// Eight bf16 of a source, kept as four words: as separate elements they would take twice the registers.
struct HeldPack {
  uint4 words;

  __device__ __forceinline__ float operator[](int i) const {
    const uint32_t all[4] = {words.x, words.y, words.z, words.w};
    return i % 2 == 0 ? LowBf16(all[i / 2]) : HighBf16(all[i / 2]);
  }
};
__device__ __forceinline__ HeldPack LoadHeld(const bf16* from) { return {*reinterpret_cast<const uint4*>(from)}; }

// Makes the compiler forget unpacked values, for which there are no registers.
template <int kSources>
__device__ __forceinline__ void KeepPacked(HeldPack (&source)[kSources]) {
#pragma unroll
  for (int j = 0; j < kSources; ++j) {
    Pin(source[j].words.x);
    Pin(source[j].words.y);
    Pin(source[j].words.z);
    Pin(source[j].words.w);
  }
}

// The live sum with `delta` added (or replaced by it), stored at `home`.
__device__ __forceinline__ HeldPack AttnResAdvance(const HeldPack& live, const HeldPack& delta, bool restart,
                                                   bf16* home) {
  HeldPack sum = delta;
  if (!restart) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = live[i] + delta[i];
    sum = {{PackBf16(v[0], v[1]), PackBf16(v[2], v[3]), PackBf16(v[4], v[5]), PackBf16(v[6], v[7])}};
  }
  *reinterpret_cast<uint4*>(home) = sum.words;
  return sum;
}

// Sources whose sums are reduced together, when `left` are left.
constexpr int AttnResGroup(int left) { return left >= 4 ? 4 : left >= 2 ? 2 : 1; }

// What the warp has of the group of sources that starts with kFirst: lane 2 i gets the product of its source i with the
// query, lane 2 i + 1 the sum of squares.
template <int kSources, int kFirst>
__device__ __forceinline__ float AttnResGroupSums(const HeldPack (&source)[kSources], const float (&query)[8],
                                                  int lane) {
  constexpr int kCount = AttnResGroup(kSources - kFirst);
  float sums[2 * kCount] = {};
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = source[kFirst + j][i];
      sums[2 * j] = fmaf(x, query[i], sums[2 * j]);
      sums[2 * j + 1] = fmaf(x, x, sums[2 * j + 1]);
    }
  }
  WarpSumEach<2 * kCount>(sums, lane);
  return sums[0];
}

// Tells the warp's sums of all sources: tell(2 j, product with the query of source j), tell(2 j + 1, its sum of
// squares). All are reduced before the first is told, so that the compiler may do it side by side.
template <int kSources, int kFirst = 0, typename Tell>
__device__ __forceinline__ void AttnResSums(const HeldPack (&source)[kSources], const float (&query)[8], int lane,
                                            const Tell& tell) {
  constexpr int kCount = AttnResGroup(kSources - kFirst);
  const float sum = AttnResGroupSums<kSources, kFirst>(source, query, lane);
  if constexpr (kFirst + kCount < kSources) AttnResSums<kSources, kFirst + kCount>(source, query, lane, tell);
  if (lane < 2 * kCount) tell(2 * kFirst + lane, sum);
}

// The sum of `count` floats, a multiple of four, as four chains.
__device__ __forceinline__ float AttnResTotal(const float* values, int count) {
  float4 chain = {};
  const auto add = [&](int i) {
    const float4 four = *reinterpret_cast<const float4*>(values + i);
    chain.x += four.x;
    chain.y += four.y;
    chain.z += four.z;
    chain.w += four.w;
  };
  if (count == kAttnResThreads / 32) {
#pragma unroll
    for (int i = 0; i < kAttnResThreads / 32; i += 4) add(i);
  } else {
#pragma unroll 1
    for (int i = 0; i < count; i += 4) add(i);
  }
  return (chain.x + chain.y) + (chain.z + chain.w);
}

// All values combined in pairs, then pairs of these.
template <int kCount, typename Combine>
__device__ __forceinline__ float AttnResOfAll(const float (&values)[kCount], const Combine& combine) {
  float left[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) left[i] = values[i];
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kCount; i += 2 * step) left[i] = combine(left[i], left[i + step]);
  }
  return left[0];
}

// By one warp: the weights of the sources from the sums of all `warps`. `per_col`: 1 / columns.
template <int kSources>
__device__ __forceinline__ void AttnResWeights(AttnResShared& s, int warps, float per_col, float eps, int lane) {
  const float total = AttnResTotal(s.sums[lane], warps);
  // Lane 2 j holds the product of source j with the query, lane 2 j + 1 its sum of squares.
  const float square = __shfl_down_sync(kAllLanes, total, 1);
  const float score = total * ReciprocalRoot(fmaf(square, per_col, eps));
  // Every lane gets all scores, then all powers: fewer steps one after the other than exchanges by halves.
  float all[kSources];
#pragma unroll
  for (int j = 0; j < kSources; ++j) all[j] = __shfl_sync(kAllLanes, score, 2 * j);
  const float power = Exp2((score - AttnResOfAll(all, [](float a, float b) { return fmaxf(a, b); })) * kLog2E);
#pragma unroll
  for (int j = 0; j < kSources; ++j) all[j] = __shfl_sync(kAllLanes, power, 2 * j);
  const float sum = AttnResOfAll(all, [](float a, float b) { return a + b; });
  if (lane % 2 == 0 && lane / 2 < kSources) s.weights[lane / 2] = power * Reciprocal(sum);
}

template <int kSources>
__device__ __forceinline__ void AttnResWeighted(const HeldPack (&source)[kSources], const float* weights,
                                                float (&mix)[8]) {
  float weight[RoundUp(kSources, 4)];
#pragma unroll
  for (int j = 0; j < kSources; j += 4) LoadFloats<4>(weights + j, reinterpret_cast<float(&)[4]>(weight[j]));
#pragma unroll
  for (int i = 0; i < 8; ++i) mix[i] = weight[0] * source[0][i];
#pragma unroll
  for (int j = 1; j < kSources; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) mix[i] = fmaf(weight[j], source[j][i], mix[i]);
  }
}

// This warp's sum of squares of the mix.
__device__ __forceinline__ float AttnResSquares(const float (&mix)[8]) {
  float square = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) square = fmaf(mix[i], mix[i], square);
  return WarpSum(square);
}

__device__ __forceinline__ void AttnResStore(const AttnResShared& s, int warps, float per_col, float eps,
                                             const float (&norm_weight)[8], float (&mix)[8], bf16* out, bool active) {
  const int first = static_cast<int>(threadIdx.x) % 8 * 4;
  float4 four = {};
  if (first < warps) four = *reinterpret_cast<const float4*>(s.norm_partial + first);
  float square = (four.x + four.y) + (four.z + four.w);
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) square += __shfl_xor_sync(kAllLanes, square, offset);
  const float scale = ReciprocalRoot(fmaf(square, per_col, eps));
#pragma unroll
  for (int i = 0; i < 8; ++i) mix[i] = mix[i] * scale * norm_weight[i];
  if (active) StoreFloats<8>(out, mix);
}

alignas(16) __device__ const float kAttnResZeros[8] = {};  // what threads beyond the last column read

// A row for a cluster of kBlocks blocks, with exactly kSources sources. Each thread owns one pack of 8 columns; the
// row's warps, a multiple of four, cover them all. Starts while the launch before still runs: what it reads until the
// wait are weights and closed blocks, which are older than that launch (op_params.h).
template <int kSources, int kBlocks>
__global__ void __launch_bounds__(kAttnResThreads / kBlocks, kBlocks == 1 && kSources <= 2 ? 2 : 1)
    AttnResKernel(AttnResArgs<bf16> args) {
  AttnResShared& s = *DynamicShared<AttnResShared>();
  constexpr int live = kSources - 1;
  const int64_t row = blockIdx.x / kBlocks;
  const int rank = kBlocks > 1 ? static_cast<int>(ClusterRank()) : 0;
  const int column = (rank * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * 8;
  const bool active = column < args.cols;
  const int lane = threadIdx.x % 32;
  const int block_warps = blockDim.x / 32;
  const int warp = rank * block_warps + static_cast<int>(threadIdx.x) / 32;
  const int warps = kBlocks * block_warps;
  const float per_col = Reciprocal(static_cast<float>(args.cols));
  const bf16* zeros = reinterpret_cast<const bf16*>(kAttnResZeros);
  const bf16* from = active ? args.bank + row * args.cols + column : zeros;
  const int64_t stride = active ? args.block_stride : 0;
  if constexpr (kBlocks > 1) {
    if (threadIdx.x == 0) {
      BarrierInit(&s.sums_full, 1);
      BarrierInit(&s.norm_full, 1);
      BarrierInitFence();
      BarrierArriveExpect(&s.sums_full, warps * 2 * kSources * sizeof(float));
      BarrierArriveExpect(&s.norm_full, warps * sizeof(float));
    }
    __syncwarp();
    ClusterArriveRelaxed();
  }

  HeldPack source[kSources];
#pragma unroll
  for (int j = 0; j < live; ++j) source[j] = LoadHeld(from + j * stride);
  float query[8] = {}, norm_weight[8];
  const auto load_norm_weight = [&] { LoadFloats<8>(active ? args.norm_weight + column : kAttnResZeros, norm_weight); };
  if constexpr (kSources > 1) LoadFloats<8>(active ? args.query + column : kAttnResZeros, query);
  if constexpr (kBlocks > 1) load_norm_weight();
  GridDependencyWait();
  GridDependencyRelease();
  source[live] = LoadHeld(from + live * stride);
  if (args.delta.data != nullptr && active) {
    source[live] = AttnResAdvance(source[live], LoadHeld(args.delta.Row(row) + column), args.restart,
                                  const_cast<bf16*>(from) + live * stride);
  }

  // Every block gets the sums of all warps.
  const auto tell = [&](float* to, float value, uint64_t* full) {
    if constexpr (kBlocks == 1) {
      *to = value;
    } else {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) StoreAsync(to, value, full, b);
    }
  };
  if constexpr (kBlocks > 1) ClusterWait();  // the other blocks have started
  float mix[8];
  if constexpr (kSources == 1) {
    if constexpr (kBlocks == 1) load_norm_weight();
#pragma unroll
    for (int i = 0; i < 8; ++i) mix[i] = source[0][i];
  } else {
    AttnResSums<kSources>(source, query, lane,
                          [&](int sum, float value) { tell(&s.sums[sum][warp], value, &s.sums_full); });
    if constexpr (kBlocks == 1) {
      KeepPacked(source);
      __syncthreads();
      // There are registers for them now, and time until the sources' weights are known.
      load_norm_weight();
    }
    if (threadIdx.x < 32) {
      if constexpr (kBlocks > 1) BarrierWait(&s.sums_full, 0);
      AttnResWeights<kSources>(s, warps, per_col, args.mix_eps, lane);
    }
    __syncthreads();
    AttnResWeighted(source, s.weights, mix);
  }
  const float square = AttnResSquares(mix);
  if (lane == 0) tell(&s.norm_partial[warp], square, &s.norm_full);
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    BarrierWait(&s.norm_full, 0);  // nothing is sent to this block after that
  }
  AttnResStore(s, warps, per_col, args.norm_eps, norm_weight, mix, args.out.Row(row) + column, active);
}

// Softmax over `count` scores in place.
__device__ __forceinline__ void SoftmaxInPlace(float* score, int count) {
  float top = score[0];
  for (int j = 1; j < count; ++j) top = fmaxf(top, score[j]);
  float sum = 0;
  for (int j = 0; j < count; ++j) sum += score[j] = __expf(score[j] - top);
  for (int j = 0; j < count; ++j) score[j] /= sum;
}

constexpr int kAttnResMaxSources = 256;

// Any width, alignment and number of sources: the sources are read twice.
template <typename T>
__global__ void AttnResAnyKernel(AttnResArgs<T> args) {
  float* shared = DynamicShared<float>();
  float* partial = shared;     // one a warp
  float* score = shared + 32;  // [sources]
  const int64_t row = blockIdx.x;
  const int live = args.sources - 1;
  T* home = args.bank + live * args.block_stride + row * args.cols;
  if (args.delta.data != nullptr) {
    const T* delta = args.delta.Row(row);
    for (int c = threadIdx.x; c < args.cols; c += blockDim.x) {
      home[c] = args.restart ? delta[c] : FromFloat<T>(ToFloat(home[c]) + ToFloat(delta[c]));
    }
  }
  if (args.sources == 1) {
    if (threadIdx.x == 0) score[0] = 1;
    __syncthreads();
  } else {
    for (int j = 0; j < args.sources; ++j) {
      const T* source = args.bank + j * args.block_stride + row * args.cols;
      float product = 0, square = 0;
      for (int c = threadIdx.x; c < args.cols; c += blockDim.x) {
        const float x = ToFloat(source[c]);
        product = fmaf(x, args.query[c], product);
        square = fmaf(x, x, square);
      }
      product = BlockSum(product, partial);
      __syncthreads();
      square = BlockSum(square, partial);
      __syncthreads();
      if (threadIdx.x == 0) score[j] = product * rsqrtf(square / args.cols + args.mix_eps);
    }
    if (threadIdx.x == 0) SoftmaxInPlace(score, args.sources);
    __syncthreads();
  }
  float square = 0;
  for (int c = threadIdx.x; c < args.cols; c += blockDim.x) {
    float mix = 0;
    for (int j = 0; j < args.sources; ++j) {
      mix = fmaf(score[j], ToFloat(args.bank[j * args.block_stride + row * args.cols + c]), mix);
    }
    square = fmaf(mix, mix, square);
  }
  const float scale = rsqrtf(BlockSum(square, partial) / args.cols + args.norm_eps);
  for (int c = threadIdx.x; c < args.cols; c += blockDim.x) {
    float mix = 0;
    for (int j = 0; j < args.sources; ++j) {
      mix = fmaf(score[j], ToFloat(args.bank[j * args.block_stride + row * args.cols + c]), mix);
    }
    args.out.Row(row)[c] = FromFloat<T>(mix * scale * args.norm_weight[c]);
  }
}

}  // namespace k3::cuda
