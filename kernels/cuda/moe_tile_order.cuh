#pragma once

#include "kernels/cuda/moe_tile_shared.cuh"

// Which tiles a pair of blocks takes, and when.
namespace k3::cuda {

// Tiles of one product are numbered by expert, then weight rows, then picks, so that blocks that run together share
// weights and picks. A warp that asks for ever higher numbers; what it reads of the plan for the next one is on its way
// while the last is copied.
class TileFinder {
 public:
  // `rows`: of an expert's weights; `own_rows`: of a tile's before the calling block's.
  __device__ __forceinline__ TileFinder(const TileArgs& args, bool wanted, int rows, int own_rows)
      : args_(args),
        blocks_((rows + kTilePairRows - 1) / kTilePairRows),
        own_rows_(own_rows),
        tiles_(wanted ? __ldcg(args.plan.tile_begin + args.experts) * blocks_ : 0) {
    Look(0);
  }
  __device__ __forceinline__ int tiles() const { return tiles_; }
  __device__ __forceinline__ const MoeTile& tile() const { return tile_; }
  __device__ __forceinline__ int expert_tiles() const { return expert_tiles_; }           // picks' tiles of its expert
  __device__ __forceinline__ int tiles_through() const { return expert_tiles_through_; }  // of all up to its expert

  // Nothing if there are not so many.
  __device__ __forceinline__ void Find(int number) {
    if (number >= tiles_) return;
    unsigned before;
    // Lane l looks at the first tile of expert_ + l; the last one at most `number` is asked for.
    while ((before = __ballot_sync(kAllLanes, tile_begin_ * blocks_ <= number)) == kAllLanes) {
      Look(expert_ + 31);
    }
    const int at = __popc(before) - 1;
    const int first = __shfl_sync(kAllLanes, tile_begin_, at);
    const int end = __shfl_sync(kAllLanes, tile_begin_, at + 1), tiles = end - first;
    const int picks_begin = __shfl_sync(kAllLanes, pick_begin_, at);
    const int picks_end = __shfl_sync(kAllLanes, pick_begin_, at + 1);
    const int local = number - first * blocks_;
    const int share = ((picks_end - picks_begin + tiles - 1) / tiles + 15) / 16 * 16;
    tile_.expert = expert_ + at;
    tile_.begin = picks_begin + local % tiles * share;
    tile_.count = min(share, picks_end - tile_.begin);
    tile_.first_row = local / tiles * kTilePairRows + own_rows_;
    expert_tiles_ = tiles;
    expert_tiles_through_ = end;
    Look(tile_.expert);
  }

 private:
  // The plan may have ended while this launch waited: past the first-level cache.
  __device__ __forceinline__ void Look(int expert) {
    expert_ = expert;
    const int own = min(expert + static_cast<int>(threadIdx.x % 32), args_.experts);
    tile_begin_ = __ldcg(args_.plan.tile_begin + own);
    pick_begin_ = __ldcg(args_.plan.expert_begin + own);
  }

  const TileArgs& args_;
  const int blocks_, own_rows_, tiles_;
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
  __device__ __forceinline__ TileOrder(const TileArgs& args, int own_rows)
      : args_(args),
        pairs_(static_cast<int>(gridDim.x) / kTilePair),
        up_blocks_((2 * args.inner + kTilePairRows - 1) / kTilePairRows),
        up_number_(static_cast<int>(blockIdx.x) / kTilePair),
        up_(args, args.up, 2 * args.inner, own_rows),
        down_(args, args.down, args.width, own_rows) {
    // Pairs with one up tile more are to have as many down tiles less as take that time, and leave the last rounds of
    // these to the others.
    others_ = pairs_ - up_.tiles() % pairs_;
    const int up_steps = (args.width + kTileDepth - 1) / kTileDepth;
    const int down_steps = (args.inner + kTileDepth - 1) / kTileDepth;
    const int same_time = max(1, up_steps / down_steps);
    rounds_of_all_ = max(0, (down_.tiles() - same_time * others_ + pairs_ - 1) / pairs_);
    up_.Find(up_number_);
    FindDown();
  }

  __device__ __forceinline__ bool Next(MoeTile& tile) {
    const bool ups = up_number_ < up_.tiles(), downs = down_number_ < down_.tiles();
    if (downs && (!ups || (down_.tiles_through() * up_blocks_ - 1) / pairs_ + 2 <= begun_)) {
      tile = down_.tile();
      tile.up = false;
      tile.needs = args_.up ? down_.expert_tiles() * up_blocks_ * kTilePair : 0;
      FindDown();
      return true;
    }
    if (!ups) return false;
    tile = up_.tile();
    tile.up = true;
    tile.needs = 0;
    ++begun_;
    up_.Find(up_number_ += pairs_);
    return true;
  }

 private:
  __device__ __forceinline__ void FindDown() {
    const int own = pairs_ - 1 - static_cast<int>(blockIdx.x) / kTilePair;
    if (round_ < rounds_of_all_) {
      down_number_ = round_ * pairs_ + own;
    } else if (own < others_) {
      down_number_ = rounds_of_all_ * pairs_ + (round_ - rounds_of_all_) * others_ + own;
    } else {
      down_number_ = down_.tiles();
    }
    ++round_;
    down_.Find(down_number_);
  }

