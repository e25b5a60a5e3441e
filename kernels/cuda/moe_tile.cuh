#pragma once

#include <cuda.h>

#include <type_traits>

#include "kernels/cuda/group_mma.cuh"
#include "kernels/cuda/moe.cuh"
#include "kernels/cuda/mxfp8.cuh"

// Expert products for many picks an expert, bf16, warpgroup products with both operands in shared memory. The weights
// are the 64-row side (128 rows a block, two multiplying warpgroups), an expert's picks the other, whose width fits
// their number to within 16: a weight is read once for up to 320 picks, and little is multiplied for nothing. The copy
// engine brings both; the picks' rows were laid side by side before.
//
// Blocks work in pairs, clusters of two, on neighbouring rows of weights for the same picks, of which each brings every
// other box to both: what comes from the second-level cache is a third less, and that is power, which limits the clock.
//
// Resident pairs take every so many-th tile. Besides a tile's steps the ring of stages has one more turn a tile, in
// which the stage is the space where results are turned from weight-major to pick-major; meanwhile the other stages
// fill for the next tile.
namespace k3::cuda {

constexpr int kTileMultiplyThreads = 256;
constexpr int kTileThreads = kTileMultiplyThreads + 128;  // the first of the last four warps copies
constexpr int kTileWeightRows = 128;
constexpr int kTilePair = 2;  // blocks
constexpr int kTilePairRows = kTilePair * kTileWeightRows;
constexpr int kTileDepth = 64;
constexpr int kTileStages = 4;
constexpr int kTileBoxPicks = 32;  // of one copy
constexpr int kTileHalf = kMoeTilePicks / 2;

struct MoeTile {
  int expert;
  int begin, count;  // picks; no picks: the end
  int first_row;     // of the expert's weights, for the calling block
};

struct TileStage {
  alignas(1024) unsigned char w[kTileWeightRows * 128];
  alignas(1024) unsigned char x[kMoeTilePicks * 128];
};

struct TileShared {
  TileStage stage[kTileStages];
  uint64_t full[kTileStages];   // the copying thread, and the copy engine
  uint64_t empty[kTileStages];  // every multiplying warp of both blocks
  MoeTile tile[kTileStages];    // at the stage of its first step
};

struct TileArgs {
  MoePlan plan;
  int expert_begin, expert_end;  // local experts of this launch
  int in, out;                   // contraction and weight rows of this product; multiples of 32
  ActivationSpec activation;
  bf16* y;  // up: h [picks, out / 2]; down: [picks, out]
};

// Tiles are numbered by expert, then weight rows, then picks, so that blocks that run together share weights and
// picks.
__device__ __forceinline__ bool FindTile(const TileArgs& args, int number, MoeTile& tile) {
  // The plan may have ended while this launch waited: past the first-level cache.
  const auto tile_begin = [&](int e) { return __ldcg(args.plan.tile_begin + e); };
  const auto pick_begin = [&](int e) { return __ldcg(args.plan.expert_begin + e); };
  const int blocks = (args.out + kTilePairRows - 1) / kTilePairRows;
  const int first = tile_begin(args.expert_begin);
  if (number >= (tile_begin(args.expert_end) - first) * blocks) return false;
  int low = args.expert_begin, high = args.expert_end - 1;  // the last expert whose first tile is at most `number`
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if ((tile_begin(middle) - first) * blocks <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int tiles = tile_begin(low + 1) - tile_begin(low);
  const int local = number - (tile_begin(low) - first) * blocks;
  const int picks_begin = pick_begin(low), picks_end = pick_begin(low + 1);
  const int share = ((picks_end - picks_begin + tiles - 1) / tiles + 15) / 16 * 16;
  tile.expert = low;
  tile.begin = picks_begin + local % tiles * share;
  tile.count = min(share, picks_end - tile.begin);
  tile.first_row = local / tiles * kTilePairRows + static_cast<int>(ClusterRank()) * kTileWeightRows;
  return true;
}

// One thread.
__device__ __forceinline__ void CopyTiles(TileShared& s, const CUtensorMap& weights, const CUtensorMap& picks,
                                          const TileArgs& args) {
  const int steps = (args.in + kTileDepth - 1) / kTileDepth;
  int n = 0;  // turns of the ring so far
  bool waited = false;
  const auto next = [&] {
    const int stage = n % kTileStages;
    BarrierWait(&s.empty[stage], (n / kTileStages & 1) ^ 1);
    ++n;
    return stage;
  };
  const int rank = static_cast<int>(ClusterRank());
  MoeTile tile;
  for (int number = blockIdx.x / kTilePair; FindTile(args, number, tile); number += gridDim.x / kTilePair) {
    const int boxes = (tile.count + kTileBoxPicks - 1) / kTileBoxPicks;
    const auto copy_weights = [&](int step, int stage) {
      if (step == 0) s.tile[stage] = tile;
      BarrierArriveExpect(&s.full[stage], kTileWeightRows * 128 + boxes * kTileBoxPicks * 128);
      CopyTensor3(s.stage[stage].w, &weights, step * kTileDepth, tile.first_row, tile.expert - args.expert_begin,
                  &s.full[stage]);
    };
    // Weights need not wait for the launch before.
    const int ahead = waited ? 0 : min(steps, kTileStages);
    for (int step = 0; step < ahead; ++step) copy_weights(step, step);
    if (!waited) GridDependencyWait();
    waited = true;
    for (int step = 0; step < steps; ++step) {
      const int stage = next();
      if (step >= ahead) copy_weights(step, stage);
      for (int box = rank; box < boxes; box += kTilePair) {
        const int pick = box * kTileBoxPicks;
        CopyTensor3Multicast(s.stage[stage].x + pick * 128, &picks, step * kTileDepth, tile.begin + pick, 0,
                             &s.full[stage], (1 << kTilePair) - 1);
      }
    }
    BarrierArrive(&s.full[next()]);  // the space for the results
  }
  if (!waited) GridDependencyWait();
  const int stage = next();
  s.tile[stage].count = 0;
  BarrierArrive(&s.full[stage]);
}

__device__ __forceinline__ void GroupBarrier(int group) { NamedBarrierSync(1 + group, 128); }

// `half`: picks whose sums lie in the first half of `sum`.
template <bool kUp, Activation kKind, int kSums>
__device__ __forceinline__ void StoreTile(unsigned char* space, const TileArgs& args, int first_row, int begin,
                                          int count, int half, const float (&sum)[kSums]) {
  constexpr int kPieces = kUp ? 4 : 8;       // of 16 bytes: the warpgroup's results of one pick
  constexpr int kPitch = 16 * kPieces + 16;  // shifts the rows over the banks
  constexpr int kTogether = kUp ? 4 : 2;     // groups of 8 picks
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int group = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  const int width = kUp ? args.out / 2 : args.out;
  const int first = (kUp ? first_row / 2 : first_row) + group * kPieces * 8;
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    const int rows = min(half, count - pass * half);
    if (rows <= 0) break;
    if (pass > 0) GroupBarrier(group);
    // A lane names the row (pick) lane % 8 of matrix lane / 8.
    unsigned char* to =
        space + (kUp ? lane * kPitch + 16 * warp : (lane / 16 * 8 + lane % 8) * kPitch + 32 * warp + lane / 8 % 2 * 16);
#pragma unroll
    for (int j = 0; j < kTileHalf / 8; j += kTogether) {
      if (8 * j >= rows || pass * kTileHalf / 2 + 4 * j >= kSums) break;
      const float* from = &sum[pass * kTileHalf / 2 + 4 * j];
      uint32_t v[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if constexpr (kUp) {
          v[q] = PackBf16(ActivateAs<kKind>(args.activation, from[4 * q], from[4 * q + 2]),
                          ActivateAs<kKind>(args.activation, from[4 * q + 1], from[4 * q + 3]));
        } else {
          v[q] = PackBf16(from[2 * q], from[2 * q + 1]);
        }
      }
      StoreMatrix4Transposed(to + 8 * j * kPitch, v);
    }
    GroupBarrier(group);
    const int piece = thread % kPieces;
    bf16* y = args.y + static_cast<int64_t>(begin + pass * half) * width + first + 8 * piece;
    if (first + 8 * piece < width) {
#pragma unroll 5
      for (int r = thread / kPieces; r < rows; r += 128 / kPieces) {
        *reinterpret_cast<uint4*>(y + static_cast<int64_t>(r) * width) =
            *reinterpret_cast<const uint4*>(space + r * kPitch + 16 * piece);
      }
    }
  }
}

// One warp is done with a stage; both blocks may fill it.
__device__ __forceinline__ void ReleaseStage(TileShared& s, int stage) {
  if (threadIdx.x % 32 < kTilePair) BarrierArriveAt(&s.empty[stage], threadIdx.x % 32);
}

// All steps of a tile of up to N * kHalves picks; the sums of the second half start at kTileHalf / 2.
template <int N, int kHalves, int kSums>
__device__ __forceinline__ void MultiplyTile(TileShared& s, int steps, int group, int& n, float (&sum)[kSums]) {
  for (int step = 0; step < steps; ++step, ++n) {
    const int stage = n % kTileStages;
    BarrierWait(&s.full[stage], n / kTileStages & 1);
    const unsigned char* w = s.stage[stage].w + 64 * 128 * group;
    const unsigned char* x = s.stage[stage].x;
    GroupMmaFence();
#pragma unroll
    for (int k = 0; k < kTileDepth / 16; ++k) {
      GroupMma<N>(sum, SharedOperand(w + 32 * k), SharedOperand(x + 32 * k), step > 0 || k > 0);
      if constexpr (kHalves == 2) {
        GroupMma<N, false, false, kTileHalf / 2>(sum, SharedOperand(w + 32 * k), SharedOperand(x + N * 128 + 32 * k),
                                                 step > 0 || k > 0);
      }
    }
    GroupMmaCommit();
    GroupMmaWait<1>();
    // The products of the step before are done with its stage.
    if (step > 0) ReleaseStage(s, (n - 1) % kTileStages);
  }
  GroupMmaWait<0>();
  ReleaseStage(s, (n - 1) % kTileStages);
}

// One tile whose number of picks asks for columns in one piece (kHalves 1) or two.
template <bool kUp, int kHalves>
__device__ __forceinline__ void WorkTile(TileShared& s, const TileArgs& args, int first_row, int begin, int count,
                                         int group, int& n) {
  const int steps = (args.in + kTileDepth - 1) / kTileDepth;
  constexpr int kSums = kHalves == 1 ? 128 : kMoeTilePicks / 2;
  float sum[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) sum[i] = 0;
  int half = kTileHalf;
  const auto multiply = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    MultiplyTile<kColumns, kHalves>(s, steps, group, n, sum);
    if constexpr (kHalves == 2) half = kColumns;
  };
#define K3_TILE_CASE(LAST, N)                   \
  if (count <= LAST) {                          \
    multiply(std::integral_constant<int, N>()); \
  } else
  if constexpr (kHalves == 1) {
    K3_TILE_CASE(32, 32)
    K3_TILE_CASE(64, 64)
    K3_TILE_CASE(96, 96)
    K3_TILE_CASE(128, 128)
    K3_TILE_CASE(160, 160)
    K3_TILE_CASE(192, 192)
    K3_TILE_CASE(208, 208)
    K3_TILE_CASE(224, 224)
    K3_TILE_CASE(240, 240) { multiply(std::integral_constant<int, 256>()); }
  } else {
    K3_TILE_CASE(272, 136)
    K3_TILE_CASE(288, 144)
    K3_TILE_CASE(304, 152) { multiply(std::integral_constant<int, 160>()); }
  }
#undef K3_TILE_CASE
  const int stage = n % kTileStages;
  BarrierWait(&s.full[stage], n / kTileStages & 1);
  unsigned char* space = reinterpret_cast<unsigned char*>(&s.stage[stage]) + group * (sizeof(TileStage) / 2);
  if (kUp && args.activation.kind == Activation::kSitu) {
    StoreTile<kUp, Activation::kSitu>(space, args, first_row, begin, count, half, sum);
  } else {
    StoreTile<kUp, Activation::kSwiglu>(space, args, first_row, begin, count, half, sum);
  }
  FenceSharedForCopy();
  __syncwarp();
  ReleaseStage(s, stage);
  ++n;
}

