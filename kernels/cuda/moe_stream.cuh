#pragma once

#include <algorithm>

#include "kernels/cuda/moe.cuh"

// Expert products for few picks an expert: the weights stream through once, from global memory straight into the A
// fragments, the picks are the 8-wide columns. A warp's lanes hold different stretches of the contraction than MmaBf16
// names (lane t of a row: kStep / 4 consecutive inputs), which is free as long as both operands do so.
//
// A block owns a few 16-row tiles of the weights of one expert; its eight warps take turns along the contraction and
// add up at the end, in warp order. A pick's result does not depend on how many picks there are.
namespace k3::cuda {

constexpr int kStreamThreads = 256;
constexpr int kStreamWarps = kStreamThreads / 32;

struct StreamArgs {
  MoePlan plan;
  int in, out;  // contraction and weight rows of this product
  ActivationSpec activation;
  Matrix<const bf16> x;  // up: [tokens, in]; down: h [picks, in]
  bf16* y;               // up: h [picks, out / 2]; down: [picks, out]
};

// Weight fragments of 16-row tiles in bf16: a step is 32 inputs, 8 a lane.
struct TiledStream {
  static constexpr int kStep = 32;
  const bf16* data;  // as weight_tiles.h has it
  int across;

  struct Piece {
    uint4 row[2];  // rows g and g + 8
  };
  // Of row `row` of an expert that has `out` of them.
  __device__ __forceinline__ const bf16* Start(int expert, int out, int row, int k) const {
    return data + expert * (WeightTilesDown(out) * static_cast<int64_t>(across) * kWeightTileElements) +
           TiledElement(row, k, across);
  }
  static __device__ __forceinline__ Piece Load(const bf16* from) {
    return {LoadStreaming16(from), LoadStreaming16(from + TiledRowsOn(8))};
  }
  static __device__ __forceinline__ Piece LoadIf(bool valid, const bf16* from) {
    return {LoadStreaming16If(valid, from), LoadStreaming16If(valid, from + TiledRowsOn(8))};
  }
  // Fragment `i` (of kStep / 16) for the lane's inputs 4 i .. 4 i + 3.
  static __device__ __forceinline__ void Fragment(const Piece& piece, int i, uint32_t (&a)[4]) {
    a[0] = i == 0 ? piece.row[0].x : piece.row[0].z;
    a[1] = i == 0 ? piece.row[1].x : piece.row[1].z;
    a[2] = i == 0 ? piece.row[0].y : piece.row[0].w;
    a[3] = i == 0 ? piece.row[1].y : piece.row[1].w;
  }
};

// The calling lane's sums of the 16 weight rows from `row` on and the n-th eight of `count` picks from `first` on.
template <bool kUp>
__device__ __forceinline__ void StoreStreamed(const StreamArgs& args, const float4& sum, int first, int count, int n,
                                              int row) {
  const int g = threadIdx.x % 32 / 4;
  const int pick = 8 * n + 2 * (threadIdx.x % 4);  // and the next
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (pick + e >= count) continue;
    const float low = e == 0 ? sum.x : sum.y, high = e == 0 ? sum.z : sum.w;
    if constexpr (kUp) {
      // A tile is eight gate rows over their eight up rows.
      bf16* to = args.y + static_cast<int64_t>(first + pick + e) * (args.out / 2);
      to[row / 2 + g] = FromFloat<bf16>(Activate(args.activation, low, high));
    } else {
      bf16* to = args.y + static_cast<int64_t>(first + pick + e) * args.out + row + g;
      to[0] = FromFloat<bf16>(low);
      to[8] = FromFloat<bf16>(high);
    }
  }
}

