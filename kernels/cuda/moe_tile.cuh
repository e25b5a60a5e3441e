#pragma once

#include <type_traits>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/moe_tile_copy.cuh"
#include "kernels/cuda/moe_tile_order.cuh"

// The large expert products' kernel (moe_tile_shared.cuh), and what its multiplying warps do.
namespace k3::cuda {

// The warp's results to `space`, the warpgroup's. `half`: picks whose sums lie in the first half of `sum`.
template <bool kUp, Activation kKind, int kSums>
__device__ __forceinline__ void StageResults(unsigned char* space, const TileArgs& args, int count, int half,
                                             const float (&sum)[kSums]) {
  constexpr int kTogether = kUp ? 4 : 2;  // groups of 8 picks
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  // A lane names the row (pick) lane % 8 of matrix lane / 8.
  unsigned char* to =
      space + (kUp ? ResultAt<kUp>(lane, warp) : ResultAt<kUp>(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    const int rows = min(half, count - pass * half);
    if (rows <= 0) break;
#pragma unroll
    for (int j = 0; j < kTileHalf / 8; j += kTogether) {
      if (8 * j >= rows || pass * kTileHalf / 2 + 4 * j >= kSums) break;
      const float* from = &sum[pass * kTileHalf / 2 + 4 * j];
      uint32_t v[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if constexpr (kUp) {
          v[q] = ActivatePair<kKind>(args.activation, from[4 * q], from[4 * q + 2], from[4 * q + 1], from[4 * q + 3]);
        } else {
          v[q] = PackBf16(from[2 * q], from[2 * q + 1]);
        }
      }
      // May reach into the rows of the next pass, which come later.
      StoreMatrix4Transposed(to + (pass * half + 8 * j) * 2 * kTileOutColumns<kUp>, v);
    }
  }
}

// One warp is done with a stage; both blocks may fill it.
template <typename Shared>
__device__ __forceinline__ void ReleaseStage(Shared& s, int stage) {
  if (threadIdx.x % 32 < kTilePair) BarrierArriveAt(&s.empty[stage], threadIdx.x % 32);
}

// bf16 weights (weight_tiles.h).
struct PlainTileStage {
  static constexpr int kWeightBytes = kTileWeightRows * 128, kRegisters = 216;
  alignas(1024) unsigned char w[kTileDepth / kWeightTileInputs][2 * kWeightTileElements];
  alignas(1024) unsigned char x[kMoeTilePicks * 128];
};
using PlainTileShared = TileShared<PlainTileStage, 4, TileMaps>;

__device__ __forceinline__ void CopyTileWeights(PlainTileShared& s, const TileMaps&, const TileArgs& args,
                                                const MoeTile& tile, int step, int stage, uint64_t policy) {
  const int tiles_down = WeightTilesDown(tile.up ? 2 * args.inner : args.width);
  const int steps = WeightTilesAcross(tile.up ? args.width : args.inner) / 2;
  // Beyond the last there may be rows of the second block, whose results nobody takes.
  const int down = min(tile.first_row / kTileWeightRows, tiles_down - 1);
  const bf16* const from =
      (tile.up ? args.w13 : args.w2) +
      ((tile.expert * static_cast<int64_t>(tiles_down) + down) * steps + step) * (kTileWeightRows * kTileDepth);
  CopyBulkHinted(s.stage[stage].w, from, PlainTileStage::kWeightBytes, &s.full[stage], policy);
}

// All steps of a tile of up to N + M picks; the sums of the last M start at kTileHalf / 2.
template <int N, int M, int kSums>
__device__ __forceinline__ void MultiplySteps(PlainTileShared& s, int steps, int group, int& n, float (&sum)[kSums]) {
  for (int step = 0; step < steps; ++step, ++n) {
    const int stage = n % s.kStages;
    BarrierWait(&s.full[stage], n / s.kStages & 1);
    const unsigned char* x = s.stage[stage].x;
    GroupMmaFence();
#pragma unroll
    for (int k = 0; k < kTileDepth / 16; ++k) {
      const uint64_t w = SharedOperand64(s.stage[stage].w[k / 2] + TiledRowsOn(64) * 2 * group + 32 * (k % 2));
      GroupMma<N>(sum, w, SharedOperand(x + 32 * k), step > 0 || k > 0);
      if constexpr (M > 0) {
        GroupMma<M, false, false, kTileHalf / 2>(sum, w, SharedOperand(x + N * 128 + 32 * k), step > 0 || k > 0);
      }
    }
    GroupMmaCommit();
    GroupMmaWait<1>();
    // The products of the step before are done with its stage.
    if (step > 0) ReleaseStage(s, (n - 1) % s.kStages);
  }
  GroupMmaWait<0>();
  ReleaseStage(s, (n - 1) % s.kStages);
}

// All steps of a tile with columns in kHalves pieces; returns how many the first has.
template <int kHalves, int kSums>
__device__ __forceinline__ int MultiplyTile(PlainTileShared& s, int steps, int count, int group, int& n,
                                            float (&sum)[kSums]) {
  int half = kTileHalf;
  const auto multiply = [&](auto first, auto second) {
    constexpr int kFirst = decltype(first)::value, kSecond = decltype(second)::value;
    MultiplySteps<kFirst, kSecond>(s, steps, group, n, sum);
    if constexpr (kSecond > 0) half = kFirst;
  };
#define K3_TILE_CASE(N, M)                                                        \
  if (count <= N + M) {                                                           \
    multiply(std::integral_constant<int, N>(), std::integral_constant<int, M>()); \
  } else
  if constexpr (kHalves == 1) {
    K3_TILE_CASE(32, 0)
    K3_TILE_CASE(64, 0)
    K3_TILE_CASE(96, 0)
    K3_TILE_CASE(128, 0)
    K3_TILE_CASE(160, 0)
    K3_TILE_CASE(192, 0)
    K3_TILE_CASE(208, 0)
    K3_TILE_CASE(216, 0)
    K3_TILE_CASE(224, 0)
    K3_TILE_CASE(232, 0)
    K3_TILE_CASE(240, 0)
    K3_TILE_CASE(248, 0) { multiply(std::integral_constant<int, 256>(), std::integral_constant<int, 0>()); }
  } else {
    K3_TILE_CASE(136, 128)
    K3_TILE_CASE(136, 136)
    K3_TILE_CASE(144, 136)
    K3_TILE_CASE(144, 144)
    K3_TILE_CASE(152, 144)
    K3_TILE_CASE(152, 152)
    K3_TILE_CASE(160, 152) { multiply(std::integral_constant<int, 160>(), std::integral_constant<int, 160>()); }
  }
#undef K3_TILE_CASE
  return half;
}

// One tile whose number of picks asks for columns in one piece (kHalves 1) or two.
template <int kHalves, typename Shared>
__device__ __forceinline__ void WorkTile(Shared& s, const TileArgs& args, bool up, int count, int group, int& n) {
  const int steps = ((up ? args.width : args.inner) + kTileDepth - 1) / kTileDepth;
  constexpr int kSums = kHalves == 1 ? 128 : kMoeTilePicks / 2;
  float sum[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) sum[i] = 0;
  const int half = MultiplyTile<kHalves>(s, steps, count, group, n, sum);
  const int own = up ? n : n + group;  // the turn whose stage is this warpgroup's space
  n += up ? kTileSpaces<true> : kTileSpaces<false>;
  const int stage = own % Shared::kStages;
  BarrierWait(&s.full[stage], own / Shared::kStages & 1);
  unsigned char* space = reinterpret_cast<unsigned char*>(&s.stage[stage]);
  if (!up) {
    StageResults<false, Activation::kSwiglu>(space, args, count, half, sum);
  } else {
    space += group * kTileUpSpace;
    if (args.activation.kind == Activation::kSitu) {
      StageResults<true, Activation::kSitu>(space, args, count, half, sum);
    } else {
      StageResults<true, Activation::kSwiglu>(space, args, count, half, sum);
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
  int n = 0;
  for (;;) {
    BarrierWait(&s.full[n % Shared::kStages], n / Shared::kStages & 1);
    const MoeTile& tile = s.tile[n % Shared::kStages];
    const int count = __shfl_sync(kAllLanes, tile.count, 0);
    if (count == 0) break;
    const bool up = __shfl_sync(kAllLanes, static_cast<int>(tile.up), 0) != 0;
    if (count <= 256) {
      WorkTile<1>(s, args, up, count, group, n);
    } else {
      WorkTile<2>(s, args, up, count, group, n);
    }
  }
}

// Clusters of kTilePair; any grid whose blocks are all resident. What a launch reads but for `rows` was written before
// the launch before.
template <typename Shared>
__global__ void __launch_bounds__(kTileThreads, 1)
    MoeTileKernel(const __grid_constant__ typename Shared::Maps maps, const __grid_constant__ TileArgs args) {
  Shared& s = *DynamicShared<Shared>();
  GridDependencyRelease();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shared::kStages; ++stage) {
      BarrierInit(&s.full[stage], 1);
      BarrierInit(&s.empty[stage], kTilePair * kTileMultiplyThreads / 32);
      BarrierInit(&s.ready[stage][0], 4);
      BarrierInit(&s.ready[stage][1], 4);
    }
    for (int slot = 0; slot < kTileTilesAhead; ++slot) {
      BarrierInit(&s.planned[slot], 1);
      BarrierInit(&s.taken[slot], 1);
      BarrierInit(&s.listed[slot], 1);
    }
    BarrierInitFence();
  }
  __syncwarp();
  ClusterArrive();
  ClusterWait();
  if (threadIdx.x >= kTileMultiplyThreads) {
    GiveRegisters<Shared::kOtherRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == kTilePlanWarp) {
      PlanTiles(s, args);
    } else if (warp == kTileCopyWarp) {
      if (threadIdx.x % 32 == 0) CopyTiles(s, maps, args);
    } else if (warp == kTileStoreWarp) {
      StoreTiles(s, maps, args);
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
