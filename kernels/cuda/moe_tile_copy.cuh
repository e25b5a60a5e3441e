#pragma once

#include <type_traits>

#include "kernels/cuda/moe_tile_order.cuh"

// What the copy engine brings to a block's shared memory and takes from it: the bringing warp and the storing warp.
namespace k3::cuda {

// Picks side by side in global memory as boxes, the last a small one where that is enough.
struct PickBoxes {
  int count, whole;
  __device__ __forceinline__ explicit PickBoxes(int picks)
      : count((picks + kTileBoxPicks - 1) / kTileBoxPicks),
        whole((picks + kTileBoxPicks - kTileBoxFew - 1) / kTileBoxPicks) {}
  __device__ __forceinline__ int bytes() const {
    return (whole * kTileBoxPicks + (count - whole) * kTileBoxFew) * 2 * kTileDepth;
  }
};

// One thread, or where picks are split the warp: has tiles' operands brought, by CopyTileStep of the kind of weights.
template <typename Shared>
__device__ __forceinline__ void BringTiles(Shared& s, const typename Shared::Maps& maps, const TileArgs& args) {
  GridDependencyWait();
  const int rank = static_cast<int>(ClusterRank());
  const bool leads = threadIdx.x % 32 == 0;
  const uint64_t policy = args.weights_once ? EvictFirstPolicy() : EvictNormalPolicy();
  std::conditional_t<Shared::kSplitsPicks, TileForesight<Shared>, PlannedTiles<Shared>> tiles(s, args);
  TileTurns turns(s);
  for (int number = 0;; ++number) {
    const int slot = number % kTileTilesAhead;
    const MoeTile tile = tiles.Next();
    if (tile.count == 0) {
      if (leads) {
        s.leaving[slot].count = 0;
        BarrierArrive(&s.listed[slot]);
      }
      break;
    }
    const int steps = ((tile.up ? args.width : args.inner) + kTileDepth - 1) / kTileDepth;
    for (int step = 0; step < steps; ++step) {
      const int stage = turns.Next();
      if (leads) {
        if (step == 0) s.tile[stage] = tile;
        CopyTileStep(s, maps, args, tile, rank, step, stage, policy);
      }
      tiles.Step(step, steps);
    }
    // The space for the results.
    const int stage = turns.Next();
    if (leads) {
      s.leaving[slot] = tile;
      s.leaving_stage[slot] = stage;
      BarrierArrive(&s.listed[slot]);
      BarrierArrive(&s.full[stage]);
    }
    if (!tile.up) {
      const int second = turns.Next();
      if (leads) BarrierArrive(&s.full[second]);
    }
  }
  const int stage = turns.Next();
  if (leads) {
    s.tile[stage].count = 0;
    BarrierArrive(&s.full[stage]);
  }
}

// A warpgroup's results from its space to where they belong; the leading lane's copies are under way at the end. One
// warp.
template <typename Results>
__device__ __forceinline__ void SendResults(const unsigned char* space, const CUtensorMap& results, bf16* to, int width,
                                            int first, int begin, int count, uint64_t policy) {
  constexpr int kPieces = Results::kBoxColumns / 8;
  const int lane = threadIdx.x % 32, whole = count / kTileBoxOut * kTileBoxOut;
#pragma unroll
  for (int box = 0; box < Results::kBoxes; ++box, first += Results::kBoxColumns, space += Results::kBoxBytes) {
    if (first >= width) break;
    if (lane == 0) {
      for (int r = 0; r < whole; r += kTileBoxOut) {
        CopyTensor3Out(&results, first, begin + r, 0, space + r * 2 * Results::kBoxColumns, policy);
      }
    }
    // The rest, as the rows after it are another expert's.
    for (int i = lane; i < (count - whole) * kPieces; i += 32) {
      const int row = whole + i / kPieces, piece = i % kPieces;
      if (first + 8 * piece < width) {
        *reinterpret_cast<uint4*>(to + static_cast<int64_t>(begin + row) * width + first + 8 * piece) =
            *reinterpret_cast<const uint4*>(space + Results::At(row, piece));
      }
    }
  }
  if (lane == 0) CopyOutCommit();
}

// The storing warp: takes results away, gives their stages back and counts up tiles that are done.
template <typename Shared>
__device__ __forceinline__ void StoreTiles(Shared& s, const TileMaps& maps, const TileArgs& args) {
  using Up = TileResults<Shared, true>;
  using Down = TileResults<Shared, false>;
  const int lane = threadIdx.x % 32, rank = static_cast<int>(ClusterRank());
  uint32_t phases = 0;  // of `ready`, a bit a barrier
  // y is not read before all of it is there, which is more than the second-level cache holds.
  const uint64_t normal = EvictNormalPolicy(), once = EvictFirstPolicy();
  for (int n = 0;; ++n) {
    const int slot = n % kTileTilesAhead;
    BarrierWait(&s.listed[slot], n / kTileTilesAhead & 1);
    const MoeTile tile = s.leaving[slot];
    const int first_stage = s.leaving_stage[slot];
    if (tile.count == 0) break;
    const TileShare share = ShareOf<Shared::kSplitsPicks>(tile, rank);
    const int begin = tile.begin + share.begin;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int stage = tile.up ? first_stage : (first_stage + group) % Shared::kStages;
      const int bit = 2 * stage + group;
      BarrierWait(&s.ready[stage][group], phases >> bit & 1);
      phases ^= 1u << bit;
      const unsigned char* space = reinterpret_cast<const unsigned char*>(&s.stage[stage]);
      if (tile.up) {
        SendResults<Up>(space + group * Up::kBoxes * Up::kBoxBytes, maps.h_results, args.h, args.inner,
                        tile.first_row / 2 + group * Up::kColumns, begin, share.count, normal);
      } else {
        SendResults<Down>(space, maps.y_results, args.y, args.width, tile.first_row + group * Down::kColumns, begin,
                          share.count, once);
      }
    }
    if (lane == 0) CopyOutWaitRead();
    __syncwarp();
    // For the multiplying warps of this block, at both blocks.
    if (lane < kTilePair * kTileMultiplyThreads / 32) {
      BarrierArriveAt(&s.empty[first_stage], lane / (kTileMultiplyThreads / 32));
      if (!tile.up) {
        BarrierArriveAt(&s.empty[(first_stage + 1) % Shared::kStages], lane / (kTileMultiplyThreads / 32));
      }
    }
    if (tile.up && args.down) {
      FenceGlobalForCopy();  // rows that this lane stored itself, before copies of them
      if (lane == 0) CopyOutWait();
      __syncwarp();
      if (lane == 0) AddRelease(args.plan.up_done + tile.expert, 1);
    }
  }
  if (lane == 0) CopyOutWait();
}

}  // namespace k3::cuda
