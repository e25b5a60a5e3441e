#pragma once

#include <cuda_runtime.h>

#include <cstdint>

// MXFP4 weights on the device (spec 2.3).
namespace k3::cuda {

// Where the repacked words keep a code: element i of a word's eight is nibble 3 - i / 2 for even i, 7 - i / 2
// for odd i, so that shifting a word left by 4 j brings the pair (2 j, 2 j + 1) to the tops of its halves.
__host__ __device__ constexpr int Mxfp4Nibble(int element) { return 3 - element / 2 + element % 2 * 4; }

__device__ __forceinline__ float Mxfp4Scale(uint32_t code) {
  return code == 255 ? __uint_as_float(0x7fc00000u) : __uint_as_float(code == 0 ? 0x00400000u : code << 23);
}

// A row of weights as fp32.
struct Mxfp4Row {
  const uint32_t* words;
  const uint8_t* scales;
  __device__ __forceinline__ float operator()(int k) const {
    const uint32_t code = words[k / 8] >> (4 * Mxfp4Nibble(k % 8)) & 15;
    const uint32_t magnitude = code & 7;
    const float value = magnitude < 2 ? 0.5f * magnitude : (1.0f + 0.5f * (magnitude & 1)) * (1 << (magnitude / 2 - 1));
    return ((code & 8) != 0 ? -value : value) * Mxfp4Scale(scales[k / 32]);
  }
};

}  // namespace k3::cuda
