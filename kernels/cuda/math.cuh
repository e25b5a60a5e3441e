#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/ptx.cuh"

// Device arithmetic shared by the kernels: conversions, 16-byte vectors, warp and block reductions.
namespace k3::cuda {

using bf16 = __nv_bfloat16;

__device__ __forceinline__ float ToFloat(float value) { return value; }
__device__ __forceinline__ float ToFloat(bf16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T FromFloat(float value);
template <>
__device__ __forceinline__ float FromFloat<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ bf16 FromFloat<bf16>(float value) {
  return __float2bfloat16_rn(value);
}

// `value` rounded to T and back.
template <typename T>
__device__ __forceinline__ float Rounded(float value) {
  return ToFloat(FromFloat<T>(value));
}

// N elements moved by one access.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

template <typename T>
constexpr int kPack = 16 / sizeof(T);  // elements of a 16-byte access

template <int N, typename T>
__device__ __forceinline__ void LoadFloats(const T* from, float (&out)[N]) {
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = ToFloat(pack.v[i]);
}

template <int N, typename T>
__device__ __forceinline__ void StoreFloats(T* to, const float (&values)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.v[i] = FromFloat<T>(values[i]);
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float WarpSum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// first[0] + first[stride] + ..., `count` of them from left to right.
__device__ __forceinline__ float4 SumInOrder(const float4* first, int stride, int count) {
  float4 total = first[0];
#pragma unroll
  for (int i = 1; i < count; ++i) {
    const float4 other = first[i * stride];
    total.x += other.x;
    total.y += other.y;
    total.z += other.z;
    total.w += other.w;
  }
  return total;
}

__device__ __forceinline__ float WarpMax(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  return value;
}

template <int P, int kHalf>
__device__ __forceinline__ void WarpSumEachStep(float (&v)[P], int lane) {
  if constexpr (kHalf > 0) {
    const bool upper = (lane & kHalf) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float give = upper ? v[i] : v[i + kHalf];
      const float keep = upper ? v[i + kHalf] : v[i];
      v[i] = keep + __shfl_xor_sync(kAllLanes, give, kHalf);
    }
    WarpSumEachStep<P, kHalf / 2>(v, lane);
  }
}

// Sums P values (a power of two up to 32) over the warp with P - 1 + log2(32 / P) shuffles: afterwards lane l holds the
// sum of v[l % P] in v[0].
template <int P>
__device__ __forceinline__ void WarpSumEach(float (&v)[P], int lane) {
  static_assert((P & (P - 1)) == 0 && P <= 32);
  WarpSumEachStep<P, P / 2>(v, lane);
#pragma unroll
  for (int offset = P; offset < 32; offset *= 2) v[0] += __shfl_xor_sync(kAllLanes, v[0], offset);
}

// Sum over the block, in every thread; `shared` holds one float a warp. Ends without a barrier after the last read, so
// the caller must synchronize before `shared` is used again.
__device__ __forceinline__ float BlockSum(float value, float* shared) {
  const int lane = threadIdx.x % 32;
  const int warps = (blockDim.x + 31) / 32;
  value = WarpSum(value);
  if (lane == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  return WarpSum(lane < warps ? shared[lane] : 0.0f);
}

// Sum of `value` over the threads up to this one; `total` over all of the block. `shared`: 33 ints.
__device__ __forceinline__ int BlockScan(int value, int* shared, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) value += other;
  }
  __syncthreads();
  if (lane == 31) shared[warp] = value;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    if (w < warp) before += shared[w];
    total += shared[w];
  }
  return before + value;
}

// With the fast functions: a few ulp, 0 from x = -88 down.
__device__ __forceinline__ float Sigmoid(float x) { return Reciprocal(1.0f + Exp2(x * -1.4426950408889634f)); }
__device__ __forceinline__ float Silu(float x) { return x * Sigmoid(x); }
// To a few ulp: the series near 0, where the other form cancels.
__device__ __forceinline__ float PreciseTanh(float x) {
  const float far = 1.0f - 2.0f * Reciprocal(1.0f + Exp2(x * 2.8853900817779268f));
  const float square = x * x;
  const float near = x * fmaf(square, fmaf(square, 0.13333333333f, -0.33333333333f), 1.0f);
  return fabsf(x) < 0.1f ? near : far;
}

}  // namespace k3::cuda
