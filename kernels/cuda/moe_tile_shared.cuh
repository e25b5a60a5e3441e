#pragma once

#include <cuda.h>

#include "kernels/cuda/group_mma.cuh"
#include "kernels/cuda/moe.cuh"
#include "kernels/cuda/weight_tiles.h"

// Expert products for many picks an expert, bf16 warpgroup products. The weights are the side of 64 rows, an expert's
// picks the other, whose width fits their number to within 8: a weight is read once for up to 320 picks, and little is
// multiplied for nothing. Blocks work in pairs, clusters of two, on a tile of 256 rows of weights and the picks. Either
// they split the picks: the weights come to both, each brings half of them, and a block brings its own picks' rows from
// wherever their tokens are (bf16 weights). Or they split the rows of weights: the picks come to both, from where they
// were laid side by side before (MXFP4, whose codes would else be turned into operands twice). Either way what comes
// from the second-level cache is a third less than without pairs, and that is power, which limits the clock.
//
// Resident pairs take every so many-th tile of either product, a down tile as soon as the up tiles that it reads were
// begun long enough ago; counters in global memory say when these have really ended. Up tiles, which are long, and down
// tiles, which ask more of memory, so run side by side, and there is one end instead of two.
//
// Besides a tile's steps the ring of stages has one or two more turns a tile, in which the stages are the space where
// results are turned from weight-major to pick-major; they leave while the other stages fill for the next tile.
namespace k3::cuda {

constexpr int kTileMultiplyThreads = 256;
// The last four warps: one has operands brought, one takes results away, two gather rows, or one of them finds tiles.
constexpr int kTileBringWarp = kTileMultiplyThreads / 32, kTileStoreWarp = kTileBringWarp + 1;
constexpr int kTileGatherWarp = kTileStoreWarp + 1, kTileGatherWarps = 2;
constexpr int kTileThreads = 32 * (kTileGatherWarp + kTileGatherWarps);
constexpr int kTilePair = 2;  // blocks
constexpr int kTilePairRows = kTilePair * kWeightTileRows;
constexpr int kTileDepth = 2 * kWeightTileInputs;
constexpr int kTileTilesAhead = 4;  // brought before their results are stored, at most
constexpr int kTileHalf = kMoeTilePicks / 2;
constexpr int kTileBoxPicks = 32, kTileBoxFew = 16;  // of one copy, and of the last if that is enough
constexpr int kTileBoxOut = 16;                      // picks of one copy of results

struct MoeTile {
  int expert;
  int begin, count;  // picks; no picks: the end
  int first_row;     // of the expert's weights, for the calling block
  bool up;
  int needs;  // down: what MoePlan::up_done of the expert has to reach; 0: another launch was up
};

// What the kernel needs of a kind of weights: a stage of them, in which a step's picks are `x`, and how many; its maps;
// CopyTileStep and MultiplyTile of these.
template <typename Stage, int kStagesOfRing, typename TileMaps>
struct TileShared {
  using Maps = TileMaps;
  static constexpr bool kSplitsPicks = Stage::kSplitsPicks;
  static constexpr int kStages = kStagesOfRing, kWeightBytes = Stage::kWeightBytes;
  static constexpr int kPlanned = kSplitsPicks ? 2 : 4;                          // tiles ahead, at most
  static constexpr int kPicks = kMoeTilePicks / (kSplitsPicks ? kTilePair : 1);  // of a block, at most
  // Of a multiplying thread, and of the others: 168 on average, as the launch gives them.
  static constexpr int kMultiplyRegisters = Stage::kRegisters, kOtherRegisters = 3 * 168 - 2 * kMultiplyRegisters;
  static constexpr int kGatherThreads = kSplitsPicks ? 32 * kTileGatherWarps : 0;

  Stage stage[kStages];
  alignas(16) uint32_t row[kPlanned][kSplitsPicks ? kPicks : 4];  // of x, for an up tile's picks; in 16 bytes
  // Barriers, and who arrives at them.
  uint64_t full[kStages];              // the bringing warp, the gathering threads, and the copy engine
  uint64_t empty[kStages];             // every multiplying warp of both blocks, or for them the storing warps
  uint64_t ready[kStages][2];          // results of a warpgroup in a stage: its four warps
  uint64_t planned[kPlanned];          // the thread or the warp that finds tiles
  uint64_t taken[kPlanned];            // the gathering threads, or the bringing one
  uint64_t listed[kTileTilesAhead];    // the bringing warp
  MoeTile plan[kPlanned];              // by turns: from who finds them to who needs them
  MoeTile tile[kStages];               // at the stage of its first step: to the multiplying warps
  MoeTile leaving[kTileTilesAhead];    // by turns: to the storing warp
  int leaving_stage[kTileTilesAhead];  // the first that its results take
};

// The turns of the ring, as those take them that fill stages.
template <typename Shared>
class TileTurns {
 public:
  __device__ __forceinline__ explicit TileTurns(Shared& s) : s_(s) {}
  // The next turn's stage, once both blocks are done with it.
  __device__ __forceinline__ int Next() {
    const int stage = n_ % Shared::kStages;
    BarrierWait(&s_.empty[stage], (n_ / Shared::kStages & 1) ^ 1);
    ++n_;
    return stage;
  }

 private:
  Shared& s_;
  int n_ = 0;
};

// The picks of a tile that a block of the pair multiplies, from MoeTile::begin on: all, or about half.
struct TileShare {
  int begin, count;
};
template <bool kSplitsPicks>
__device__ __forceinline__ TileShare ShareOf(const MoeTile& tile, int rank) {
  if constexpr (!kSplitsPicks) return {0, tile.count};
  const int half = (tile.count + 15) / 16 * 8, begin = rank * half;
  return {begin, max(0, min(half, tile.count - begin))};
}

// Results of a warpgroup in a stage, as the copy engine has them: boxes of columns side by side, in each of which a
// pick's are a row.
template <typename Shared, bool kUp>
struct TileResults {
  static constexpr int kColumns = (Shared::kSplitsPicks ? 2 : 1) * (kUp ? 32 : 64);
  static constexpr int kBoxColumns = kColumns < 64 ? kColumns : 64, kBoxes = kColumns / kBoxColumns;
  static constexpr int kBoxBytes = Shared::kPicks * 2 * kBoxColumns;
  static constexpr int kStages = kUp ? 1 : 2;  // for both warpgroups
  // Byte of a piece of 16 bytes of a row.
  static __device__ __forceinline__ int At(int row, int piece) {
    return row * 2 * kBoxColumns + ((piece ^ (kBoxColumns < 64 ? row / 2 % 4 : row % 8)) << 4);
  }
};

struct TileMaps {
  CUtensorMap h, few_h;              // inputs of down, boxes of kTileBoxPicks and of kTileBoxFew
  CUtensorMap h_results, y_results;  // boxes of kTileBoxOut x TileResults::kBoxColumns
};

struct TileArgs {
  MoePlan plan;
  int experts;
  bool up, down;      // products of this launch
  int width, inner;   // multiples of 32
  bool weights_once;  // mostly: few experts have more than one tile of picks
  ActivationSpec activation;
  Matrix<const bf16> x;                      // [tokens, width], rows aligned to 16 bytes; where the picks are split
  bf16* h;                                   // [picks, inner]
  bf16* y;                                   // [picks, width]; where the picks are not split, the inputs of up before
  const bf16 *w13 = nullptr, *w2 = nullptr;  // bf16, as weight_tiles.h has them
};

}  // namespace k3::cuda
