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

// How a word keeps the codes of its four registers, chosen so that few shifts to the right and masks, which share a
// unit on the device, bring them to where bf16 has its sign (15) and the last two bits of its exponent and the first of
// its mantissa (8 to 6). Register a, of both halves:
//   0: w    1: w << 3    2: w << 6 ^ w << 1    3: w >> 3 ^ w << 2
// `code`: of the four registers, the low half's in bits 0 to 3, the high half's in bits 16 to 19.
constexpr uint32_t Mxfp4Word(const uint32_t (&code)[4]) {
  constexpr uint32_t kMagnitudes = 0x00070007u, kOnes = 0x00010001u;
  uint32_t word = 0;
  for (int a = 0; a < 2; ++a) {
    word |= (code[a] & kMagnitudes) << (6 - 3 * a) | (code[a] >> 3 & kOnes) << (15 - 3 * a);
  }
  word |= (code[2] ^ word >> 5) & kMagnitudes;
  word |= ((code[3] ^ word >> 4) & kMagnitudes) << 9;
  word |= ((code[2] >> 3 ^ word >> 9) & kOnes) << 14;
  return word | ((code[3] >> 3 ^ word >> 18) & kOnes) << 13;
}

}  // namespace k3::cuda
