#pragma once

#include "kernels/cuda/moe_tile_shared.cuh"

// The rows of up tiles' picks where blocks split them: scattered over the tokens, and too short for the copy engine,
// which needs longer for each 128 bytes than there is time. Two warps bring them by copies of 16 bytes; of these one
// warp issues one in some 40 cycles.
namespace k3::cuda {

// The gathering warps. They arrive in every turn of the ring, so that none is ever more than a turn behind.
template <typename Shared>
__device__ __forceinline__ void GatherTiles(Shared& s, const TileArgs& args) {
  constexpr int kBatch = 16 * kTileGatherWarps, kBatches = Shared::kPicks / kBatch;
  const int rank = static_cast<int>(ClusterRank());
  // Eight lanes a row, of four rows that follow each other; a batch of rows after the other.
  const int piece = threadIdx.x % 8;
  const int first = 16 * (threadIdx.x / 32 - kTileGatherWarp) + threadIdx.x % 32 / 8 * 4;
  TileTurns turns(s);
  for (int number = 0;; ++number) {
    const int slot = number % Shared::kPlanned;
    BarrierWait(&s.planned[slot], number / Shared::kPlanned & 1);
    const MoeTile tile = s.plan[slot];
    if (tile.count == 0) break;
    uint4 row[kBatches];
#pragma unroll
    for (int i = 0; i < kBatches; ++i) {
      row[i] = *reinterpret_cast<const uint4*>(s.row[slot] + first + i * kBatch);
    }
    BarrierArrive(&s.taken[slot]);
    const int steps = ((tile.up ? args.width : args.inner) + kTileDepth - 1) / kTileDepth;
    const int end = steps + (tile.up ? TileResults<Shared, true>::kStages : TileResults<Shared, false>::kStages);
    const int rows = tile.up ? ShareOf<true>(tile, rank).count - first : 0;
    for (int turn = 0; turn < end; ++turn) {
      const int stage = turns.Next();
      if (turn < steps && rows > 0) {
        const int column = turn * kTileDepth + 8 * piece;
        const bool valid = column < args.width;
        const uint4* const from = reinterpret_cast<const uint4*>(args.x.data + (valid ? column : 0));
        uint32_t to[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = SharedAddress(s.stage[stage].x) + Swizzle128(first + i, piece);
#pragma unroll
        for (int i = 0; i < kBatches; ++i) {
          CopyAsync16If(i * kBatch + 0 < rows, to[0] + i * kBatch * 128, from + row[i].x, valid);
          CopyAsync16If(i * kBatch + 1 < rows, to[1] + i * kBatch * 128, from + row[i].y, valid);
          CopyAsync16If(i * kBatch + 2 < rows, to[2] + i * kBatch * 128, from + row[i].z, valid);
          CopyAsync16If(i * kBatch + 3 < rows, to[3] + i * kBatch * 128, from + row[i].w, valid);
        }
      }
      BarrierArriveCopied(&s.full[stage]);
    }
  }
  BarrierArriveCopied(&s.full[turns.Next()]);
}

}  // namespace k3::cuda