  const TileArgs& args_;
  const int pairs_, up_blocks_;
  int up_number_, down_number_;
  TileFinder up_, down_;
  int others_;         // pairs without one up tile more
  int rounds_of_all_;  // of down tiles
  int round_ = 0;
  int begun_ = 0;  // up tiles
};

// Whether what a tile reads is there; one thread. To ask takes a trip to memory.
__device__ __forceinline__ bool InputsThere(const TileArgs& args, const MoeTile& tile) {
  if (tile.needs == 0) return true;
  if (LoadAcquire(args.plan.up_done + tile.expert) < static_cast<uint32_t>(tile.needs)) return false;
  FenceGlobalForCopy();
  return true;
}
__device__ __forceinline__ void WaitForInputs(const TileArgs& args, const MoeTile& tile) {
  if (tile.needs == 0) return;
  // An acquire that finds nothing would empty the first-level cache, over and over.
  while (LoadRelaxed(args.plan.up_done + tile.expert) < static_cast<uint32_t>(tile.needs)) __nanosleep(400);
  while (!InputsThere(args, tile)) {
  }
}

// Tiles as a planning warp finds them, which is ahead of the bringing thread and also waits for their inputs.
template <typename Shared>
__device__ __forceinline__ void PlanTiles(Shared& s, const TileArgs& args) {
  GridDependencyWait();
  const bool leads = threadIdx.x % 32 == 0;
  TileOrder order(args, static_cast<int>(ClusterRank()) * kWeightTileRows);
  MoeTile tile;
  for (int n = 0;; ++n) {
    const int slot = n % Shared::kPlanned;
    if (!order.Next(tile)) tile.count = 0;
    if (leads) {
      if (tile.count > 0) WaitForInputs(args, tile);
      BarrierWait(&s.taken[slot], (n / Shared::kPlanned & 1) ^ 1);
      s.plan[slot] = tile;
      BarrierArrive(&s.planned[slot]);
    }
    __syncwarp();
    if (tile.count == 0) break;
  }
}
template <typename Shared>
class PlannedTiles {
 public:
  __device__ __forceinline__ PlannedTiles(Shared& s, const TileArgs&) : s_(s) {}
  // The next tile, or one without picks; its inputs are there.
  __device__ __forceinline__ MoeTile Next() {
    const int slot = number_ % Shared::kPlanned;
    BarrierWait(&s_.planned[slot], number_++ / Shared::kPlanned & 1);
    const MoeTile tile = s_.plan[slot];
    BarrierArrive(&s_.taken[slot]);
    if (tile.needs > 0) FenceGlobalForCopy();
    return tile;
  }
  __device__ __forceinline__ void Step(int, int) {}

 private:
  Shared& s_;
  int number_ = 0;
};

// The same by the bringing warp itself, beside its steps, for there is no warp to spare where picks are split: while
// the ring is full the coming tile is found, its rows' places are told to the gathering warps and its inputs asked for,
// each a trip to memory.
template <typename Shared>
class TileForesight {
 public:
  __device__ __forceinline__ TileForesight(Shared& s, const TileArgs& args) : s_(s), args_(args), order_(args, 0) {
    Find();
    Tell();
  }
  __device__ __forceinline__ MoeTile Next() {
    const MoeTile tile = coming_;
    if (threadIdx.x % 32 == 0 && !there_ && tile.count > 0) WaitForInputs(args_, tile);
    __syncwarp();
    return tile;
  }
  // `step` of the tile that Next gave is on its way.
  __device__ __forceinline__ void Step(int step, int steps) {
    __syncwarp();
    const int found = min(1, steps - 1), told = min(4, steps - 1), asked = max(told, steps - 3);
    if (step == found) Find();
    if (step == told) Tell();
    if (step == asked && threadIdx.x % 32 == 0) there_ = coming_.count == 0 || InputsThere(args_, coming_);
  }

 private:
  static constexpr int kLaneRows = Shared::kPicks / 32;

  __device__ __forceinline__ void Find() {
    if (!order_.Next(coming_)) coming_.count = 0;
    const TileShare share = ShareOf<true>(coming_, static_cast<int>(ClusterRank()));
    const int* const token = args_.plan.token_of + coming_.begin + share.begin;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int pick = threadIdx.x % 32 + 32 * i;
      token_[i] = coming_.up && pick < share.count ? __ldcg(token + pick) : 0;
    }
  }
  __device__ __forceinline__ void Tell() {
    const int slot = told_ % Shared::kPlanned, lane = threadIdx.x % 32;
    BarrierWait(&s_.taken[slot], (told_++ / Shared::kPlanned & 1) ^ 1);
    const uint32_t row_size = static_cast<uint32_t>(args_.x.ld / 8);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) s_.row[slot][lane + 32 * i] = token_[i] * row_size;
    if (lane == 0) s_.plan[slot] = coming_;
    BarrierArrive(&s_.planned[slot]);
  }

  Shared& s_;
  const TileArgs& args_;
  TileOrder order_;
  MoeTile coming_;
  bool there_ = false;         // what coming_ reads; lane 0
  int told_ = 0;               // tiles
  uint32_t token_[kLaneRows];  // of picks of coming_
};

}  // namespace k3::cuda
