#pragma once

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/mxfp4.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/weight_tiles.h"
#include "kernels/cuda/weights.h"

// Experts: what all variants share. A pick is a (token, j) pair whose expert lives here; picks lie sorted by expert.
// The stages are: plan (sort the picks), up (both input products and the activation into h [picks, inner]), down (h
// into y [picks, in]), combine.
namespace k3::cuda {

constexpr int kMoeTilePicks = 320;  // at most, of one tile of the large products
constexpr int kMoePlanThreads = 1024;
constexpr int kMoePlanBlocks = 64;  // of a plan of many pairs
constexpr int kMoeMaxExperts = 8192;

// Some picks of one expert, which a block of the streaming products takes together.
struct alignas(16) MoeGroup {
  int expert;
  int begin, count;  // picks
};

// What the plan wrote two launches before, in a launch that may run beside the one between.
__device__ __forceinline__ MoeGroup EarlyGroup(const MoeGroup* group) {
  const int4 words = __ldcg(reinterpret_cast<const int4*>(group));
  return {words.x, words.y, words.z};
}

struct MoePlan {
  int* expert_begin;  // [experts + 1] first pick of each local expert
  int* tile_begin;    // [experts + 1] first tile of each local expert
  int* group_begin;   // [experts] first group of each local expert
  MoeGroup* groups;   // [experts + pairs / 8] by expert, of up to PlanArgs::group_picks picks
  int* group_count;   // [1]
  int* pick_of;       // [tokens * top_k] pick of (token, j), -1 where the expert is not local
  int* token_of;      // [tokens * top_k] token of each pick
  uint32_t* up_done;  // [experts] blocks' tiles of the large up product that have ended; zeroed with the plan
};

struct PlanArgs {
  const int32_t* ids;  // [pairs]
  int pairs, top_k;
  int first, experts;  // local experts
  int group_picks;     // 0: no groups are asked for
  MoePlan plan;
};

// work(pair, its local expert or -1) for pairs [begin, end), the calling thread's; four ids are on their way at a time.
template <typename Work>
__device__ __forceinline__ void ForPairs(const PlanArgs& args, int begin, int end, const Work& work) {
  constexpr int kTogether = 4;
  for (int first = begin + threadIdx.x; first < end; first += kTogether * blockDim.x) {
    int expert[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int pair = first + i * blockDim.x;
      expert[i] = pair < end ? args.ids[pair] - args.first : -1;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int pair = first + i * blockDim.x;
      if (pair < end) work(pair, expert[i] < args.experts ? max(expert[i], -1) : -1);
    }
  }
}

// Zeroes the counters, [experts] in shared memory, and counts the picks among pairs [begin, end).
__device__ __forceinline__ void CountPicks(const PlanArgs& args, int begin, int end, int* counter) {
  for (int e = threadIdx.x; e < args.experts; e += blockDim.x) counter[e] = 0;
  __syncthreads();
  ForPairs(args, begin, end, [&](int, int e) {
    if (e >= 0) atomicAdd(&counter[e], 1);
  });
  __syncthreads();
}

// Lays the experts' picks and tiles out: `count(e)` is asked once for each expert, then place(e, its first pick)
// called. Of several blocks that do so one writes it down.
template <typename Count, typename Place>
__device__ __forceinline__ void LayOutPicks(const PlanArgs& args, int* shared, bool writes, const Count& count_of,
                                            const Place& place) {
  const MoePlan& plan = args.plan;
  int picks = 0, tiles = 0, groups = 0;
  for (int base = 0; base < args.experts; base += blockDim.x) {
    const int e = base + threadIdx.x;
    const int count = e < args.experts ? count_of(e) : 0;
    const int own_tiles = (count + kMoeTilePicks - 1) / kMoeTilePicks;
    const int own_groups = args.group_picks > 0 ? (count + args.group_picks - 1) / args.group_picks : 0;
    int total;
    const int pick_end = picks + BlockScan(count, shared, total);
    picks += total;
    // Tiles and groups together: neither passes 65535.
    const int both_end = BlockScan(own_tiles << 16 | own_groups, shared, total);
    const int tile_end = tiles + (both_end >> 16), group_begin = groups + (both_end & 0xffff) - own_groups;
    tiles += total >> 16;
    groups += total & 0xffff;
    if (e < args.experts) place(e, pick_end - count);
    if (e < args.experts && writes) {
      plan.expert_begin[e] = pick_end - count;
      plan.tile_begin[e] = tile_end - own_tiles;
      plan.group_begin[e] = group_begin;
      for (int i = 0; i < own_groups; ++i) {
        const int first = i * args.group_picks;
        plan.groups[group_begin + i] = {e, pick_end - count + first, min(args.group_picks, count - first)};
      }
    }
  }
  if (args.group_picks == 0 && writes) {
    for (int i = threadIdx.x; i < args.experts; i += blockDim.x) plan.up_done[i] = 0;
  }
  if (threadIdx.x == 0 && writes) {
    plan.expert_begin[args.experts] = picks;
    plan.tile_begin[args.experts] = tiles;
    *plan.group_count = groups;
  }
  __syncthreads();
}

// counter[e] is the next free pick of e.
__device__ __forceinline__ void PlacePicks(const PlanArgs& args, int begin, int end, int* counter) {
  ForPairs(args, begin, end, [&](int pair, int e) {
    int pick = -1;
    if (e >= 0) {
      // The order within an expert is free: no sum runs over picks of different tokens.
      pick = atomicAdd(&counter[e], 1);
      args.plan.token_of[pick] = pair / args.top_k;
    }
    args.plan.pick_of[pair] = pick;
  });
}

// The plan by one block, for up to kMoePlanHeld pairs a thread. Shared memory: [experts] counters, 33 ints.
constexpr int kMoePlanHeld = 4;
__global__ void MoePlanKernel(PlanArgs args) {
  int* counter = DynamicShared<int>();
  for (int e = threadIdx.x; e < args.experts; e += blockDim.x) counter[e] = 0;
  __syncthreads();
  GridDependencyWait();
  GridDependencyRelease();
  // The order within an expert is free: no sum runs over picks of different tokens.
  int expert[kMoePlanHeld], number[kMoePlanHeld];
#pragma unroll
  for (int i = 0; i < kMoePlanHeld; ++i) {
    const int pair = threadIdx.x + i * blockDim.x;
    expert[i] = pair < args.pairs ? args.ids[pair] - args.first : -1;
  }
#pragma unroll
  for (int i = 0; i < kMoePlanHeld; ++i) {
    if (expert[i] >= args.experts) expert[i] = -1;
    number[i] = expert[i] >= 0 ? atomicAdd(&counter[expert[i]], 1) : 0;
  }
  __syncthreads();
  LayOutPicks(
      args, counter + args.experts, true, [&](int e) { return counter[e]; },
      [&](int e, int pick) { counter[e] = pick; });
#pragma unroll
  for (int i = 0; i < kMoePlanHeld; ++i) {
    const int pair = threadIdx.x + i * blockDim.x;
    if (pair >= args.pairs) break;
    const int pick = expert[i] >= 0 ? counter[expert[i]] + number[i] : -1;
    if (pick >= 0) args.plan.token_of[pick] = pair / args.top_k;
    args.plan.pick_of[pair] = pick;
  }
}

// The plan of many pairs, in two launches of kMoePlanBlocks blocks: they count, then place the pairs they had counted,
// each after it has laid everything out. `share`: [kMoePlanBlocks][experts], a block's picks of each expert.
__device__ __forceinline__ int PlanBlockBegin(const PlanArgs& args, int block) {
  return static_cast<int>(static_cast<int64_t>(args.pairs) * block / kMoePlanBlocks);
}
__global__ void MoePlanCountKernel(PlanArgs args, int* share) {  // shared memory: [experts]
  GridDependencyWait();
  GridDependencyRelease();
  int* counter = DynamicShared<int>();
  CountPicks(args, PlanBlockBegin(args, blockIdx.x), PlanBlockBegin(args, blockIdx.x + 1), counter);
  for (int e = threadIdx.x; e < args.experts; e += blockDim.x) share[blockIdx.x * args.experts + e] = counter[e];
}
__global__ void MoePlanPlaceKernel(PlanArgs args, const int* share) {  // shared memory: [experts], 33 ints
  GridDependencyWait();
  GridDependencyRelease();
  int* counter = DynamicShared<int>();
  const auto count = [&](int e) {
    int sum = 0, before = 0;
#pragma unroll 16
    for (int b = 0; b < kMoePlanBlocks; ++b) {
      const int own = share[b * args.experts + e];
      sum += own;
      before += b < static_cast<int>(blockIdx.x) ? own : 0;
    }
    counter[e] = before;
    return sum;
  };
  LayOutPicks(args, counter + args.experts, blockIdx.x == 0, count, [&](int e, int pick) { counter[e] += pick; });
  PlacePicks(args, PlanBlockBegin(args, blockIdx.x), PlanBlockBegin(args, blockIdx.x + 1), counter);
}

// out[t] = sum over j, ascending, of weights[t, j] y[pick of (t, j)], fp32. Grid (tokens, packs of columns).
template <typename T, typename Out, int N>
__global__ void MoeCombineKernel(const int* __restrict__ pick_of, const float* __restrict__ weights, int top_k,
                                 const T* __restrict__ y, int cols, Matrix<Out> out) {
  GridDependencyWait();
  GridDependencyRelease();
  const int c = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (c >= cols) return;
  const int64_t token = blockIdx.x;
  float sum[N] = {};
#pragma unroll 8
  for (int j = 0; j < top_k; ++j) {
    const int pick = pick_of[token * top_k + j];
    const float weight = weights[token * top_k + j];
    float x[N];
    LoadFloats<N>(y + static_cast<int64_t>(max(pick, 0)) * cols + c, x);
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] = pick < 0 ? sum[i] : fmaf(weight, x[i], sum[i]);
  }
  StoreFloats<N>(out.Row(token) + c, sum);
}