template <bool kUp>
__device__ __forceinline__ void MultiplyTiles(TileShared& s, const TileArgs& args) {
  // Through a shuffle, so that the compiler knows it to be one value per warp: matrix products in branches that may
  // diverge are serialized.
  const int group = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  int n = 0;
  for (;;) {
    BarrierWait(&s.full[n % kTileStages], n / kTileStages & 1);
    const MoeTile& tile = s.tile[n % kTileStages];
    const int count = __shfl_sync(kAllLanes, tile.count, 0), begin = tile.begin;
    const int first_row = tile.first_row;
    if (count == 0) break;
    if (count <= 256) {
      WorkTile<kUp, 1>(s, args, first_row, begin, count, group, n);
    } else {
      WorkTile<kUp, 2>(s, args, first_row, begin, count, group, n);
    }
  }
}

// `weights`: of the launch's experts, [out, in] an expert, in boxes of kTileWeightRows; `picks`: [picks, in] in boxes
// of kTileBoxPicks. Clusters of kTilePair, any grid. What a launch reads but for `picks` was written before the launch
// before.
template <bool kUp>
__global__ void __launch_bounds__(kTileThreads, 1)
    MoeTileKernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap picks,
                  TileArgs args) {
  TileShared& s = *DynamicShared<TileShared>();
  GridDependencyRelease();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kTileStages; ++stage) {
      BarrierInit(&s.full[stage], 1);
      BarrierInit(&s.empty[stage], kTilePair * kTileMultiplyThreads / 32);
    }
    BarrierInitFence();
  }
  __syncwarp();
  ClusterArrive();
  ClusterWait();
  if (threadIdx.x >= kTileMultiplyThreads) {
    GiveRegisters<40>();
    if (threadIdx.x == kTileMultiplyThreads) CopyTiles(s, weights, picks, args);
  } else {
    TakeRegisters<232>();
    MultiplyTiles<kUp>(s, args);
  }
  // The other block may still arrive at barriers of this one.
  __syncwarp();
  ClusterArrive();
  ClusterWait();
}

