#pragma once

#include "kernels/cuda/sampling_choice.cuh"
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
    ChooseAmong(close, size);
    return true;
  }

  // After the cut of a small top_k: block 0 gathers what is left.
  __device__ void ChooseAmongKept() {
    if (threadIdx.x == 0) s_.list_size = 0;
    Exchange({});
    SampleShared* first = InBlock(&s_, 0);
    for (int i = threadIdx.x; i < size_; i += kSampleThreads) {
      if (x_[i] > -INFINITY && Kept(x_[i], begin_ + i))
        first->list[atomicAdd(&first->list_size, 1)] = {x_[i], begin_ + i};
    }
    Exchange({});
    if (rank_ == 0) ChooseAmong(s_.list, s_.list_size);
  }

 private:
  __device__ void ChooseAmong(const SampleEntry* list, int size) {
    const int kept = min(size, row_.top_k);
    SampleOrder(s_.choice, list, size, kept, [](float x) { return x; });
    if (threadIdx.x >= 32) return;
    const int id = SampleDrawOrdered(s_.choice, kept, row_, threadIdx.x);
    if (threadIdx.x == 0) Choose(id);
  }
};

}  // namespace k3::cuda
