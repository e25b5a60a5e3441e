#pragma once

#include <cuda.h>

#include "kernels/cuda/group_mma.cuh"
#include "kernels/cuda/moe.cuh"

// Expert products for many picks an expert: tiles of 128 picks x 256 weight rows, bf16, warpgroup products with both
// operands in shared memory. One resident block a multiprocessor takes tile after tile. Four warps copy: the picks'
// rows, which lie anywhere, 16 bytes a thread, the weights as one box of the copy engine. Two warpgroups multiply, 64
// picks each. The copies of the next tile run while the results of the last one are stored.
namespace k3::cuda {

constexpr int kTileMultiplyThreads = 256;
constexpr int kTileCopyThreads = 128;
constexpr int kTileThreads = kTileMultiplyThreads + kTileCopyThreads;
constexpr int kTileColumns = 256;  // weight rows
constexpr int kTileDepth = 64;
constexpr int kTileStages = 4;
constexpr int kTileLag = 1;  // copied steps whose arrival a copying thread has not seen yet

struct TileShared {
  alignas(1024) unsigned char x[kTileStages][kMoeTileRows * 128];
  alignas(1024) unsigned char w[kTileStages][kTileColumns * 128];
  uint64_t full[kTileStages];   // every copying thread, and the copy engine
  uint64_t empty[kTileStages];  // every multiplying warp
};

struct TileArgs {
  MoePlan plan;
  int expert_begin, expert_end;  // local experts of this launch
  int in, out;                   // contraction and weight rows of this product; multiples of 32
  ActivationSpec activation;
  Matrix<const bf16> x;  // up: [tokens, in]; down: h [picks, in]
  bf16* y;               // up: h [picks, out / 2]; down: [picks, out]
};

struct MoeTile {
  int expert;
  int begin, count;  // picks
  int first_row;     // of the expert's weights
};

// Tiles are numbered by expert, then weight rows, then picks, so that blocks that run together share weights.
__device__ __forceinline__ bool FindTile(const TileArgs& args, int number, MoeTile& tile) {
  const int* tile_begin = args.plan.tile_begin;
  const int columns = (args.out + kTileColumns - 1) / kTileColumns;
  const int first = tile_begin[args.expert_begin];
  if (number >= (tile_begin[args.expert_end] - first) * columns) return false;
  int low = args.expert_begin, high = args.expert_end - 1;  // the last expert whose first tile is at most `number`
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if ((tile_begin[middle] - first) * columns <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int tiles = tile_begin[low + 1] - tile_begin[low];
  const int local = number - (tile_begin[low] - first) * columns;
  tile.expert = low;
  tile.begin = args.plan.expert_begin[low] + local % tiles * kMoeTileRows;
  tile.count = min(kMoeTileRows, args.plan.expert_begin[low + 1] - tile.begin);
  tile.first_row = local / tiles * kTileColumns;
  return true;
}

template <bool kUp>
__device__ __forceinline__ void CopyTiles(TileShared& s, const CUtensorMap& weights, const TileArgs& args) {
  constexpr int kRowStep = kTileCopyThreads / 8;
  constexpr int kRows = kMoeTileRows / kRowStep;
  const int thread = threadIdx.x - kTileMultiplyThreads;
  // This thread copies 16 bytes of each of kRows rows a step.
  const int piece = thread % 8, copy_row = thread / 8;
  const int steps = (args.in + kTileDepth - 1) / kTileDepth;
  int n = 0;  // steps of all tiles so far
  MoeTile tile;
  for (int number = blockIdx.x; FindTile(args, number, tile); number += gridDim.x) {
    const bf16* x[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int pick = tile.begin + min(copy_row + i * kRowStep, tile.count - 1);
      x[i] = args.x.Row(kUp ? args.plan.token_of[pick] : pick) + 8 * piece;
    }
    for (int step = 0; step < steps; ++step, ++n) {
      const int stage = n % kTileStages, k = step * kTileDepth;
      BarrierWait(&s.empty[stage], (n / kTileStages & 1) ^ 1);
      if (thread == 0) {
        BarrierArriveExpect(&s.full[stage], kTileColumns * 128);
        CopyTensor3(s.w[stage], &weights, k, tile.first_row, tile.expert - args.expert_begin, &s.full[stage]);
      }
      const bool inside = k + 8 * piece < args.in;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int r = copy_row + i * kRowStep;
        const bool valid = inside && r < tile.count;
        CopyAsync16(s.x[stage] + Swizzle128(r, piece), valid ? x[i] + k : args.x.data, valid);
      }
      CopyAsyncCommit();
      if (n < kTileLag) continue;
      CopyAsyncWait<kTileLag>();
      FenceSharedForMatrix();
      BarrierArrive(&s.full[(n - kTileLag) % kTileStages]);
    }
  }
  CopyAsyncWait<0>();
  FenceSharedForMatrix();
  for (int late = max(0, n - kTileLag); late < n; ++late) BarrierArrive(&s.full[late % kTileStages]);
}

// Of four lanes that hold v[0..3] each, lane t gets the four values v[t].
__device__ __forceinline__ void TransposeQuad(uint32_t (&v)[4], int t) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = (t & distance) != 0;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int a = distance == 1 ? 2 * pair : pair, b = a + distance;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? v[a] : v[b], distance);
      (upper ? v[a] : v[b]) = got;
    }
  }
}

