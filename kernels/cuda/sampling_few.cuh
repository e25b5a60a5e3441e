#pragma once

#include "kernels/cuda/sampling_cut.cuh"

namespace k3::cuda {

// A row whose top_k is so small that one block can hold what it keeps.
class FewSampler : public SampleCuts {
 protected:
  using SampleCuts::SampleCuts;

  // A small top_k: each block offers the entries down to the bucket of its top_k-th largest thread maximum, which are
  // at least top_k where it has so many, so that the row's best are among them. Block 0 orders them and finishes alone.
  // False, for all blocks, when some block has too many to offer.
  __device__ bool ChooseAmongFew(float thread_top) {
    for (int b = threadIdx.x; b < kSampleBuckets; b += kSampleThreads) s_.total_count[b] = 0;
    if (threadIdx.x == 0) s_.list_size = 0;
    __syncthreads();
    if (thread_top > -INFINITY) atomicAdd(&s_.total_count[Bucket(thread_top)], 1u);
    __syncthreads();
    FindBucket<true>(static_cast<float>(row_.top_k), false, -1);
    // Where fewer threads have anything, the last bucket takes all.
    const int bound = s_.missing > static_cast<float>(s_.total_count[s_.found]) ? kSampleBuckets - 1 : s_.found;
    // Of those few, few pass: look at the largest of four first. The logit bound has room for rounding.
    const float least = bound == kSampleBuckets - 1
                            ? -INFINITY
                            : best_ - ((bound + 1) / 32.0f + 1e-3f) / inverse_temperature_ - 1e-6f * fabsf(best_);
    const auto offer = [&](float z, int i) {
      const float x = Distance(z);
      if (!(x > -INFINITY) || Bucket(x) > bound) return;
      const int place = atomicAdd(&s_.list_size, 1);
      if (place < kSampleFewList) s_.few[0][place] = {x, begin_ + i};
    };
#pragma unroll 2
    for (int i = threadIdx.x; i < packs_; i += kSampleThreads) {
      const float4 z = Slice(i);
      if (!(fmaxf(fmaxf(z.x, z.y), fmaxf(z.z, z.w)) >= least)) continue;
      offer(z.x, 4 * i);
      offer(z.y, 4 * i + 1);
      offer(z.z, 4 * i + 2);
      offer(z.w, 4 * i + 3);
    }
    __syncthreads();
    const float4* sizes = Exchange({static_cast<float>(s_.list_size), 0.0f, 0.0f, 0.0f});
    const auto size_of = [&](int b) { return static_cast<int>(sizes[b].x); };
    bool fits = true;
    for (int b = 0; b < blocks_; ++b) fits = fits && size_of(b) <= kSampleFewList;
    if (!fits) return false;
    // Block 0 takes the others' entries over; they wait for it.
    if (rank_ == 0) {
      for (int i = threadIdx.x; i < (blocks_ - 1) * kSampleFewList; i += kSampleThreads) {
        const int b = 1 + i / kSampleFewList, n = i % kSampleFewList;
        if (n < size_of(b)) s_.few[b][n] = InBlock(&s_, b)->few[0][n];
      }
    }
    ClusterArrive();
    ClusterWait();
    if (rank_ != 0) return true;

    // Buckets again bring the candidates down to little more than top_k; those are ordered by comparing all with all.
    for (int b = threadIdx.x; b < kSampleBuckets; b += kSampleThreads) s_.total_count[b] = 0;
    if (threadIdx.x == 0) s_.list_size = 0;
    __syncthreads();
    const auto for_candidates = [&](const auto& f) {
      for (int i = threadIdx.x; i < blocks_ * kSampleFewList; i += kSampleThreads) {
        if (i % kSampleFewList < size_of(i / kSampleFewList)) f(s_.few[i / kSampleFewList][i % kSampleFewList]);
      }
    };
    for_candidates([&](const SampleEntry& entry) { atomicAdd(&s_.total_count[Bucket(entry.value)], 1u); });
    __syncthreads();
    FindBucket<true>(static_cast<float>(row_.top_k), false, -1);
    const int last_bucket = s_.found;
    SampleEntry* close = reinterpret_cast<SampleEntry*>(x_);  // the slice is no longer needed
    for_candidates([&](const SampleEntry& entry) {
      if (Bucket(entry.value) <= last_bucket) close[atomicAdd(&s_.list_size, 1)] = entry;
    });
    __syncthreads();
    const int size = s_.list_size;
    const int kept = min(size, row_.top_k);
    for (int i = threadIdx.x; i < size; i += kSampleThreads) {
      const SampleEntry entry = close[i];
      int place = 0;
      for (int j = 0; j < size; ++j) place += EntryBefore(close[j], entry);
      if (place < kept) s_.warp_few[place] = entry;
    }
    __syncthreads();
    if (threadIdx.x < 32) ChooseOrdered(kept);
    return true;
  }

  // top_p, min_p and the draw among the `count` kept entries s_.warp_few, best first, by one warp.
  __device__ void ChooseOrdered(int count) {
    const int lane = threadIdx.x;
    const auto weight_of = [&](int i) { return i < count ? __expf(s_.warp_few[i].value) : 0.0f; };
    // Two neighbours a lane, so that running sums are in order.
    float weight[2] = {weight_of(2 * lane), weight_of(2 * lane + 1)};
    float before[2];
    const float total = RunningSums(weight, before, lane);
    const float wanted = row_.top_p < 1 ? row_.top_p * total : INFINITY;
    const float floor = row_.min_p > 0 ? logf(row_.min_p) : -INFINITY;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * lane + e;
      const bool keep = i < count && (before[e] < wanted || i == 0) && s_.warp_few[i].value >= floor;
      if (!keep) weight[e] = 0;
      s_.warp_weight[i] = weight[e];
    }
    __syncwarp();
    const float kept_total = RunningSums(weight, before, lane);
    // In the order of ids: the drawn entry is the last with weight before whose weights the target is not passed.
    const float target = row_.uniform * kept_total;
    float best_before = -1;
    int best_id = -1;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (!(weight[e] > 0)) continue;
      const int id = s_.warp_few[2 * lane + e].id;
      float sum = 0;
      for (int j = 0; j < count; ++j) {
        if (s_.warp_few[j].id < id) sum += s_.warp_weight[j];
      }
      if (sum <= target && (sum > best_before || (sum == best_before && id > best_id))) {
        best_before = sum;
        best_id = id;
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float other_before = __shfl_xor_sync(kAllLanes, best_before, offset);
      const int other_id = __shfl_xor_sync(kAllLanes, best_id, offset);
      if (other_before > best_before || (other_before == best_before && other_id > best_id)) {
        best_before = other_before;
        best_id = other_id;
      }
    }
    if (lane == 0) Choose(best_id);
  }
  // before[e]: sum of the values ahead of (lane, e) in the order of lanes; returns the sum of all.
  static __device__ float RunningSums(const float (&value)[2], float (&before)[2], int lane) {
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
};

}  // namespace k3::cuda
