#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"

// Block attention residuals (spec 3.2): one block a row. Every source vector is read once and held in registers while
// its score and its norm are reduced, then mixed and normalised.
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

// Softmax over `count` scores in place.
__device__ __forceinline__ void SoftmaxInPlace(float* score, int count) {
  float top = score[0];
  for (int j = 1; j < count; ++j) top = fmaxf(top, score[j]);
  float sum = 0;
  for (int j = 0; j < count; ++j) sum += score[j] = __expf(score[j] - top);
  for (int j = 0; j < count; ++j) score[j] /= sum;
}

// Sixteen bytes of T, kept as four words: as separate 16-bit elements they would take twice the registers.
template <typename T>
struct HeldPack {
  uint4 words;

  __device__ __forceinline__ float operator[](int i) const {
    const uint32_t all[4] = {words.x, words.y, words.z, words.w};
    if constexpr (sizeof(T) == 4) return __uint_as_float(all[i]);
    return i % 2 == 0 ? LowBf16(all[i / 2]) : HighBf16(all[i / 2]);
  }
};
template <typename T>
__device__ __forceinline__ HeldPack<T> LoadHeld(const T* from) {
  return {*reinterpret_cast<const uint4*>(from)};
}

// The values rounded to T.
template <typename T>
__device__ __forceinline__ HeldPack<T> MakeHeld(const float (&values)[kPack<T>]) {
  if constexpr (sizeof(T) == 4) {
    return {{__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
             __float_as_uint(values[3])}};
  } else {
    return {{PackBf16(values[0], values[1]), PackBf16(values[2], values[3]), PackBf16(values[4], values[5]),
             PackBf16(values[6], values[7])}};
  }
}

constexpr int kAttnResThreads = 896;  // at most: 7168 columns in packs of 8, and registers for nine sources
constexpr int kAttnResGroup = 4;      // sources whose sums are reduced together
constexpr int kAttnResSums = 24;      // two sums a source, whole groups of them

// What the warps of a row tell each other. One order of operations for all variants: columns in lanes and packs, then
// lanes, then warps.
struct AttnResShared {
  float partial[32][kAttnResSums];  // of a warp: product with the query and sum of squares of each source
  float weights[16];                // of the sources
  float norm_partial[32];           // of a warp: sum of squares of the mix
};

// Adds what a warp has of the sources of one group: lane 2j and 2j + 1 of the result hold product and square of source
// j.
template <typename T, int kSources, int kGroup>
__device__ __forceinline__ float AttnResGroupSums(const HeldPack<T> (&source)[kSources], const float (&query)[kPack<T>],
                                                  int lane) {
  float sums[2 * kAttnResGroup] = {};
#pragma unroll
  for (int j = kGroup; j < kGroup + kAttnResGroup && j < kSources; ++j) {
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      const float x = source[j][i];
      float& product = sums[2 * (j - kGroup)];
      float& square = sums[2 * (j - kGroup) + 1];
      product = fmaf(x, query[i], product);
      square = fmaf(x, x, square);
    }
  }
  WarpSumEach<2 * kAttnResGroup>(sums, lane);
  return sums[0];
}

// By one warp: the weights of the sources from the sums of all `warps`.
template <int kSources>
__device__ __forceinline__ void AttnResWeights(AttnResShared& s, int warps, int sources, int cols, float eps,
                                               int lane) {
  float chain[4] = {};
  if (lane < kAttnResSums) {
#pragma unroll 7
    for (int w = 0; w < warps; w += 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) chain[i] += w + i < warps ? s.partial[w + i][lane] : 0.0f;
    }
  }
  const float total = (chain[0] + chain[1]) + (chain[2] + chain[3]);
  // Lane 2j holds the product of source j with the query, lane 2j + 1 its sum of squares.
  const float square = __shfl_down_sync(kAllLanes, total, 1);
  const int j = lane / 2;
  const bool valid = lane % 2 == 0 && lane < kAttnResSums && j < sources;
  const float score = valid ? total * rsqrtf(square / cols + eps) : -INFINITY;
  const float top = WarpMax(score);
  const float power = valid ? __expf(score - top) : 0.0f;
  const float sum = WarpSum(power);
  if (lane % 2 == 0 && j < kSources) s.weights[j] = power / sum;
}

template <typename T, int kSources>
__device__ __forceinline__ void AttnResWeighted(const HeldPack<T> (&source)[kSources], const float* weights,
                                                float (&mix)[kPack<T>]) {
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) mix[i] = 0;
#pragma unroll
  for (int j = 0; j < kSources; ++j) {
    const float weight = weights[j];
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) mix[i] = fmaf(weight, source[j][i], mix[i]);
  }
}

// The live sum with `delta` added (or replaced by it), stored at `home`.
template <typename T>
__device__ __forceinline__ HeldPack<T> AttnResAdvance(const HeldPack<T>& live, const HeldPack<T>& delta, bool restart,
                                                      T* home) {
  HeldPack<T> sum = delta;
  if (!restart) {
    float values[kPack<T>];
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) values[i] = live[i] + delta[i];
    sum = MakeHeld<T>(values);
  }
  *reinterpret_cast<uint4*>(home) = sum.words;
  return sum;
}

