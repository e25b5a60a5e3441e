#pragma once

#include "kernels/cuda/sampling_row.cuh"

// The end of every row with a small top_k, whichever way its entries were found: top_p, min_p and the draw among the
// few that are kept.
namespace k3::cuda {

// before[e]: sum of the values ahead of (lane, e) in the order of lanes; returns the sum of all.
__device__ __forceinline__ float SampleRunningSums(const float (&value)[2], float (&before)[2], int lane) {
  const float own = value[0] + value[1];
  float through = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float other = __shfl_up_sync(kAllLanes, through, offset);
    if (lane >= offset) through += other;
  }
  before[0] = through - own;
  before[1] = before[0] + value[0];
  return __shfl_sync(kAllLanes, through, 31);
}

// Orders `list`, of which the best `count` are kept, by comparing all with all. By the whole block, with a barrier at
// its end; `distance` makes the kept values.
template <typename F>
__device__ void SampleOrder(SampleChoice& s, const SampleEntry* list, int size, int count, const F& distance) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (int i = warp; i < size; i += warps) {
    const SampleEntry entry = list[i];
    int place = 0;
    for (int base = 0; base < size; base += 32) {
      const int j = min(base + lane, size - 1);
      place += __popc(__ballot_sync(kAllLanes, base + lane < size && EntryBefore(list[j], entry)));
    }
    if (lane == 0 && place < count) s.kept[place] = {distance(entry.value), entry.id};
  }
  __syncthreads();
  for (int i = warp; i < count; i += warps) {
    const int id = s.kept[i].id;
    int place = 0;
#pragma unroll
    for (int base = 0; base < kSampleFewTop; base += 32) {
      place += __popc(__ballot_sync(kAllLanes, base + lane < count && s.kept[base + lane].id < id));
    }
    if (lane == 0) {
      s.id_place[i] = place;
      s.id_at[place] = id;
    }
  }
  __syncthreads();
}

// The id drawn among the `count` entries of s.kept, by one warp.
__device__ inline int SampleDrawOrdered(SampleChoice& s, int count, const SampleRow& row, int lane) {
  // Two neighbours a lane, so that running sums are in order.
  float value[2], weight[2], before[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * lane + e;
    value[e] = i < count ? s.kept[i].value : -INFINITY;
    weight[e] = __expf(value[e]);
    s.by_id[i] = 0;
  }
  __syncwarp();
  const float total = SampleRunningSums(weight, before, lane);
  const float wanted = row.top_p < 1 ? row.top_p * total : INFINITY;
  const float floor = row.min_p > 0 ? logf(row.min_p) : -INFINITY;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * lane + e;
    if (i < count && (before[e] < wanted || i == 0) && value[e] >= floor) s.by_id[s.id_place[i]] = weight[e];
  }
  __syncwarp();
  weight[0] = s.by_id[2 * lane];
  weight[1] = s.by_id[2 * lane + 1];
  const float target = row.uniform * SampleRunningSums(weight, before, lane);
  // The last with weight before whose weights the target is not passed.
  int best = 0;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (weight[e] > 0 && before[e] <= target) best = 2 * lane + e;
  }
  return s.id_at[__reduce_max_sync(kAllLanes, best)];
}

}  // namespace k3::cuda
