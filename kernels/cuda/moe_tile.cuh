#pragma once

#include "kernels/cuda/group_mma.cuh"
#include "kernels/cuda/moe.cuh"

// Expert products for many picks an expert: tiles of 128 picks x 256 weight rows, bf16, warpgroup products with both
// operands in shared memory. Two warpgroups take 64 picks each; every thread also copies, four stages of 64 inputs
// deep.
namespace k3::cuda {

constexpr int kTileThreads = 256;
constexpr int kTileColumns = 256;  // weight rows
constexpr int kTileDepth = 64;
constexpr int kTileStages = 4;

struct TileShared {
  alignas(1024) unsigned char x[kTileStages][kMoeTileRows * 128];
  alignas(1024) unsigned char w[kTileStages][kTileColumns * 128];
};

struct TileArgs {
  MoePlan plan;
  int expert_begin, expert_end;  // local experts of this launch
  int in, out;                   // contraction and weight rows of this product; multiples of 8
  ActivationSpec activation;
  Matrix<const bf16> x;  // up: [tokens, in]; down: h [picks, in]
  const bf16* weights;   // of expert_begin, [out, in] an expert
  bf16* y;               // up: h [picks, out / 2]; down: [picks, out]
};

// Grid (weight row tiles, pick tiles of the launch's experts).
template <bool kUp>
__global__ void __launch_bounds__(kTileThreads, 1) MoeTileKernel(TileArgs args) {
  TileShared& s = *DynamicShared<TileShared>();
  const int tile = args.plan.tile_begin[args.expert_begin] + blockIdx.y;
  if (tile >= args.plan.tile_begin[args.expert_end]) return;
  int expert = args.expert_begin, high = args.expert_end - 1;  // the last expert whose first tile is at most `tile`
  while (expert < high) {
    const int middle = (expert + high + 1) / 2;
    if (args.plan.tile_begin[middle] <= tile) {
      expert = middle;
    } else {
      high = middle - 1;
    }
  }
  const int begin = args.plan.expert_begin[expert] + (tile - args.plan.tile_begin[expert]) * kMoeTileRows;
  const int count = min(kMoeTileRows, args.plan.expert_begin[expert + 1] - begin);
  const int first_row = blockIdx.x * kTileColumns;
  const int lane = threadIdx.x % 32, group = threadIdx.x / 128;

  // This thread copies 16 bytes of each of these rows a stage.
  const int piece = threadIdx.x % 8, copy_row = threadIdx.x / 8;
  constexpr int kRowStep = kTileThreads / 8;
  const bf16* x[kMoeTileRows / kRowStep];
#pragma unroll
  for (int i = 0; i < kMoeTileRows / kRowStep; ++i) {
    const int r = copy_row + i * kRowStep;
    const int pick = begin + min(r, count - 1);
    x[i] = args.x.Row(kUp ? args.plan.token_of[pick] : pick) + 8 * piece;
  }
  const bf16* w = args.weights +
                  (static_cast<int64_t>(expert - args.expert_begin) * args.out + first_row + copy_row) * args.in +
                  8 * piece;
  const int64_t w_step = static_cast<int64_t>(kRowStep) * args.in;
  const int steps = (args.in + kTileDepth - 1) / kTileDepth;
  const auto fetch = [&](int step) {
    if (step < steps) {
      const int stage = step % kTileStages;
      const int k = step * kTileDepth;
      const bool inside = k + 8 * piece < args.in;
#pragma unroll
      for (int i = 0; i < kMoeTileRows / kRowStep; ++i) {
        const int r = copy_row + i * kRowStep;
        const bool valid = inside && r < count;
        CopyAsync16(s.x[stage] + Swizzle128(r, piece), valid ? x[i] + k : args.weights, valid);
      }
#pragma unroll
      for (int i = 0; i < kTileColumns / kRowStep; ++i) {
        const int r = copy_row + i * kRowStep;
        const bool valid = inside && first_row + r < args.out;
        CopyAsync16(s.w[stage] + Swizzle128(r, piece), valid ? w + i * w_step + k : args.weights, valid);
      }
    }
    CopyAsyncCommit();
  };
  constexpr int kAhead = kTileStages - 2;
#pragma unroll
  for (int step = 0; step < kAhead; ++step) fetch(step);

  float sum[kTileColumns / 2];
#pragma unroll
  for (int i = 0; i < kTileColumns / 2; ++i) sum[i] = 0;
  const bool active = 64 * group < count;  // this warpgroup has picks
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kTileStages;
    CopyAsyncWait<kAhead - 1>();
    FenceSharedForMatrix();
    // All threads have waited for the products of step - 2, so that its stage is free.
    __syncthreads();
    if (active) {
      GroupMmaFence();
#pragma unroll
      for (int k = 0; k < kTileDepth / 16; ++k) {
        GroupMma<kTileColumns>(sum, SharedOperand(s.x[stage] + 64 * 128 * group + 32 * k),
                               SharedOperand(s.w[stage] + 32 * k));
      }
      GroupMmaCommit();
    }
    fetch(step + kAhead);
    if (active) GroupMmaWait<1>();
  }
  if (!active) return;
  GroupMmaWait<0>();

  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = 64 * group + threadIdx.x / 32 % 4 * 16 + g + 8 * i;
    if (r >= count) continue;
    if constexpr (kUp) {
      bf16* to = args.y + static_cast<int64_t>(begin + r) * (args.out / 2) + first_row / 2 + 2 * t;
#pragma unroll
      for (int j = 0; j < kTileColumns / 16; ++j) {
        if (first_row + 16 * j >= args.out) continue;
        const float* gate = &sum[8 * j + 2 * i];
        const float* up = &sum[8 * j + 4 + 2 * i];
        *reinterpret_cast<uint32_t*>(to + 8 * j) =
            PackBf16(Activate(args.activation, gate[0], up[0]), Activate(args.activation, gate[1], up[1]));
      }
    } else {
      bf16* to = args.y + static_cast<int64_t>(begin + r) * args.out + first_row + 2 * t;
#pragma unroll
      for (int j = 0; j < kTileColumns / 8; ++j) {
        if (first_row + 8 * j >= args.out) continue;
        *reinterpret_cast<uint32_t*>(to + 8 * j) = PackBf16(sum[4 * j + 2 * i], sum[4 * j + 2 * i + 1]);
      }
    }
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
