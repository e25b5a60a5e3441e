#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/core/counter_random.h"
#include "kernels/core/tensor.h"

// Values of a HostTensor without data (`serve --random-weights`) on the host. Element index = row * columns + column.
namespace k3 {

// Normal deviate of mean 0 (Box-Muller).
inline float RandomWeight(uint64_t seed, uint64_t index, float stddev) {
  const uint64_t bits = CounterRandomBits(seed, index);
  return stddev * std::sqrt(-2 * std::log(FirstUniform(bits))) * std::cos(6.2831853f * SecondUniform(bits));
}

// Packed MXFP4 without data: uniform codes; their root mean square is 2.93, hence the one scale code of the tensor.
inline uint8_t RandomWeightMxfp4Scale(float stddev) {
  const int code = 127 + static_cast<int>(std::lround(std::log2(stddev > 0 ? stddev / 2.93f : 1.0f)));
  return static_cast<uint8_t>(code < 1 ? 1 : code > 254 ? 254 : code);
}
inline uint8_t RandomWeightMxfp4Byte(uint64_t seed, uint64_t index) {
  return static_cast<uint8_t>(CounterRandomBits(seed, index) >> 24);
}

}  // namespace k3