// Row of w13 that holds row r of w1 (part 0) or w3 (part 1).
__device__ __forceinline__ int64_t InterleavedRow(int interleave, int part, int r) {
  return static_cast<int64_t>(r / interleave) * 2 * interleave + part * interleave + r % interleave;
}

// One weight as fp32.
template <typename T>
struct PlainRow {
  const T* row;
  __device__ __forceinline__ float operator()(int k) const { return ToFloat(row[k]); }
};
// The weights of one product of all experts, as rows of `cols` inputs.
template <typename T>
struct PlainMatrix {
  const T* data;
  int64_t cols;
  __device__ __forceinline__ PlainRow<T> Row(int64_t row) const { return {data + row * cols}; }
};
// The same in bf16 in the order of weight_tiles.h, `rows` an expert.
struct TiledRow {
  const bf16* data;
  int64_t row;
  int across;
  __device__ __forceinline__ float operator()(int k) const { return ToFloat(data[TiledElement(row, k, across)]); }
};
struct TiledMatrix {
  const bf16* data;
  int rows, across;
  __device__ __forceinline__ TiledRow Row(int64_t row) const {
    return {data, row / rows * WeightTilesDown(rows) * kWeightTileRows + row % rows, across};
  }
};
struct Mxfp4Matrix {
  Mxfp4View view;
  __device__ __forceinline__ Mxfp4Row Row(int64_t row) const { return {view, row}; }
};

