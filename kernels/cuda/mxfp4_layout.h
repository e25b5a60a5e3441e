#pragma once

#include <cstdint>

// The order of MXFP4 weights on the device, which is that in which the matrix unit's lanes take them.
//
// A matrix is cut into pieces of 16 rows x 64 inputs; inputs past the last are zero. Lane 4 g + t has 16 bytes of a
// piece: of rows g and g + 8 the inputs 8 t .. 8 t + 7 and 32 + 8 t .. 32 + 8 t + 7. Each word s of them is one A
// fragment (MmaBf16) once expanded: its register a is input 32 (s / 2) + 8 t + 4 (s % 2) + 2 (a / 2) and the next, of
// row g + 8 (a % 2). Scales: 4 bytes for each g, of row g (first 32 inputs, last 32), then of row g + 8. The pieces of
// the first 16 rows come first.
namespace k3::cuda {

constexpr int kMxfp4Rows = 16, kMxfp4Inputs = 64;
constexpr int kMxfp4PieceBytes = 512, kMxfp4PieceScaleBytes = 32;

// Of 16 rows.
constexpr int Mxfp4Pieces(int64_t cols) { return static_cast<int>((cols + kMxfp4Inputs - 1) / kMxfp4Inputs); }

// Where a word keeps the codes of register a, in each of its halves: the sign bit, and the lowest of the three bits of
// the magnitude. Chosen so that few shifts and masks bring them to the places of bf16's sign (15) and of the last two
// bits of its exponent and the first of its mantissa (8 to 6).
constexpr int Mxfp4SignBit(int a) { return a == 0 ? 15 : a == 1 ? 12 : a == 2 ? 14 : 13; }
constexpr int Mxfp4MagnitudeBit(int a) { return a == 0 ? 6 : a == 1 ? 3 : a == 2 ? 0 : 9; }

}  // namespace k3::cuda