// to[pick of (token, j)] = x[token], with kMxfp8 rounded to MXFP8; grid (tokens), a thread takes 8 elements at a time.
template <bool kMxfp8>
__global__ void MoePermuteKernel(Matrix<const bf16> x, const int* __restrict__ pick_of, int top_k, int in, bf16* to) {
  GridDependencyWait();
  GridDependencyRelease();  // the plan has ended
  const int64_t token = blockIdx.x;
  for (int c = threadIdx.x; c < in / 8; c += blockDim.x) {
    uint4 piece = reinterpret_cast<const uint4*>(x.Row(token))[c];
    if constexpr (kMxfp8) {
      auto& elements = reinterpret_cast<bf16(&)[kRoundElements]>(piece);
      float values[kRoundElements];
#pragma unroll
      for (int e = 0; e < kRoundElements; ++e) values[e] = ToFloat(elements[e]);
      RoundToMxfp8(values);
#pragma unroll
      for (int e = 0; e < kRoundElements; ++e) elements[e] = FromFloat<bf16>(values[e]);
    }
#pragma unroll 8
    for (int j = 0; j < top_k; ++j) {
      const int pick = pick_of[token * top_k + j];
      if (pick >= 0) reinterpret_cast<uint4*>(to + static_cast<int64_t>(pick) * in)[c] = piece;
    }
  }
}

