#pragma once

#include <cuda.h>

#include <cstdint>

// Descriptions of tensors in global memory for the copy engine.
namespace k3::cuda {

// bf16 matrices [planes][rows, cols], brought or taken box by box: [box_rows, box_cols] with 128-byte swizzle (64
// columns) or 64-byte swizzle (32), elements outside a matrix as zeros. Rows are `ld` elements apart, planes
// `plane_stride`, both multiples of 8; `data` is aligned to 16 bytes and alive as long as the map is used; box_rows is
// at most 256. The second-level cache fetches `fetch` bytes at a time, 128 or 256, for what is read.
CUtensorMap MatrixBoxes(const void* data, int64_t planes, int64_t plane_stride, int64_t rows, int64_t cols, int64_t ld,
                        int box_rows, int box_cols = 64, int fetch = 256);
// The same without gaps.
inline CUtensorMap MatrixBoxes(const void* data, int64_t planes, int64_t rows, int64_t cols, int box_rows,
                               int box_cols = 64, int fetch = 256) {
  return MatrixBoxes(data, planes, rows * cols, rows, cols, cols, box_rows, box_cols, fetch);
}

// Pairs of bytes, [planes][rows][pairs] without gaps, brought as they are: boxes [8][box_pairs], what lies outside as
// zeros; both widths are multiples of 8, box_pairs is at most 256.
CUtensorMap PairBoxes(const void* data, int64_t planes, int64_t rows, int64_t pairs, int box_pairs);

// bf16 lines of `cols` elements, [pages][page_size], brought eight at a time: boxes [cols / 64][8, 64] with 128-byte
// swizzle from element (0, line, 0, page) on, lines or pages outside as zeros. Pages are page_stride bytes apart.
CUtensorMap LineBoxes(const void* data, int64_t pages, int64_t page_stride, int64_t page_size, int64_t cols);

}  // namespace k3::cuda
