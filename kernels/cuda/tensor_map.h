#pragma once

#include <cuda.h>

#include <cstdint>

// Descriptions of tensors in global memory for the copy engine.
namespace k3::cuda {

// bf16 matrices [planes][rows, cols] without gaps, brought box by box: [box_rows, 64] with 128-byte swizzle, elements
// outside a matrix as zeros. `cols` is a multiple of 8, `data` aligned to 16 bytes and alive as long as the map is
// used; box_rows is at most 256.
CUtensorMap MatrixBoxes(const void* data, int64_t planes, int64_t rows, int64_t cols, int box_rows);

}  // namespace k3::cuda