// kTokens: 8-wide columns of picks held together, a group; an expert with more picks is several groups, which stream
// its weights again, beside each other. kTiles: 16-row tiles of a block: more of them take better advantage of the
// inputs, which all come through L1. kBlocks: of a multiprocessor. Grid (weight rows / (16 kTiles), any number that
// shares the groups).
template <typename Weights, int kTokens, int kTiles, bool kUp, int kBlocks>
__global__ void __launch_bounds__(kStreamThreads, kBlocks) MoeStreamKernel(StreamArgs args, Weights weights) {
  float4* partial = DynamicShared<float4>();  // [warps][kTiles][kTokens][32]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int first_row = blockIdx.x * 16 * kTiles;
  const int tiles = min(kTiles, (args.out - first_row) / 16);  // that exist

  if constexpr (kUp) GridDependencyWait();
  GridDependencyRelease();                                     // the plan has ended
  MoeGroup group = EarlyGroup(args.plan.groups + blockIdx.y);  // means nothing if there is no such group
  const int groups = __ldcg(args.plan.group_count);
  if (static_cast<int>(blockIdx.y) >= groups) return GridDependencyWait();
  // Steps that are loaded ahead by blocks of few rows: all of the second product and half of the first at the widths of
  // the 48B shape. The first weights need not wait for inputs, nor for the launch that makes them.
  constexpr int kDepth = kTiles * kTokens == 1 ? 4 : 0;
  constexpr int kStride = kStreamWarps * Weights::kStep;
  for (int number = blockIdx.y;;) {
    const int lane_k = Weights::kStep / 4 * t;
    // A step on is whole tiles of weights further.
    static_assert(kStride % kWeightTileInputs == 0);
    const bf16* from = weights.Start(group.expert, args.out, first_row + g, warp * Weights::kStep + lane_k);
    typename Weights::Piece ahead[std::max(kDepth, 1)];
    if constexpr (kDepth > 0) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        ahead[d] = weights.LoadIf(warp * Weights::kStep + d * kStride < args.in, from + TiledInputsOn(d * kStride));
      }
    }
    if constexpr (!kUp) GridDependencyWait();
    const bf16* x[kTokens];
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
      const int pick = group.begin + min(8 * n + g, group.count - 1);
      x[n] = args.x.Row(kUp ? args.plan.token_of[pick] : pick) + lane_k;
    }
    float sum[kTiles][kTokens][4] = {};
    const auto multiply = [&](const typename Weights::Piece(&piece)[kTiles], const uint4(&inputs)[kTokens], int part) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          uint32_t a[4];
          Weights::Fragment(piece[tile], 2 * part + i, a);
#pragma unroll
          for (int n = 0; n < kTokens; ++n) {
            MmaBf16(sum[tile][n], a, i == 0 ? inputs[n].x : inputs[n].z, i == 0 ? inputs[n].y : inputs[n].w);
          }
        }
      }
    };
    if constexpr (kDepth > 0) {
      static_assert(Weights::kStep == 32);
      uint4 inputs[kDepth][1];
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        inputs[d][0] = *reinterpret_cast<const uint4*>(x[0] + min(warp * Weights::kStep + d * kStride, args.in - 32));
      }
#pragma unroll 1
      for (int first = warp * Weights::kStep; first < args.in; first += kDepth * kStride) {
        from += TiledInputsOn(kDepth * kStride);
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          const int k = first + d * kStride, next = k + kDepth * kStride;
          if (k < args.in) multiply({ahead[d]}, inputs[d], 0);
          ahead[d] = weights.LoadIf(next < args.in, from + TiledInputsOn(d * kStride));
          inputs[d][0] = LoadStreaming16If(next < args.in, x[0] + next);
        }
      }
    } else {
#pragma unroll(kTiles* kTokens <= 4 ? 2 : 1)
      for (int k = warp * Weights::kStep; k < args.in; k += kStride, from += TiledInputsOn(kStride)) {
        typename Weights::Piece piece[kTiles];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          // Tiles that do not exist repeat the last.
          piece[tile] = weights.Load(from + TiledRowsOn(16) * min(tile, tiles - 1));
        }
#pragma unroll
        for (int part = 0; part < Weights::kStep / 32; ++part) {
          uint4 inputs[kTokens];
#pragma unroll
          for (int n = 0; n < kTokens; ++n) inputs[n] = *reinterpret_cast<const uint4*>(x[n] + k + 8 * part);
          multiply(piece, inputs, part);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        partial[((warp * kTiles + tile) * kTokens + n) * 32 + lane] = {sum[tile][n][0], sum[tile][n][1],
                                                                       sum[tile][n][2], sum[tile][n][3]};
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kTiles * kTokens * 32; i += kStreamThreads) {
      const float4 total = SumInOrder(partial + i, kTiles * kTokens * 32, kStreamWarps);
      const int tile = i / (32 * kTokens), n = i / 32 % kTokens;
      if (tile >= tiles) continue;
      StoreStreamed<kUp>(args, total, group.begin, group.count, n, first_row + 16 * tile);
    }
    number += gridDim.y;
    if (number >= groups) break;
    group = args.plan.groups[number];
    __syncthreads();
  }
}

}  // namespace k3::cuda
