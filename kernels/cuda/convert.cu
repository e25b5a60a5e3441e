#include <cuda_fp16.h>

#include "kernels/core/counter_random.h"
#include "kernels/cuda/convert.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/mxfp4.cuh"

namespace k3::cuda {
namespace {

__device__ __forceinline__ float Widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float Widen(float value) { return value; }
__device__ __forceinline__ float Widen(bf16 value) { return __bfloat162float(value); }

template <typename From, typename To>
__global__ void ConvertKernel(const From* from, To* to, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = FromFloat<To>(Widen(from[i]));
  }
}

template <typename To>
__global__ void FillNormalKernel(To* to, int64_t count, float deviation, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const uint64_t bits = CounterRandomBits(seed, static_cast<uint64_t>(i));
    const float radius = sqrtf(-2.0f * logf(FirstUniform(bits)));
    to[i] = FromFloat<To>(deviation * radius * cosf(6.2831853f * SecondUniform(bits)));
  }
}

__global__ void FillBitsKernel(uint8_t* to, int64_t count, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = static_cast<uint8_t>(CounterRandomBits(seed, static_cast<uint64_t>(i)) >> 24);
  }
}

__global__ void RegroupMxfp4Kernel(uint32_t* words, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const uint32_t word = words[i];
    uint32_t regrouped = 0;
#pragma unroll
    for (int element = 0; element < 8; ++element)
      regrouped |= (word >> (4 * element) & 15) << (4 * Mxfp4Nibble(element));
    words[i] = regrouped;
  }
}

LaunchShape Spread(int64_t count) {
  return {.grid = dim3(static_cast<unsigned>(std::min<int64_t>(CeilDiv(count, 256), 4096))), .block = dim3(256)};
}

template <typename From>
void ConvertFrom(const void* from, void* to, DType to_type, int64_t count, cudaStream_t queue) {
  const From* source = static_cast<const From*>(from);
  if (to_type == DType::kBF16) {
    Launch(&ConvertKernel<From, bf16>, Spread(count), queue, "Convert", source, static_cast<bf16*>(to), count);
  } else {
    Launch(&ConvertKernel<From, float>, Spread(count), queue, "Convert", source, static_cast<float*>(to), count);
  }
}

}  // namespace

void Convert(const void* from, DType from_type, void* to, DType to_type, int64_t count, cudaStream_t queue) {
  K3_REQUIRE(to_type == DType::kBF16 || to_type == DType::kF32, std::string("cannot convert to ") + Name(to_type));
  if (count == 0) return;
  switch (from_type) {
    case DType::kF32:
      return ConvertFrom<float>(from, to, to_type, count, queue);
    case DType::kBF16:
      return ConvertFrom<bf16>(from, to, to_type, count, queue);
    case DType::kF16:
      return ConvertFrom<__half>(from, to, to_type, count, queue);
    default:
      Refuse(std::string("cannot convert from ") + Name(from_type), std::source_location::current());
  }
}

void FillNormal(void* to, DType to_type, int64_t count, float deviation, uint64_t seed, cudaStream_t queue) {
  K3_REQUIRE(to_type == DType::kBF16 || to_type == DType::kF32, std::string("cannot fill ") + Name(to_type));
  if (count == 0) return;
  if (to_type == DType::kBF16) {
    Launch(&FillNormalKernel<bf16>, Spread(count), queue, "FillNormal", static_cast<bf16*>(to), count, deviation, seed);
  } else {
    Launch(&FillNormalKernel<float>, Spread(count), queue, "FillNormal", static_cast<float*>(to), count, deviation,
           seed);
  }
}

void FillBits(uint8_t* to, int64_t count, uint64_t seed, cudaStream_t queue) {
  if (count == 0) return;
  Launch(&FillBitsKernel, Spread(count), queue, "FillBits", to, count, seed);
}

void RegroupMxfp4(void* words, int64_t count, cudaStream_t queue) {
  if (count == 0) return;
  Launch(&RegroupMxfp4Kernel, Spread(count), queue, "RegroupMxfp4", static_cast<uint32_t*>(words), count);
}

}  // namespace k3::cuda
