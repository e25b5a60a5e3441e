#pragma once

#include <type_traits>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/moe_tile_copy.cuh"
#include "kernels/cuda/moe_tile_gather.cuh"

// The large expert products' kernel (moe_tile_shared.cuh), and what its multiplying warps do.
namespace k3::cuda {

// The warp's results to `space`, the warpgroup's. The second half of `sum` is of other picks, `half` further, or where
// picks are split of other rows of weights.
template <typename Shared, bool kUp, Activation kKind, int kSums>
__device__ __forceinline__ void StageResults(unsigned char* space, const TileArgs& args, int count, int half,
                                             const float (&sum)[kSums]) {
  using Results = TileResults<Shared, kUp>;
  constexpr int kTogether = kUp ? 4 : 2;  // groups of 8 picks
  constexpr int kSecond = Shared::kSplitsPicks ? kSums / 2 : kTileHalf / 2;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int rows = Shared::kSplitsPicks ? count : min(half, count - part * half);
    if (rows <= 0) break;
    // A lane names the row (pick) lane % 8 of matrix lane / 8.
    unsigned char* to = space + (Shared::kSplitsPicks ? 0 : part * half * 2 * Results::kBoxColumns);
    if constexpr (kUp) {
      to += Results::At(lane, (Shared::kSplitsPicks ? 4 * part : 0) + warp);
    } else {
      to += (Shared::kSplitsPicks ? part * Results::kBoxBytes : 0) +
            Results::At(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
    }
#pragma unroll
    for (int j = 0; j < kTileHalf / 8; j += kTogether) {
      if (8 * j >= rows || part * kSecond + 4 * j >= (Shared::kSplitsPicks && part == 0 ? kSecond : kSums)) break;
      const float* from = &sum[part * kSecond + 4 * j];
      uint32_t v[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if constexpr (kUp) {
          v[q] = ActivatePair<kKind>(args.activation, from[4 * q], from[4 * q + 2], from[4 * q + 1], from[4 * q + 3]);
        } else {
          v[q] = PackBf16(from[2 * q], from[2 * q + 1]);
        }
      }
      // May reach into the rows of the next part, which come later.
      StoreMatrix4Transposed(to + 8 * j * 2 * Results::kBoxColumns, v);
    }
  }
}

// One warp is done with a stage; both blocks may fill it.
template <typename Shared>
__device__ __forceinline__ void ReleaseStage(Shared& s, int stage) {
  if (threadIdx.x % 32 < kTilePair) BarrierArriveAt(&s.empty[stage], threadIdx.x % 32);
}

// bf16 weights (weight_tiles.h): a warpgroup has 128 rows of them.
struct PlainTileStage {
  static constexpr bool kSplitsPicks = true;
  static constexpr int kPieceBytes = kWeightTileRows * 2 * kTileDepth;  // side by side in memory
  static constexpr int kWeightBytes = kTilePair * kPieceBytes, kRegisters = 200;
  alignas(1024) unsigned char w[kTilePair][kPieceBytes];
  alignas(1024) unsigned char x[kMoeTilePicks / kTilePair * 2 * kTileDepth];
};
using PlainTileShared = TileShared<PlainTileStage, 4, TileMaps>;

// Each block brings one piece of the weights to both.
__device__ __forceinline__ void CopyTileStep(PlainTileShared& s, const TileMaps& maps, const TileArgs& args,
                                             const MoeTile& tile, int rank, int step, int stage, uint64_t policy) {
  const TileShare share = ShareOf<true>(tile, rank);
  const PickBoxes boxes(tile.up ? 0 : share.count);
  BarrierArriveExpect(&s.full[stage], PlainTileStage::kWeightBytes + boxes.bytes());
  const int tiles_down = WeightTilesDown(tile.up ? 2 * args.inner : args.width);
  const int steps = WeightTilesAcross(tile.up ? args.width : args.inner) / 2;
  // Beyond the last there may be rows of the second warpgroup, whose results nobody takes.
  const int down = min(tile.first_row / kWeightTileRows + rank, tiles_down - 1);
  const bf16* const from =
      (tile.up ? args.w13 : args.w2) +
      ((tile.expert * static_cast<int64_t>(tiles_down) + down) * steps + step) * (PlainTileStage::kPieceBytes / 2);
  CopyBulkMulticast(s.stage[stage].w[rank], from, PlainTileStage::kPieceBytes, &s.full[stage], (1 << kTilePair) - 1,
                    policy);
  for (int box = 0; box < boxes.count; ++box) {
    CopyTensor3(s.stage[stage].x + box * kTileBoxPicks * 2 * kTileDepth, box < boxes.whole ? &maps.h : &maps.few_h,
                step * kTileDepth, tile.begin + share.begin + box * kTileBoxPicks, 0, &s.full[stage]);
  }
}

// All steps of a tile of up to N picks a block; the sums of the warpgroup's last 64 rows start at kSums / 2.
template <int N, int kSums>
__device__ __forceinline__ void MultiplySteps(PlainTileShared& s, int steps, bool gathered, int group, int& n,
                                              float (&sum)[kSums]) {
  for (int step = 0; step < steps; ++step, ++n) {
    const int stage = n % s.kStages;
    BarrierWait(&s.full[stage], n / s.kStages & 1);
    if (gathered) FenceSharedForMatrix();
    const unsigned char* x = s.stage[stage].x;
    GroupMmaFence();
    const auto multiply = [&](const unsigned char* w, auto first) {
#pragma unroll
      for (int k = 0; k < kTileDepth / 16; ++k) {
        GroupMma<N, false, false, decltype(first)::value>(
            sum, SharedOperand64(w + k / 2 * 2 * kWeightTileElements + 32 * (k % 2)), SharedOperand(x + 32 * k),
            step > 0 || k > 0);
      }
    };
    multiply(s.stage[stage].w[group], std::integral_constant<int, 0>());
    multiply(s.stage[stage].w[group] + TiledRowsOn(64) * 2, std::integral_constant<int, kSums / 2>());
    GroupMmaCommit();
    GroupMmaWait<1>();
    // The products of the step before are done with its stage.
    if (step > 0) ReleaseStage(s, (n - 1) % s.kStages);
  }
  GroupMmaWait<0>();
  ReleaseStage(s, (n - 1) % s.kStages);
}

// All steps of a tile. What it returns has a meaning only where picks are not split.
template <bool kWide, int kSums>
__device__ __forceinline__ int MultiplyTile(PlainTileShared& s, int steps, bool up, int count, int group, int& n,
                                            float (&sum)[kSums]) {
  const auto multiply = [&](auto width) { MultiplySteps<decltype(width)::value>(s, steps, up, group, n, sum); };
#define K3_TILE_CASE(N)                         \
  if (count <= N) {                             \
    multiply(std::integral_constant<int, N>()); \
  } else
  if constexpr (!kWide) {
    K3_TILE_CASE(16)
    K3_TILE_CASE(32)
    K3_TILE_CASE(64)
    K3_TILE_CASE(96)
    K3_TILE_CASE(104)
    K3_TILE_CASE(112)
    K3_TILE_CASE(120) { multiply(std::integral_constant<int, 128>()); }
  } else {
    K3_TILE_CASE(136)
    K3_TILE_CASE(144)
    K3_TILE_CASE(152) { multiply(std::integral_constant<int, 160>()); }
  }
#undef K3_TILE_CASE
  return 0;
}

// One tile, kWide: of more picks than most have.
template <bool kWide, typename Shared>
__device__ __forceinline__ void WorkTile(Shared& s, const TileArgs& args, bool up, int count, int group, int& n) {
  const int steps = ((up ? args.width : args.inner) + kTileDepth - 1) / kTileDepth;
  constexpr int kSums = kWide ? kMoeTilePicks / 2 : 128;
  float sum[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) sum[i] = 0;
  const int half = MultiplyTile<kWide>(s, steps, up, count, group, n, sum);
  const int own = up ? n : n + group;  // the turn whose stage is this warpgroup's space
  n += up ? TileResults<Shared, true>::kStages : TileResults<Shared, false>::kStages;
  const int stage = own % Shared::kStages;
  BarrierWait(&s.full[stage], own / Shared::kStages & 1);
  unsigned char* space = reinterpret_cast<unsigned char*>(&s.stage[stage]);
  if (!up) {
    StageResults<Shared, false, Activation::kSwiglu>(space, args, count, half, sum);
  } else {
    space += group * TileResults<Shared, true>::kBoxes * TileResults<Shared, true>::kBoxBytes;
    if (args.activation.kind == Activation::kSitu) {
      StageResults<Shared, true, Activation::kSitu>(space, args, count, half, sum);
    } else {
      StageResults<Shared, true, Activation::kSwiglu>(space, args, count, half, sum);
    }
  }
  FenceSharedForCopy();
  __syncwarp();
  if (threadIdx.x % 32 == 0) BarrierArrive(&s.ready[stage][group]);
}

template <typename Shared>
__device__ __forceinline__ void MultiplyTiles(Shared& s, const TileArgs& args) {
  // Through a shuffle, so that the compiler knows it to be one value per warp: matrix products in branches that may
  // diverge are serialized.
  const int group = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  const int rank = static_cast<int>(ClusterRank());
  int n = 0;
  for (;;) {
    BarrierWait(&s.full[n % Shared::kStages], n / Shared::kStages & 1);
    const MoeTile& tile = s.tile[n % Shared::kStages];
    if (__shfl_sync(kAllLanes, tile.count, 0) == 0) break;
    const int count = __shfl_sync(kAllLanes, ShareOf<Shared::kSplitsPicks>(tile, rank).count, 0);
    const bool up = __shfl_sync(kAllLanes, static_cast<int>(tile.up), 0) != 0;
    if (count <= Shared::kPicks / 5 * 4) {
      WorkTile<false>(s, args, up, count, group, n);
    } else {
      WorkTile<true>(s, args, up, count, group, n);
    }
  }
}

// Clusters of kTilePair; any grid whose blocks are all resident.
template <typename Shared>
__global__ void __launch_bounds__(kTileThreads, 1)
    MoeTileKernel(const __grid_constant__ typename Shared::Maps maps, const __grid_constant__ TileArgs args) {
  Shared& s = *DynamicShared<Shared>();
  GridDependencyRelease();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shared::kStages; ++stage) {
      BarrierInit(&s.full[stage], 1 + Shared::kGatherThreads);
      BarrierInit(&s.empty[stage], kTilePair * kTileMultiplyThreads / 32);
      BarrierInit(&s.ready[stage][0], 4);
      BarrierInit(&s.ready[stage][1], 4);
    }
    for (int slot = 0; slot < Shared::kPlanned; ++slot) {
      BarrierInit(&s.planned[slot], Shared::kSplitsPicks ? 32 : 1);
      BarrierInit(&s.taken[slot], Shared::kSplitsPicks ? Shared::kGatherThreads : 1);
    }
    for (int slot = 0; slot < kTileTilesAhead; ++slot) BarrierInit(&s.listed[slot], 1);
    BarrierInitFence();
  }
  __syncwarp();
  ClusterArrive();
  ClusterWait();
  if (threadIdx.x >= kTileMultiplyThreads) {
    GiveRegisters<Shared::kOtherRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == kTileBringWarp) {
      if (Shared::kSplitsPicks || threadIdx.x % 32 == 0) BringTiles(s, maps, args);
    } else if (warp == kTileStoreWarp) {
      StoreTiles(s, maps, args);
    } else if constexpr (Shared::kSplitsPicks) {
      GatherTiles(s, args);
    } else if (warp == kTileGatherWarp) {
      PlanTiles(s, args);
    }
  } else {
    TakeRegisters<Shared::kMultiplyRegisters>();
    MultiplyTiles(s, args);
  }
  // The other block may still arrive at barriers of this one.
  __syncwarp();
  ClusterArrive();
  ClusterWait();
}

}  // namespace k3::cuda
