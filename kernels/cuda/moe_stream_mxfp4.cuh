#pragma once

#include "kernels/cuda/moe_stream.cuh"

// MoeStreamKernel for MXFP4 weights, dequantised in registers. A block's warps are four groups of rows x two slices of
// the contraction; the groups share the picks' inputs through L1. Weights are loaded a step ahead, and the first before
// anything is known about the picks.
namespace k3::cuda {

constexpr int kMxfp4Slices = 2;
template <int kTiles>
constexpr int kMxfp4StreamRows = 16 * kTiles* kStreamWarps / kMxfp4Slices;  // of a block

// kBlocks: of a multiprocessor. Grid (weight rows / kMxfp4StreamRows, any number that shares the groups of picks).
template <int kTokens, int kTiles, int kBlocks, bool kUp>
__global__ void __launch_bounds__(kStreamThreads, kBlocks) MoeMxfp4StreamKernel(StreamArgs args, Mxfp4View weights) {
  constexpr int kSlices = kMxfp4Slices, kStride = kSlices * kMxfp4Inputs;
  float4* partial = DynamicShared<float4>();  // [warps][kTiles][kTokens][32]
  const int groups = *args.plan.group_count;
  MoeGroup group = args.plan.groups[blockIdx.y];  // means nothing if there is no such group
  if (static_cast<int>(blockIdx.y) >= groups) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int first_row = blockIdx.x * kMxfp4StreamRows<kTiles>;  // of the block
  const int warp_row = first_row + warp / kSlices * 16 * kTiles;
  const int first_k = warp % kSlices * kMxfp4Inputs;
  struct Piece {
    uint4 words;
    uint32_t scales;
  };
  // Weights are at 32 bits of offset from one address a lane; tiles that do not exist repeat the last.
  uint32_t tile_piece[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    tile_piece[tile] =
        static_cast<uint32_t>(min(warp_row / kMxfp4Rows + tile, args.out / kMxfp4Rows - 1) * weights.pieces);
  }
  for (int number = blockIdx.y;;) {
    const int64_t first_piece = int64_t{group.expert} * (args.out / kMxfp4Rows) * weights.pieces;
    const char* codes = reinterpret_cast<const char*>(weights.codes + first_piece * 32 + lane);
    const char* scales = reinterpret_cast<const char*>(weights.scales + first_piece * 8 + g);
    asm("" : "+l"(codes), "+l"(scales));
    const auto load = [&](Piece(&piece)[kTiles], int k) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint32_t at = tile_piece[tile] + static_cast<uint32_t>(k / kMxfp4Inputs);
        piece[tile] = {LoadStreaming16(codes + uint64_t{at} * kMxfp4PieceBytes),
                       __ldg(reinterpret_cast<const uint32_t*>(scales + uint64_t{at} * kMxfp4PieceScaleBytes))};
      }
    };
    Piece piece[2][kTiles];
    if (first_k < args.in) load(piece[0], first_k);

    const bf16* x[kTokens];
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
      const int pick = group.begin + min(8 * n + g, group.count - 1);
      x[n] = args.x.Row(kUp ? args.plan.token_of[pick] : pick) + 8 * t;
    }
    float sum[kTiles][kTokens][4] = {};
    // Inputs of one part (32) of a step; past the last the last once more, whose weights are zero.
    const auto load_inputs = [&](uint4(&inputs)[kTokens], int k) {
      const uint32_t at = static_cast<uint32_t>(min(k, args.in - 32));
#pragma unroll
      for (int n = 0; n < kTokens; ++n) inputs[n] = *reinterpret_cast<const uint4*>(x[n] + at);
    };
    uint4 inputs[2][kTokens];
    load_inputs(inputs[0], first_k);
    const auto multiply_by = [&]<bool kLarge>(const Piece(&piece)[kTiles], int k) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        load_inputs(inputs[1 - part], part == 0 ? k + 32 : k + kStride);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            uint32_t a[4];
            const uint4& words = piece[tile].words;
            Mxfp4Spread(part == 0 ? (i == 0 ? words.x : words.y) : (i == 0 ? words.z : words.w), a);
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
              // The scale's byte in both halves.
              const uint32_t code = __byte_perm(piece[tile].scales, 0, 0x4040 + 0x101 * (2 * upper + part));
              if constexpr (kLarge) {
                const uint2 factors = Mxfp4Factors(code & 255);
                a[upper] = MultiplyBf16(MultiplyBf16(a[upper], factors.x), factors.y);
                a[upper + 2] = MultiplyBf16(MultiplyBf16(a[upper + 2], factors.x), factors.y);
              } else {
                const uint32_t factor = code * 128 + 0x3f003f00u;  // Mxfp4Factor
                a[upper] = MultiplyBf16(a[upper], factor);
                a[upper + 2] = MultiplyBf16(a[upper + 2], factor);
              }
            }
#pragma unroll
            for (int n = 0; n < kTokens; ++n) {
              const uint4& x = inputs[part][n];
              MmaBf16(sum[tile][n], a, i == 0 ? x.x : x.z, i == 0 ? x.y : x.w);
            }
          }
        }
      }
    };
    // Scales beyond what one factor can do are rare.
    const auto multiply = [&](const Piece(&piece)[kTiles], int k) {
      uint32_t all = 0;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) all |= piece[tile].scales;
      if (__any_sync(kAllLanes, (all & 0x80808080u) != 0)) {
        multiply_by.template operator()<true>(piece, k);
      } else {
        multiply_by.template operator()<false>(piece, k);
      }
    };
    for (int k = first_k; k < args.in; k += 2 * kStride) {
      if (k + kStride < args.in) load(piece[1], k + kStride);
      multiply(piece[0], k);
      if (k + kStride >= args.in) break;
      if (k + 2 * kStride < args.in) load(piece[0], k + 2 * kStride);
      multiply(piece[1], k + kStride);
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
    constexpr int kWarpSums = kTiles * kTokens * 32;
    for (int i = threadIdx.x; i < kStreamWarps / kSlices * kWarpSums; i += kStreamThreads) {
      const int rows = i / kWarpSums, tile = i % kWarpSums / (32 * kTokens), n = i / 32 % kTokens;
      const float4* from = partial + rows * kSlices * kWarpSums + i % kWarpSums;
      const float4 total = SumInOrder(from, kWarpSums, kSlices);
      const int row = first_row + 16 * (rows * kTiles + tile);
      if (row < args.out) StoreStreamed<kUp>(args, total, group.begin, group.count, n, row);
    }
    number += gridDim.y;
    if (number >= groups) break;
    group = args.plan.groups[number];
    __syncthreads();
  }
}

}  // namespace k3::cuda
