#pragma once

#include "kernels/cuda/moe_tile_shared.cuh"

// Which tiles a pair of blocks takes, and when: what the planning warp does.
namespace k3::cuda {

// Tiles of one product are numbered by expert, then weight rows, then picks, so that blocks that run together share
// weights and picks. A warp that asks for every so many-th tile; what it reads of the plan for the next one is on its
// way while the last is copied.
class TileFinder {
 public:
  // `rows`: of an expert's weights.
  __device__ __forceinline__ TileFinder(const TileArgs& args, bool wanted, int rows, int number)
      : args_(args), blocks_((rows + kTilePairRows - 1) / kTilePairRows), number_(number) {
    tiles_ = wanted ? __ldcg(args.plan.tile_begin + args.experts) * blocks_ : 0;
    Look(0);
    Find();
  }
  __device__ __forceinline__ bool has() const { return number_ < tiles_; }
  __device__ __forceinline__ const MoeTile& tile() const { return tile_; }
  __device__ __forceinline__ int expert_tiles() const { return expert_tiles_; }           // picks' tiles of its expert
  __device__ __forceinline__ int tiles_through() const { return expert_tiles_through_; }  // of all up to its expert
  __device__ __forceinline__ void Advance() {
    number_ += gridDim.x / kTilePair;
    Find();
  }

 private:
  __device__ __forceinline__ void Find() {
    if (!has()) return;
    unsigned before;
    // Lane l looks at the first tile of expert_ + l; the last one at most `number_` is asked for.
    while ((before = __ballot_sync(kAllLanes, tile_begin_ * blocks_ <= number_)) == kAllLanes) {
      Look(expert_ + 31);
    }
    const int at = __popc(before) - 1;
    const int first = __shfl_sync(kAllLanes, tile_begin_, at);
    const int end = __shfl_sync(kAllLanes, tile_begin_, at + 1), tiles = end - first;
    const int picks_begin = __shfl_sync(kAllLanes, pick_begin_, at);
    const int picks_end = __shfl_sync(kAllLanes, pick_begin_, at + 1);
    const int local = number_ - first * blocks_;
    const int share = ((picks_end - picks_begin + tiles - 1) / tiles + 15) / 16 * 16;
    tile_.expert = expert_ + at;
    tile_.begin = picks_begin + local % tiles * share;
    tile_.count = min(share, picks_end - tile_.begin);
    tile_.first_row = local / tiles * kTilePairRows + static_cast<int>(ClusterRank()) * kTileWeightRows;
    expert_tiles_ = tiles;
    expert_tiles_through_ = end;
    Look(tile_.expert);
  }
  // The plan may have ended while this launch waited: past the first-level cache.
  __device__ __forceinline__ void Look(int expert) {
    expert_ = expert;
    const int own = min(expert + static_cast<int>(threadIdx.x % 32), args_.experts);
    tile_begin_ = __ldcg(args_.plan.tile_begin + own);
    pick_begin_ = __ldcg(args_.plan.expert_begin + own);
  }

  const TileArgs& args_;
  const int blocks_;
  int number_, tiles_;
  int expert_;                   // of lane 0
  int tile_begin_, pick_begin_;  // of the lane's expert
  MoeTile tile_;
  int expert_tiles_, expert_tiles_through_;
};

// The tiles of a pair of blocks, in their order. A down tile comes when the pair has begun another up tile after the
// turn in which the last of those falls that it reads: pairs then only ever wait for up tiles of turns that all have
// begun, so that none waits for ever.
class TileOrder {
 public:
  __device__ __forceinline__ explicit TileOrder(const TileArgs& args)
      : args_(args),
        pairs_(static_cast<int>(gridDim.x) / kTilePair),
        up_blocks_((2 * args.inner + kTilePairRows - 1) / kTilePairRows),
        // Pairs with one up tile more are to have one down tile less.
        up_(args, args.up, 2 * args.inner, static_cast<int>(blockIdx.x) / kTilePair),
        down_(args, args.down, args.width, pairs_ - 1 - static_cast<int>(blockIdx.x) / kTilePair) {}

  __device__ __forceinline__ bool Next(MoeTile& tile) {
    bool down = down_.has();
    if (down && up_.has()) down = (down_.tiles_through() * up_blocks_ - 1) / pairs_ + 2 <= begun_;
    if (down) {
      tile = down_.tile();
      tile.up = false;
      tile.needs = args_.up ? down_.expert_tiles() * up_blocks_ * kTilePair : 0;
      down_.Advance();
      return true;
    }
    if (!up_.has()) return false;
    tile = up_.tile();
    tile.up = true;
    tile.needs = 0;
    ++begun_;
    up_.Advance();
    return true;
  }

 private:
  const TileArgs& args_;
  const int pairs_, up_blocks_;
  TileFinder up_, down_;
  int begun_ = 0;  // up tiles
};

// The planning warp. Of a down tile it also waits for what the tile reads.
template <typename Shared>
__device__ __forceinline__ void PlanTiles(Shared& s, const TileArgs& args) {
  const bool leads = threadIdx.x % 32 == 0;
  TileOrder order(args);
  MoeTile tile;
  for (int n = 0;; ++n) {
    const int slot = n % kTileTilesAhead;
    if (!order.Next(tile)) tile.count = 0;
    if (leads) {
      if (tile.count > 0 && tile.needs > 0) {
        // An acquire that finds nothing would empty the first-level cache, over and over.
        const uint32_t* const done = args.plan.up_done + tile.expert;
        const uint32_t needs = static_cast<uint32_t>(tile.needs);
        while (LoadRelaxed(done) < needs) __nanosleep(400);
        while (LoadAcquire(done) < needs) {
        }
        FenceGlobalForCopy();
      }
      BarrierWait(&s.taken[slot], (n / kTileTilesAhead & 1) ^ 1);
      s.plan[slot] = tile;
      BarrierArrive(&s.planned[slot]);
    }
    __syncwarp();
    if (tile.count == 0) break;
  }
}

}  // namespace k3::cuda
