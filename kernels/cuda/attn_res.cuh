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

// kSources: sources held (>= args.sources). Each thread owns one pack of N columns, so blockDim.x * N >= cols.
template <typename T, int kSources>
__global__ void __launch_bounds__(kAttnResThreads, 1) AttnResKernel(AttnResArgs<T> args) {
  constexpr int N = kPack<T>;
  constexpr int kSums = kAttnResSums;
  static_assert(2 * kSources <= kSums);
  float* shared = DynamicShared<float>();
  float* partial = shared;               // [warps][kSums]
  float* weights = shared + 32 * kSums;  // [kSources]
  float* norm_partial = weights + 32;    // one a warp
  const int64_t row = blockIdx.x;
  const int column = threadIdx.x * N;
  const bool active = column < args.cols;
  const int live = args.sources - 1;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;

  HeldPack<T> source[kSources] = {};
  if (active) {
#pragma unroll
    for (int j = 0; j < kSources; ++j) {
      if (j < live || (j == live && !args.restart)) {
        source[j] = LoadHeld(args.bank + j * args.block_stride + row * args.cols + column);
      }
    }
    if (args.delta.data != nullptr) {
      HeldPack<T> sum = LoadHeld(args.delta.Row(row) + column);
      T* home = args.bank + live * args.block_stride + row * args.cols + column;
#pragma unroll
      for (int j = 0; j < kSources; ++j) {
        if (j != live) continue;
        if (!args.restart) {
          float values[N];
#pragma unroll
          for (int i = 0; i < N; ++i) values[i] = source[j][i] + sum[i];
          sum = MakeHeld<T>(values);
        }
        *reinterpret_cast<uint4*>(home) = sum.words;
        source[j] = sum;
      }
    }
  }

  float mix[N];
  if (args.sources == 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) mix[i] = source[0][i];
  } else {
    float query[N] = {};
    if (active) LoadFloats<N>(args.query + column, query);
#pragma unroll
    for (int group = 0; group < kSources; group += kAttnResGroup) {
      float sums[2 * kAttnResGroup] = {};
#pragma unroll
      for (int j = group; j < group + kAttnResGroup && j < kSources; ++j) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float x = source[j][i];
          float& product = sums[2 * (j - group)];
          float& square = sums[2 * (j - group) + 1];
          product = fmaf(x, query[i], product);
          square = fmaf(x, x, square);
        }
      }
      WarpSumEach<2 * kAttnResGroup>(sums, lane);
      if (lane < 2 * kAttnResGroup) partial[warp * kSums + 2 * group + lane] = sums[0];
    }
    __syncthreads();
    if (warp == 0) {
      float total = 0;
      if (lane < kSums) {
        for (int w = 0; w < warps; ++w) total += partial[w * kSums + lane];
      }
      // Lane 2j holds the product of source j with the query, lane 2j + 1 its sum of squares.
      const float square = __shfl_down_sync(kAllLanes, total, 1);
      const int j = lane / 2;
      const bool valid = lane % 2 == 0 && lane < kSums && j < args.sources;
      const float score = valid ? total * rsqrtf(square / args.cols + args.mix_eps) : -INFINITY;
      const float top = WarpMax(score);
      const float power = valid ? __expf(score - top) : 0.0f;
      const float sum = WarpSum(power);
      if (lane % 2 == 0 && j < kSources) weights[j] = power / sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) mix[i] = 0;
#pragma unroll
    for (int j = 0; j < kSources; ++j) {
      const float weight = weights[j];
#pragma unroll
      for (int i = 0; i < N; ++i) mix[i] = fmaf(weight, source[j][i], mix[i]);
    }
  }

  float square = 0;
  if (active) {
#pragma unroll
    for (int i = 0; i < N; ++i) square = fmaf(mix[i], mix[i], square);
  }
  const float scale = rsqrtf(BlockSum(square, norm_partial) / args.cols + args.norm_eps);
  if (!active) return;
  float weight[N];
  LoadFloats<N>(args.norm_weight + column, weight);
#pragma unroll
  for (int i = 0; i < N; ++i) mix[i] = mix[i] * scale * weight[i];
  StoreFloats<N>(args.out.Row(row) + column, mix);
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