template <bool kUp>
__device__ __forceinline__ void StoreTile(const TileArgs& args, const MoeTile& tile,
                                          const float (&sum)[kTileColumns / 2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int kPieces = kUp ? kTileColumns / 16 : kTileColumns / 8;  // 8 results of a row each
  const int width = kUp ? args.out / 2 : args.out;
  const int first = kUp ? tile.first_row / 2 : tile.first_row;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = threadIdx.x / 32 * 16 + g + 8 * i;
    bf16* to = args.y + static_cast<int64_t>(tile.begin + r) * width + first + 8 * t;
#pragma unroll
    for (int j = 0; j < kPieces; j += 4) {
      uint32_t v[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if constexpr (kUp) {
          const float* gate = &sum[8 * (j + q) + 2 * i];
          const float* up = gate + 4;
          v[q] = PackBf16(Activate(args.activation, gate[0], up[0]), Activate(args.activation, gate[1], up[1]));
        } else {
          v[q] = PackBf16(sum[4 * (j + q) + 2 * i], sum[4 * (j + q) + 2 * i + 1]);
        }
      }
      TransposeQuad(v, t);
      if (r < tile.count && first + 8 * (j + t) < width) {
        *reinterpret_cast<uint4*>(to + 8 * j) = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

template <bool kUp>
__device__ __forceinline__ void MultiplyTiles(TileShared& s, const TileArgs& args) {
  // Through a shuffle, so that the compiler knows it to be one value per warp: matrix products in branches that may
  // diverge are serialized.
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const bool speaks = threadIdx.x % 32 == 0;  // for its warp
  const int steps = (args.in + kTileDepth - 1) / kTileDepth;
  float sum[kTileColumns / 2];
#pragma unroll
  for (int i = 0; i < kTileColumns / 2; ++i) sum[i] = 0;
  int n = 0;
  MoeTile tile;
  for (int number = blockIdx.x; FindTile(args, number, tile); number += gridDim.x) {
    if (64 * group >= tile.count) {  // no picks for this warpgroup
      for (int step = 0; step < steps; ++step, ++n) {
        BarrierWait(&s.full[n % kTileStages], n / kTileStages & 1);
        if (speaks) BarrierArrive(&s.empty[n % kTileStages]);
      }
      continue;
    }
    for (int step = 0; step < steps; ++step, ++n) {
      const int stage = n % kTileStages;
      BarrierWait(&s.full[stage], n / kTileStages & 1);
      GroupMmaFence();
#pragma unroll
      for (int k = 0; k < kTileDepth / 16; ++k) {
        GroupMma<kTileColumns>(sum, SharedOperand(s.x[stage] + 64 * 128 * group + 32 * k),
                               SharedOperand(s.w[stage] + 32 * k), step > 0 || k > 0);
      }
      GroupMmaCommit();
      GroupMmaWait<1>();
      // The products of the step before are done with its stage.
      if (step > 0 && speaks) BarrierArrive(&s.empty[(n - 1) % kTileStages]);
    }
    GroupMmaWait<0>();
    if (speaks) BarrierArrive(&s.empty[(n - 1) % kTileStages]);
    StoreTile<kUp>(args, tile, sum);
  }
}

// `weights`: of the launch's experts, [out, in] an expert, in boxes of kTileColumns rows. Any grid.
template <bool kUp>
__global__ void __launch_bounds__(kTileThreads, 1)
    MoeTileKernel(const __grid_constant__ CUtensorMap weights, TileArgs args) {
  TileShared& s = *DynamicShared<TileShared>();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kTileStages; ++stage) {
      BarrierInit(&s.full[stage], kTileCopyThreads + 1);
      BarrierInit(&s.empty[stage], kTileMultiplyThreads / 32);
    }
    BarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x >= kTileMultiplyThreads) {
    CopyTiles<kUp>(s, weights, args);
  } else {
    MultiplyTiles<kUp>(s, args);
  }
}

// bf16 copies of the MXFP4 rows of experts [expert_begin, expert_end) that have picks; eight elements a thread. Grid
// (blocks over one expert's words, experts).
__global__ void Mxfp4ExpandKernel(const uint8_t* data, const uint8_t* scales, MoePlan plan, int expert_begin,
                                  int64_t words, bf16* to) {
  const int expert = expert_begin + blockIdx.y;
  if (plan.expert_begin[expert + 1] == plan.expert_begin[expert]) return;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t word = expert * words + i;
    const Mxfp4Row row{reinterpret_cast<const uint32_t*>(data) + word, scales + word / 4};
    float values[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) values[e] = row(e);
    StoreFloats<8>(to + (static_cast<int64_t>(blockIdx.y) * words + i) * 8, values);
  }
}

}  // namespace k3::cuda