// A row for a cluster of kBlocks blocks. kSources: sources held (>= args.sources). Each thread owns one pack of N
// columns, so kBlocks * blockDim.x * N >= cols.
template <typename T, int kSources, int kBlocks>
__global__ void __launch_bounds__(kAttnResThreads / kBlocks, kBlocks == 2 ? 2 : 1) AttnResKernel(AttnResArgs<T> args) {
  constexpr int N = kPack<T>;
  static_assert(2 * kSources <= kAttnResSums);
  AttnResShared& s = *DynamicShared<AttnResShared>();
  const int64_t row = blockIdx.x / kBlocks;
  const int rank = kBlocks > 1 ? static_cast<int>(ClusterRank()) : 0;
  const int column = (rank * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
  const bool active = column < args.cols;
  const int live = args.sources - 1;
  const int lane = threadIdx.x % 32;
  const int block_warps = blockDim.x / 32;
  const int warp = rank * block_warps + static_cast<int>(threadIdx.x) / 32;
  const int warps = kBlocks * block_warps;
  if constexpr (kBlocks > 1) ClusterArrive();

  HeldPack<T> source[kSources] = {};
  if (active) {
#pragma unroll
    for (int j = 0; j < kSources; ++j) {
      if (j < live || (j == live && !args.restart)) {
        source[j] = LoadHeld(args.bank + j * args.block_stride + row * args.cols + column);
      }
    }
  }
  float query[N] = {}, norm_weight[N] = {};
  if (active) {
    if (args.sources > 1) LoadFloats<N>(args.query + column, query);
    if constexpr (kBlocks > 1) LoadFloats<N>(args.norm_weight + column, norm_weight);
    if (args.delta.data != nullptr) {
      const HeldPack<T> delta = LoadHeld(args.delta.Row(row) + column);
      T* home = args.bank + live * args.block_stride + row * args.cols + column;
#pragma unroll
      for (int j = 0; j < kSources; ++j) {
        if (j == live) source[j] = AttnResAdvance(source[j], delta, args.restart, home);
      }
    }
  }

  // Every block gets the sums of all warps.
  const auto tell = [&](float* to, float value) {
    if constexpr (kBlocks == 1) {
      *to = value;
    } else {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) *InBlock(to, b) = value;
    }
  };
  const auto meet = [&] {
    if constexpr (kBlocks == 1) {
      __syncthreads();
    } else {
      ClusterArrive();
      ClusterWait();
    }
  };
  // A block that holds a whole row has registers for the norm's weights once its sums are done.
  const auto load_norm_weight = [&] {
    if (kBlocks == 1 && active) LoadFloats<N>(args.norm_weight + column, norm_weight);
  };
  if constexpr (kBlocks > 1) ClusterWait();  // the other blocks have started
  float mix[N];
  if (args.sources == 1) {
    load_norm_weight();
#pragma unroll
    for (int i = 0; i < N; ++i) mix[i] = source[0][i];
  } else {
    float sums[3];
    sums[0] = AttnResGroupSums<T, kSources, 0>(source, query, lane);
    if constexpr (kSources > 4) sums[1] = AttnResGroupSums<T, kSources, 4>(source, query, lane);
    if constexpr (kSources > 8) sums[2] = AttnResGroupSums<T, kSources, 8>(source, query, lane);
#pragma unroll
    for (int group = 0; group < (kSources + 3) / 4; ++group) {
      if (lane < 8) tell(&s.partial[warp][8 * group + lane], sums[group]);
    }
    load_norm_weight();
    meet();
    if (threadIdx.x < 32) AttnResWeights<kSources>(s, warps, args.sources, args.cols, args.mix_eps, lane);
    __syncthreads();
    AttnResWeighted<T, kSources>(source, s.weights, mix);
  }

  float square = 0;
  if (active) {
#pragma unroll
    for (int i = 0; i < N; ++i) square = fmaf(mix[i], mix[i], square);
  }
  square = WarpSum(square);
  if (lane == 0) tell(&s.norm_partial[warp], square);
  meet();
  const float scale = rsqrtf(WarpSum(lane < warps ? s.norm_partial[lane] : 0.0f) / args.cols + args.norm_eps);
  if (!active) return;
#pragma unroll
  for (int i = 0; i < N; ++i) mix[i] = mix[i] * scale * norm_weight[i];
  StoreFloats<N>(args.out.Row(row) + column, mix);
}

constexpr int kAttnResSlots = 12;  // of the ring, a source of a row each

template <typename T>
constexpr size_t AttnResStreamShared(int cols) {
  return sizeof(AttnResShared) + 16 * sizeof(uint64_t) + static_cast<size_t>(cols) * sizeof(float) +
         static_cast<size_t>(kAttnResSlots) * cols * sizeof(T);
}

