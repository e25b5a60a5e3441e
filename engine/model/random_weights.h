#pragma once

#include <cstdint>
#include <string_view>

#include "engine/model/tensor_table.h"
#include "kernels/core/tensor.h"

namespace k3 {

// Weights for `serve --random-weights`: speed and memory of a model without its checkpoint. Drawn from a counter-based
// generator, so that any part can be made on its own and a run can be repeated.

uint64_t RandomSeed(uint64_t seed, std::string_view tensor_name, int32_t rank);
// Standard normal number `index` of a stream.
float RandomNormal(uint64_t seed, uint64_t index);
uint64_t RandomBits(uint64_t seed, uint64_t index);

// Deviation that keeps activations near 1 through a product.
float RandomStddev(const TensorSpec& spec);
// Element of a small tensor: norms are 1, biases 0, the rest random around useful values.
float RandomElement(const TensorSpec& spec, uint64_t seed, uint64_t index);

// Writes the values of `tensor` (data null, BF16) to `out`.
void WriteRandomBf16(const HostTensor& tensor, uint16_t* out);
// Packed MXFP4 of about the wanted deviation: random element codes, one scale code for all blocks.
void WriteRandomBytes(uint64_t seed, uint8_t* out, uint64_t count);
uint8_t RandomScaleCode(float stddev);

}  // namespace k3