constexpr int kMoeAnyWarps = 8;

__device__ __forceinline__ int ExpertOfPick(const MoePlan& plan, int experts, int pick) {
  int low = 0, high = experts - 1;  // the last expert whose first pick is at most `pick` and that has picks
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (plan.expert_begin[middle] <= pick) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Any widths and types, one warp an output: the obvious loops. Grid (outputs / warps, picks).
template <typename T, typename Weights>
__global__ void MoeUpAnyKernel(Matrix<const T> x, Weights w13, int interleave, ActivationSpec spec, MoePlan plan,
                               int experts, int in, int inner, T* h) {
  const int lane = threadIdx.x % 32, pick = blockIdx.y;
  const int output = blockIdx.x * kMoeAnyWarps + threadIdx.x / 32;
  if (pick >= plan.expert_begin[experts] || output >= inner) return;
  const int64_t first_row = static_cast<int64_t>(ExpertOfPick(plan, experts, pick)) * 2 * inner;
  const auto gate = w13.Row(first_row + InterleavedRow(interleave, 0, output));
  const auto up = w13.Row(first_row + InterleavedRow(interleave, 1, output));
  const T* row = x.Row(plan.token_of[pick]);
  float gate_sum = 0, up_sum = 0;
  for (int k = lane; k < in; k += 32) {
    const float value = ToFloat(row[k]);
    gate_sum = fmaf(value, gate(k), gate_sum);
    up_sum = fmaf(value, up(k), up_sum);
  }
  gate_sum = WarpSum(gate_sum);
  up_sum = WarpSum(up_sum);
  if (lane == 0) h[static_cast<int64_t>(pick) * inner + output] = FromFloat<T>(Activate(spec, gate_sum, up_sum));
}
template <typename T, typename Weights>
__global__ void MoeDownAnyKernel(const T* h, Weights w2, MoePlan plan, int experts, int in, int inner, T* y) {
  const int lane = threadIdx.x % 32, pick = blockIdx.y;
  const int output = blockIdx.x * kMoeAnyWarps + threadIdx.x / 32;
  if (pick >= plan.expert_begin[experts] || output >= in) return;
  const auto weights = w2.Row(static_cast<int64_t>(ExpertOfPick(plan, experts, pick)) * in + output);
  const T* row = h + static_cast<int64_t>(pick) * inner;
  float sum = 0;
  for (int k = lane; k < inner; k += 32) sum = fmaf(ToFloat(row[k]), weights(k), sum);
  sum = WarpSum(sum);
  if (lane == 0) y[static_cast<int64_t>(pick) * in + output] = FromFloat<T>(sum);
}

}  // namespace k3::cuda
