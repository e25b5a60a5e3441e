#pragma once

#include <cstdint>

// The order of MXFP4 weights on the device, which is that in which the matrix unit's lanes take them.
//
// A matrix is cut into pieces of 16 rows x 64 inputs; inputs past the last are zero. Lane 4 g + t has 16 bytes of a
// piece. Word s of them is the lane's A fragment of inputs 16 s .. 16 s + 15 in bf16 (MmaBf16), of rows g and g + 8:
// byte b has input 16 s + Mxfp4InputOf(t, b). Two words are also an A fragment of 32 inputs in e4m3, whose columns are
// the inputs in that order. Scales: 4 bytes for each g, of row g (first 32 inputs, last 32), then of row g + 8. The
// pieces of the first 16 rows come first.
namespace k3::cuda {

constexpr int kMxfp4Rows = 16, kMxfp4Inputs = 64;
constexpr int kMxfp4PieceBytes = 512, kMxfp4PieceScaleBytes = 32;

// Of 16 rows.
constexpr int Mxfp4Pieces(int64_t cols) { return static_cast<int>((cols + kMxfp4Inputs - 1) / kMxfp4Inputs); }

// Of 16: the first pair of a fragment's register is in bytes 1 and 3, from where one shift less brings it in place.
constexpr int Mxfp4InputOf(int t, int byte) { return 2 * t + byte / 2 + (byte % 2 == 0 ? 8 : 0); }
// The other way: 4 t + byte for an input of 16.
constexpr int Mxfp4ColumnOf(int input) { return 4 * (input % 8 / 2) + 2 * (input % 2) + (input < 8 ? 1 : 0); }

// How a word w keeps the four codes of both rows, chosen so that few instructions bring them to where e4m3 has its sign
// (7), the last two bits of its exponent and the first of its mantissa (4 to 2):
//   row g: w    row g + 8: w << 2 ^ w >> 2
// `code`: of both rows, the codes in bits 0 to 3 of the four bytes.
constexpr uint32_t kMxfp4Codes = 0x9c9c9c9cu;
constexpr uint32_t Mxfp4Word(const uint32_t (&code)[2]) {
  uint32_t wanted[2] = {};
  for (int r = 0; r < 2; ++r) wanted[r] = (code[r] & 0x07070707u) << 2 | (code[r] & 0x08080808u) << 4;
  uint32_t word = wanted[0];
  const auto bit = [](uint32_t from, int i) { return i < 32 ? from >> i & 1u : 0u; };
  // The bits that row g leaves free, from the top byte down, as a byte's sign needs a bit of the byte above.
  for (int byte = 24; byte >= 0; byte -= 8) {
    word |= (bit(wanted[1], byte + 4) ^ bit(word, byte + 2)) << (byte + 6);
    word |= (bit(wanted[1], byte + 7) ^ bit(word, byte + 9)) << (byte + 5);
    word |= (bit(wanted[1], byte + 3) ^ bit(word, byte + 5)) << (byte + 1);
    word |= (bit(wanted[1], byte + 2) ^ bit(word, byte + 4)) << byte;
  }
  return word;
}

// Whether products of sums with this scale as fp32 stay far from both ends of its range, whatever the inputs' own
// factor.
constexpr bool Mxfp4ScaleIsCommon(uint32_t code) { return code >= 32 && code <= 222; }
// Whether codes spread out as bf16 (Mxfp4Spread) need more than one factor in bf16 to have it.
constexpr bool Mxfp4ScaleIsLarge(uint32_t code) { return code > 128; }

}  // namespace k3::cuda
