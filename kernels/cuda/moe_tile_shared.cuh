#pragma once

#include <cuda.h>

#include "kernels/cuda/group_mma.cuh"
#include "kernels/cuda/moe.cuh"
#include "kernels/cuda/weight_tiles.h"

// Expert products for many picks an expert, bf16 warpgroup products. The weights
// are the 64-row side (128 rows a block, two multiplying warpgroups), an expert's picks the other, whose width fits
// their number to within 8: a weight is read once for up to 320 picks, and little is multiplied for nothing. The copy
// engine brings both and takes the results away. A block's weights of a step lie side by side (weight_tiles.h): as
// boxes of rows with a pitch they were 128 pieces, each from a page of memory of its own.
//
// Blocks work in pairs, clusters of two, on neighbouring rows of weights for the same picks, of which each brings every
// other box to both: what comes from the second-level cache is a third less, and that is power, which limits the clock.
//
// Resident pairs take every so many-th tile of either product, a down tile as soon as the up tiles that it reads were
// begun long enough ago; counters in global memory say when these have really ended. Up tiles, which are long, and down
// tiles, which ask more of memory, so run side by side, and there is one end instead of two.
//
// Besides a tile's steps the ring of stages has one or two more turns a tile, in which the stages are the space where
// results are turned from weight-major to pick-major; they leave while the other stages fill for the next tile.
namespace k3::cuda {

constexpr int kTileMultiplyThreads = 256;
constexpr int kTileThreads = kTileMultiplyThreads + 128;
// Warps of the last four: one finds tiles, one brings operands, one takes results away.
constexpr int kTilePlanWarp = kTileMultiplyThreads / 32, kTileCopyWarp = kTilePlanWarp + 1;
constexpr int kTileStoreWarp = kTileCopyWarp + 1;
constexpr int kTileWeightRows = kWeightTileRows;
constexpr int kTilePair = 2;  // blocks
constexpr int kTilePairRows = kTilePair * kTileWeightRows;
constexpr int kTileDepth = 2 * kWeightTileInputs;
constexpr int kTileTilesAhead = 4;  // of the planning warp, and of the copying thread before stores, at most
constexpr int kTileBoxPicks = 32, kTileBoxFew = 16;  // of one copy, and of the last if that is enough
constexpr int kTileHalf = kMoeTilePicks / 2;
constexpr int kTileBoxOut = 16;  // picks of one copy of results
template <bool kUp>
constexpr int kTileOutColumns = kUp ? 32 : 64;  // of results, a warpgroup
template <bool kUp>
constexpr int kTileSpaces = kUp ? 1 : 2;  // stages that results of a tile take on their way out
constexpr int kTileUpSpace = kMoeTilePicks * 2 * kTileOutColumns<true>;  // bytes of a stage, for a warpgroup's results

struct MoeTile {
  int expert;
  int begin, count;  // picks; no picks: the end
  int first_row;     // of the expert's weights, for the calling block
  bool up;
  int needs;  // down: what MoePlan::up_done of the expert has to reach; 0: another launch was up
};

// What the kernel needs of a kind of weights: a stage of them, in which a step's picks are `x`, and how many; its maps;
// CopyTileWeights and MultiplyTile of these.
template <typename Stage, int kStagesOfRing, typename TileMaps>
struct TileShared {
  using Maps = TileMaps;
  static constexpr int kStages = kStagesOfRing, kWeightBytes = Stage::kWeightBytes;
  // Of a multiplying thread, and of the others: 168 on average, as the launch gives them.
  static constexpr int kMultiplyRegisters = Stage::kRegisters, kOtherRegisters = 3 * 168 - 2 * kMultiplyRegisters;

  Stage stage[kStages];
  // Barriers, and who arrives at them.
  uint64_t full[kStages];              // the copying thread, and the copy engine
  uint64_t empty[kStages];             // every multiplying warp of both blocks, or for them the storing warps
  uint64_t ready[kStages][2];          // results of a warpgroup in a stage: its four warps
  uint64_t planned[kTileTilesAhead];   // the planning warp's first lane
  uint64_t taken[kTileTilesAhead];     // the copying thread
  uint64_t listed[kTileTilesAhead];    // the copying thread
  MoeTile plan[kTileTilesAhead];       // by turns: from the planning warp to the copying thread
  MoeTile tile[kStages];               // at the stage of its first step: to the multiplying warps
  MoeTile leaving[kTileTilesAhead];    // by turns: to the storing warp
  int leaving_stage[kTileTilesAhead];  // the first that its results take
};

struct TileMaps {
  CUtensorMap rows, h;               // inputs of the picks, boxes of kTileBoxPicks
  CUtensorMap few_rows, few_h;       // the same, boxes of kTileBoxFew
  CUtensorMap h_results, y_results;  // boxes of kTileBoxOut x kTileOutColumns
};

struct TileArgs {
  MoePlan plan;
  int experts;
  bool up, down;      // products of this launch
  int width, inner;   // multiples of 32
  bool weights_once;  // mostly: few experts have more than one tile of picks
  ActivationSpec activation;
  bf16* rows;                                // [picks, width], the inputs of up, then the outputs of down
  bf16* h;                                   // [picks, inner]
  const bf16 *w13 = nullptr, *w2 = nullptr;  // bf16, as weight_tiles.h has them
};

}  // namespace k3::cuda
