#pragma once

#include "kernels/cuda/moe_tile_shared.cuh"

// What comes to a block's shared memory and leaves it: the copying thread and the storing warp.
namespace k3::cuda {

// One thread. Weights by CopyTileWeights of the kind of weights.
template <typename Shared>
__device__ __forceinline__ void CopyTiles(Shared& s, const typename Shared::Maps& maps, const TileArgs& args) {
  const int rank = static_cast<int>(ClusterRank());
  const uint64_t policy = args.weights_once ? EvictFirstPolicy() : EvictNormalPolicy();
  int n = 0;  // turns of the ring so far
  bool waited = false;
  const auto next = [&] {
    const int stage = n % Shared::kStages;
    BarrierWait(&s.empty[stage], (n / Shared::kStages & 1) ^ 1);
    ++n;
    return stage;
  };
  for (int number = 0;; ++number) {
    const int slot = number % kTileTilesAhead;
    BarrierWait(&s.planned[slot], number / kTileTilesAhead & 1);
    const MoeTile tile = s.plan[slot];
    BarrierArrive(&s.taken[slot]);
    if (tile.count == 0) {
      s.leaving[slot].count = 0;
      BarrierArrive(&s.listed[slot]);
      break;
    }
    if (tile.needs > 0) FenceGlobalForCopy();
    const int steps = ((tile.up ? args.width : args.inner) + kTileDepth - 1) / kTileDepth;
    const CUtensorMap& picks = tile.up ? maps.rows : maps.h;
    const CUtensorMap& few_picks = tile.up ? maps.few_rows : maps.few_h;
    // The last box is a small one where that is enough.
    const int boxes = (tile.count + kTileBoxPicks - 1) / kTileBoxPicks;
    const int whole = (tile.count + kTileBoxPicks - kTileBoxFew - 1) / kTileBoxPicks;
    const int bytes = Shared::kWeightBytes + (whole * kTileBoxPicks + (boxes - whole) * kTileBoxFew) * 128;
    const auto copy_weights = [&](int step, int stage) {
      if (step == 0) s.tile[stage] = tile;
      BarrierArriveExpect(&s.full[stage], bytes);
      CopyTileWeights(s, maps, args, tile, step, stage, policy);
    };
    const auto copy_picks = [&](int step, int stage) {
      for (int box = rank; box < boxes; box += kTilePair) {
        const int pick = box * kTileBoxPicks;
        CopyTensor3Multicast(s.stage[stage].x + pick * 128, box < whole ? &picks : &few_picks, step * kTileDepth,
                             tile.begin + pick, 0, &s.full[stage], (1 << kTilePair) - 1);
      }
    };
    int step = 0;
    if (!waited) {
      // Weights of the first tile need not wait for the launch before. Their stages are taken before that wait: of few
      // picks the other block may bring all, whereupon multipliers give stages back.
      const int early = min(steps, Shared::kStages);
      for (int i = 0; i < early; ++i) copy_weights(i, next());
      GridDependencyWait();
      waited = true;
      for (; step < early; ++step) copy_picks(step, step);
    }
    for (; step < steps; ++step) {
      const int stage = next();
      copy_weights(step, stage);
      copy_picks(step, stage);
    }
    // The space for the results.
    const int stage = next();
    s.leaving[slot] = tile;
    s.leaving_stage[slot] = stage;
    BarrierArrive(&s.listed[slot]);
    BarrierArrive(&s.full[stage]);
    if (!tile.up) BarrierArrive(&s.full[next()]);
  }
  if (!waited) GridDependencyWait();
  const int stage = next();
  s.tile[stage].count = 0;
  BarrierArrive(&s.full[stage]);
}

// Byte of a piece of 16 bytes of a pick's results, a row of kTileOutColumns: swizzled as the copy engine has it.
template <bool kUp>
__device__ __forceinline__ int ResultAt(int row, int piece) {
  return row * 2 * kTileOutColumns<kUp> + ((piece ^ (kUp ? row / 2 % 4 : row % 8)) << 4);
}

// A warpgroup's results from its space to where they belong; the leading lane's copies are under way at the end. One
// warp.
template <bool kUp>
__device__ __forceinline__ void SendResults(const unsigned char* space, const CUtensorMap& results, bf16* to, int width,
                                            int first, int begin, int count, uint64_t policy) {
  if (first >= width) return;
  constexpr int kPieces = kTileOutColumns<kUp> / 8;
  const int lane = threadIdx.x % 32, whole = count / kTileBoxOut * kTileBoxOut;
  if (lane == 0) {
    for (int r = 0; r < whole; r += kTileBoxOut) {
      CopyTensor3Out(&results, first, begin + r, 0, space + r * 2 * kTileOutColumns<kUp>, policy);
    }
    CopyOutCommit();
  }
  // The rest, as the rows after it are another expert's.
  for (int i = lane; i < (count - whole) * kPieces; i += 32) {
    const int row = whole + i / kPieces, piece = i % kPieces;
    if (first + 8 * piece < width) {
      *reinterpret_cast<uint4*>(to + static_cast<int64_t>(begin + row) * width + first + 8 * piece) =
          *reinterpret_cast<const uint4*>(space + ResultAt<kUp>(row, piece));
    }
  }
}

// The storing warp: takes results away, gives their stages back and counts up tiles that are done.
template <typename Shared>
__device__ __forceinline__ void StoreTiles(Shared& s, const TileMaps& maps, const TileArgs& args) {
  const int lane = threadIdx.x % 32;
  uint32_t phases = 0;  // of `ready`, a bit a barrier
  // y is not read before all of it is there, which is more than the second-level cache holds.
  const uint64_t normal = EvictNormalPolicy(), once = EvictFirstPolicy();
  for (int n = 0;; ++n) {
    const int slot = n % kTileTilesAhead;
    BarrierWait(&s.listed[slot], n / kTileTilesAhead & 1);
    const MoeTile tile = s.leaving[slot];
    const int first_stage = s.leaving_stage[slot];
    if (tile.count == 0) break;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int stage = tile.up ? first_stage : (first_stage + group) % Shared::kStages;
      const int bit = 2 * stage + group;
      BarrierWait(&s.ready[stage][group], phases >> bit & 1);
      phases ^= 1u << bit;
      const unsigned char* space = reinterpret_cast<const unsigned char*>(&s.stage[stage]);
      if (tile.up) {
        SendResults<true>(space + group * kTileUpSpace, maps.h_results, args.h, args.inner,
                          tile.first_row / 2 + group * kTileOutColumns<true>, tile.begin, tile.count, normal);
      } else {
        SendResults<false>(space, maps.y_results, args.rows, args.width,
                           tile.first_row + group * kTileOutColumns<false>, tile.begin, tile.count, once);
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