// bf16 copies of the MXFP4 rows of experts [expert_begin, expert_end) that have picks, [rows, cols] an expert; grid
// (blocks over the pieces' lanes of one expert, experts).
__global__ void Mxfp4ExpandKernel(Mxfp4View weights, MoePlan plan, int expert_begin, int rows, int cols, bf16* to) {
  const int expert = expert_begin + blockIdx.y;
  if (plan.expert_begin[expert + 1] == plan.expert_begin[expert]) return;
  const int64_t lanes = static_cast<int64_t>(rows / kMxfp4Rows) * weights.pieces * 32;
  bf16* const matrix = to + static_cast<int64_t>(blockIdx.y) * rows * cols;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < lanes;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t at = expert * lanes + i;
    const int lane = static_cast<int>(i % 32), g = lane / 4, t = lane % 4;
    const uint4 codes = weights.codes[at];
    const uint32_t scales = weights.scales[at / 32 * 8 + g];
    const int64_t piece = i / 32;
    const int64_t row = piece / weights.pieces * kMxfp4Rows + g;
    const int k = static_cast<int>(piece % weights.pieces) * kMxfp4Inputs + 8 * t;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (k + 32 * part >= cols) break;
      uint32_t low[4], high[4];
      Mxfp4Spread(part == 0 ? codes.x : codes.z, low);
      Mxfp4Spread(part == 0 ? codes.y : codes.w, high);
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const uint2 factors = Mxfp4Factors(scales >> (16 * upper + 8 * part) & 255);
        const auto value = [&](uint32_t pair) { return MultiplyBf16(MultiplyBf16(pair, factors.x), factors.y); };
        *reinterpret_cast<uint4*>(matrix + (row + 8 * upper) * cols + k + 32 * part) =
            make_uint4(value(low[upper]), value(low[upper + 2]), value(high[upper]), value(high[upper + 2]));
      }
    }
  }
}

}  // namespace k3::cuda