// Many rows: a resident block takes every gridDim.x-th one. The copy engine brings the sources of this row and the next
// into a ring; a source leaves it for registers as soon as it is there, so that its slot is on its way again while the
// row is reduced, mixed and stored. A thread has the same columns of all rows, and keeps their part of the query.
template <typename T, int kSources>
__global__ void __launch_bounds__(kAttnResThreads, 1) AttnResStreamKernel(AttnResArgs<T> args, int rows) {
  constexpr int N = kPack<T>;
  AttnResShared& s = *DynamicShared<AttnResShared>();
  uint64_t* full = reinterpret_cast<uint64_t*>(&s + 1);  // of a slot
  float* norm_shared = reinterpret_cast<float*>(full + 16);
  T* ring = reinterpret_cast<T*>(norm_shared + args.cols);
  const int column = static_cast<int>(threadIdx.x) * N;
  const bool active = column < args.cols;
  const int live = args.sources - 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const bool has_delta = args.delta.data != nullptr;
  // The copies of a row: the sources that are read, then delta.
  const int read = args.restart ? live : live + 1;
  const int loads = read + (has_delta ? 1 : 0);

  // Warp 1 orders the copies; warp 0 is busy with the weights.
  const bool orders = threadIdx.x == (warps > 1 ? 32 : 0);
  int64_t next_row = blockIdx.x;
  int next_load = 0, next_slot = 0;
  const auto order = [&](int count) {
    for (int i = 0; i < count && next_row < rows; ++i) {
      const T* from = next_load < read ? args.bank + next_load * args.block_stride + next_row * args.cols
                                       : args.delta.Row(next_row);
      const uint32_t bytes = static_cast<uint32_t>(args.cols) * sizeof(T);
      BarrierArriveExpect(&full[next_slot], bytes);
      CopyBulk(ring + static_cast<int64_t>(next_slot) * args.cols, from, bytes, &full[next_slot]);
      next_slot = next_slot + 1 == kAttnResSlots ? 0 : next_slot + 1;
      if (++next_load == loads) {
        next_load = 0;
        next_row += gridDim.x;
      }
    }
  };
  if (orders) {
    for (int i = 0; i < kAttnResSlots; ++i) BarrierInit(&full[i], 1);
    BarrierInitFence();
    order(kAttnResSlots);
  }
  for (int i = threadIdx.x; i < args.cols; i += blockDim.x) norm_shared[i] = args.norm_weight[i];
  float query[N] = {};
  if (active && args.sources > 1) LoadFloats<N>(args.query + column, query);
  __syncthreads();

  int slot = 0;
  uint32_t parity = 0;
  const auto take = [&] {
    BarrierWait(&full[slot], parity);
    HeldPack<T> held = {};
    if (active) held = LoadHeld(ring + static_cast<int64_t>(slot) * args.cols + column);
    if (++slot == kAttnResSlots) {
      slot = 0;
      parity ^= 1;
    }
    return held;
  };
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    HeldPack<T> source[kSources] = {};
    float mix[N];
#pragma unroll
    for (int j = 0; j < kSources; ++j) {
      if (j < live || (j == live && !args.restart)) source[j] = take();
      if (j == live && has_delta) {
        const HeldPack<T> delta = take();
        T* home = args.bank + live * args.block_stride + row * args.cols + column;
        if (active) source[j] = AttnResAdvance(source[j], delta, args.restart, home);
      }
      if (args.sources == 1) continue;
      // A group's sums as soon as it is there.
      float sum = 0;
      if (j == min(3, kSources - 1)) sum = AttnResGroupSums<T, kSources, 0>(source, query, lane);
      if constexpr (kSources > 4) {
        if (j == min(7, kSources - 1)) sum = AttnResGroupSums<T, kSources, 4>(source, query, lane);
      }
      if constexpr (kSources > 8) {
        if (j == kSources - 1) sum = AttnResGroupSums<T, kSources, 8>(source, query, lane);
      }
      if (j % 4 == 3 || j == kSources - 1) {
        if (lane < 8) s.partial[warp][8 * (j / 4) + lane] = sum;
      }
    }
    __syncthreads();  // all have taken their sources
    if (orders) order(loads);
    if (args.sources == 1) {
#pragma unroll
      for (int i = 0; i < N; ++i) mix[i] = source[0][i];
    } else {
      if (threadIdx.x < 32) AttnResWeights<kSources>(s, warps, args.sources, args.cols, args.mix_eps, lane);
      __syncthreads();
      AttnResWeighted<T, kSources>(source, s.weights, mix);
    }
    float square = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) square = fmaf(mix[i], mix[i], square);
    square = WarpSum(square);
    if (lane == 0) s.norm_partial[warp] = square;
    __syncthreads();
    const float scale = rsqrtf(WarpSum(lane < warps ? s.norm_partial[lane] : 0.0f) / args.cols + args.norm_eps);
    if (!active) continue;
    float norm_weight[N];
    LoadFloats<N>(norm_shared + column, norm_weight);
#pragma unroll
    for (int i = 0; i < N; ++i) mix[i] = mix[i] * scale * norm_weight[i];
    StoreFloats<N>(args.out.Row(row) + column, mix);
  }
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
