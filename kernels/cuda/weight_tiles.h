#pragma once

#include <cstdint>

// The order of expert weights in bf16 on the device: tiles of 128 rows x 32 inputs. Of a matrix the tiles of the first
// 128 rows come first, so that two tiles, 16 KB side by side, are what a step of the large products takes
// (moe_tile.cuh), brought in one piece; rows and inputs past the last are zero. A tile is what the matrix unit wants in
// shared memory: rows of 64 bytes, in which piece p of 16 bytes of row r is the (p ^ r / 2 % 4)-th. Eight rows are 512
// bytes, which is what a warp loads at a time where there are few picks.
namespace k3::cuda {

constexpr int kWeightTileRows = 128, kWeightTileInputs = 32;
constexpr int kWeightTileElements = kWeightTileRows * kWeightTileInputs;

constexpr int WeightTilesDown(int64_t rows) { return static_cast<int>((rows + kWeightTileRows - 1) / kWeightTileRows); }
// Even.
constexpr int WeightTilesAcross(int64_t cols) {
  return static_cast<int>((cols + 2 * kWeightTileInputs - 1) / (2 * kWeightTileInputs)) * 2;
}
// Elements of a matrix.
constexpr int64_t TiledElements(int64_t rows, int64_t cols) {
  return int64_t{WeightTilesDown(rows)} * WeightTilesAcross(cols) * kWeightTileElements;
}

// The element of input `col`, of a matrix (or several, one under the other, each of whole tiles) `across` tiles wide.
constexpr int64_t TiledElement(int64_t row, int col, int across) {
  const int in_tile = static_cast<int>(row % kWeightTileRows);
  return (row / kWeightTileRows * across + col / kWeightTileInputs) * kWeightTileElements +
         in_tile * kWeightTileInputs + ((col % kWeightTileInputs / 8 ^ in_tile / 2 % 4) * 8 + col % 8);
}
// From an element to that of as many inputs further, a multiple of kWeightTileInputs, in the same row.
constexpr int64_t TiledInputsOn(int64_t inputs) { return inputs * kWeightTileRows; }
// To the same input of as many rows further, a multiple of 8, in the same tile.
constexpr int TiledRowsOn(int rows) { return rows * kWeightTileInputs; }

}  // namespace k3::cuda
