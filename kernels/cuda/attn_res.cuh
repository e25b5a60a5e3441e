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

// kSources: sources held (>= args.sources). Each thread owns one pack of N columns, so blockDim.x * N >= cols.
template <typename T, int N, int kSources>
__global__ void AttnResKernel(AttnResArgs<T> args) {
  constexpr int kSums = kSources <= 1 ? 2 : kSources <= 2 ? 4 : kSources <= 4 ? 8 : kSources <= 8 ? 16 : 32;
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

  Pack<T, N> source[kSources] = {};
  Pack<T, N> delta = {};
  if (active) {
#pragma unroll
    for (int j = 0; j < kSources; ++j) {
      if (j < live || (j == live && !args.restart)) {
        source[j] = *reinterpret_cast<const Pack<T, N>*>(args.bank + j * args.block_stride + row * args.cols + column);
      }
    }
    if (args.delta.data != nullptr) {
      delta = *reinterpret_cast<const Pack<T, N>*>(args.delta.Row(row) + column);
      T* home = args.bank + live * args.block_stride + row * args.cols + column;
      Pack<T, N> sum;
#pragma unroll
      for (int j = 0; j < kSources; ++j) {
        if (j == live) {
#pragma unroll
          for (int i = 0; i < N; ++i) {
            sum.v[i] = args.restart ? delta.v[i] : FromFloat<T>(ToFloat(source[j].v[i]) + ToFloat(delta.v[i]));
          }
          source[j] = sum;
        }
      }
      *reinterpret_cast<Pack<T, N>*>(home) = sum;
    }
  }

  float mix[N];
  if (args.sources == 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) mix[i] = ToFloat(source[0].v[i]);
  } else {
    float sums[kSums] = {};
    if (active) {
      float query[N];
      LoadFloats<N>(args.query + column, query);
#pragma unroll
      for (int j = 0; j < kSources; ++j) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float x = ToFloat(source[j].v[i]);
          sums[2 * j] = fmaf(x, query[i], sums[2 * j]);
          sums[2 * j + 1] = fmaf(x, x, sums[2 * j + 1]);
        }
      }
    }
    WarpSumEach<kSums>(sums, lane);
    if (lane < kSums) partial[warp * kSums + lane] = sums[0];
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
      for (int i = 0; i < N; ++i) mix[i] = fmaf(weight, ToFloat(source[j].v[i]), mix[i]);
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
