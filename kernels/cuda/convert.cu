#include <cuda_fp16.h>

#include "kernels/core/counter_random.h"
#include "kernels/cuda/convert.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/mxfp4.cuh"
#include "kernels/cuda/weight_tiles.h"

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

// One thread a lane of a piece (mxfp4_layout.h).
__global__ void RepackMxfp4Kernel(const uint8_t* rows, const uint8_t* scales, int64_t lanes, int cols, uint4* to,
                                  uint32_t* to_scales, Mxfp4ScalesFound* found) {
  const int pieces = Mxfp4Pieces(cols);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < lanes; i += step) {
    const int g = i % 32 / 4, t = i % 4;
    const int64_t piece = i / 32, row = piece / pieces * kMxfp4Rows + g;
    const int k = static_cast<int>(piece % pieces) * kMxfp4Inputs;
    uint32_t spread[4][2] = {}, scale = 0;  // of each word: the codes of both rows
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      if (k + 16 * s >= cols) break;
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int64_t at = (row + 8 * upper) * cols + k + 16 * s;
        if (s % 2 == 0) scale |= static_cast<uint32_t>(scales[at / 32]) << (16 * upper + 4 * s);
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
          const int input = Mxfp4InputOf(t, byte);
          spread[s][upper] |= (rows[(at + input) / 2] >> (4 * (input % 2)) & 15u) << (8 * byte);
        }
      }
    }
    to[i] = make_uint4(Mxfp4Word(spread[0]), Mxfp4Word(spread[1]), Mxfp4Word(spread[2]), Mxfp4Word(spread[3]));
    if (t == 0) to_scales[piece * 8 + g] = scale;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      if (byte % 2 == 1 && k + 32 >= cols) continue;
      const uint32_t code = scale >> (8 * byte) & 255;
      if (!Mxfp4ScaleIsCommon(code)) found->rare = 1;
      if (Mxfp4ScaleIsLarge(code)) found->large = 1;
    }
  }
}

// One thread a piece of 16 bytes of the tiles.
__global__ void TileWeightsKernel(const uint4* from, int64_t rows, int cols, int64_t pieces, uint4* to) {
  constexpr int kPieces = kWeightTileInputs / 8;
  const int across = WeightTilesAcross(cols);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < pieces; i += step) {
    const int64_t line = i / kPieces, tile = line / kWeightTileRows;
    const int64_t row = tile / across * kWeightTileRows + line % kWeightTileRows;
    const int64_t piece = tile % across * kPieces + (i % kPieces ^ line / 2 % 4);
    to[i] = row < rows && 8 * piece < cols ? from[row * (cols / 8) + piece] : uint4{0, 0, 0, 0};
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

void TileWeights(const void* from, int64_t rows, int64_t cols, void* to, cudaStream_t queue) {
  const int64_t pieces = TiledElements(rows, cols) / 8;
  if (pieces == 0) return;
  Launch(&TileWeightsKernel, Spread(pieces), queue, "TileWeights", static_cast<const uint4*>(from), rows,
         static_cast<int>(cols), pieces, static_cast<uint4*>(to));
}

void RepackMxfp4(const void* rows, const void* scales, int64_t count, int64_t cols, void* to, void* to_scales,
                 Mxfp4ScalesFound* found, cudaStream_t queue) {
  const int64_t lanes = count / kMxfp4Rows * Mxfp4Pieces(cols) * 32;
  if (lanes == 0) return;
  Launch(&RepackMxfp4Kernel, Spread(lanes), queue, "RepackMxfp4", static_cast<const uint8_t*>(rows),
         static_cast<const uint8_t*>(scales), lanes, static_cast<int>(cols), static_cast<uint4*>(to),
         static_cast<uint32_t*>(to_scales), found);
}

}  // namespace k3::cuda
