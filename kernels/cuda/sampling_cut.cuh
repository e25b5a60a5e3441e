#pragma once

#include "kernels/cuda/sampling_row.cuh"

// The order of entries is by value, then by lower id. A filter is a Cut, the last entry that it keeps. To find one, the
// kept entries are counted into buckets by their distance x <= 0 from the maximum, 1/32 apart. All weights of a bucket
// lie within 3.1 % of its largest, so its mass is kept as a count and a fixed-point sum of what the weights lack.
namespace k3::cuda {

class SampleCuts : public SampleSliceView {
 protected:
  using SampleSliceView::SampleSliceView;

  static __device__ int Bucket(float x) {
    return x > -(kSampleBuckets / 32) ? static_cast<int>(x * -32.0f) : kSampleBuckets - 1;
  }
  // What the weight of x lacks of its bucket's largest weight, in units. The last bucket weighs nothing.
  static __device__ unsigned Lack(float x, int bucket) {
    if (bucket == kSampleBuckets - 1) return 0;
    return static_cast<unsigned>((1.0f - fminf(1.0f, __expf(x + bucket / 32.0f))) / kLackUnit + 0.5f);
  }
  // Mass of `count` entries of level-one bucket `bucket` in units of the maximum's weight.
  static __device__ float Mass(int bucket, unsigned count, unsigned lack) {
    if (bucket == kSampleBuckets - 1) return 0;
    return __expf(-bucket / 32.0f) * (static_cast<float>(count) - static_cast<float>(lack) * kLackUnit);
  }

  // Fills count and lack by `bucket_of` (-1: not counted) with the lack taken within `lack_bucket_of`, then totals of
  // the cluster: block r adds up its share of the buckets over all blocks.
  template <typename F, typename G>
  __device__ void Histogram(const F& bucket_of, const G& lack_bucket_of) {
    for (int b = threadIdx.x; b < kSampleBuckets; b += kSampleThreads) s_.count[b] = s_.lack[b] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < size_; i += kSampleThreads) {
      const float x = x_[i];
      if (!Kept(x, begin_ + i)) continue;
      const int bucket = bucket_of(x);
      if (bucket < 0) continue;
      atomicAdd(&s_.count[bucket], 1u);
      atomicAdd(&s_.lack[bucket], Lack(x, lack_bucket_of(x)));
    }
    Exchange({});
    const int share = kSampleBuckets / blocks_;
    for (int i = threadIdx.x; i < share; i += kSampleThreads) {
      const int bucket = rank_ * share + i;
      unsigned count = 0, lack = 0;
      for (int b = 0; b < blocks_; ++b) {
        const SampleShared* other = InBlock(&s_, b);
        count += other->count[bucket];
        lack += other->lack[bucket];
      }
      for (int b = 0; b < blocks_; ++b) {
        SampleShared* other = InBlock(&s_, b);
        other->total_count[bucket] = count;
        other->total_lack[bucket] = lack;
      }
    }
    Exchange({});
  }

  // Finds the last bucket before whose entries the running sum over the totals is below `wanted` (of the whole when
  // `fraction`), and leaves it in s_.found with what is still missing there in s_.missing. Whatever the rounding, there
  // is one. `level_one` < 0: bucket b of the totals is level-one bucket b.
  template <bool kRank>
  __device__ void FindBucket(float wanted, bool fraction, int level_one) {
    constexpr int kPer = kSampleBuckets / kSampleThreads;
    float own[kPer];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int b = threadIdx.x * kPer + i;
      own[i] = kRank ? static_cast<float>(s_.total_count[b])
                     : Mass(level_one < 0 ? b : level_one, s_.total_count[b], s_.total_lack[b]);
      sum += own[i];
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float before = sum;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_up_sync(kAllLanes, before, offset);
      if (lane >= offset) before += other;
    }
    __syncthreads();
    if (lane == 31) s_.warp_sum[warp] = before;
    if (threadIdx.x == 0) s_.found = 0;
    __syncthreads();
    before -= sum;
    float total = 0;
    for (int w = 0; w < kSampleWarps; ++w) {
      if (w < warp) before += s_.warp_sum[w];
      total += s_.warp_sum[w];
    }
    if (fraction) wanted *= total;
    float missing[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      missing[i] = wanted - before;
      if (own[i] > 0 && before < wanted) atomicMax(&s_.found, static_cast<int>(threadIdx.x) * kPer + i);
      before += own[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (s_.found == static_cast<int>(threadIdx.x) * kPer + i) s_.missing = missing[i];
    }
    __syncthreads();
  }

  // Raises the cut: keeps the best `wanted` of the kept entries (kRank), or the shortest prefix that
  // holds the fraction `wanted` of their mass.
  template <bool kRank>
  __device__ void CutAt(float wanted) {
    Histogram([](float x) { return Bucket(x); }, [](float x) { return Bucket(x); });
    FindBucket<kRank>(wanted, !kRank, -1);
    const int bucket = s_.found;
    unsigned entries = s_.total_count[bucket];
    // Key range of the entries that may be the cut; all of level-one bucket `bucket`.
    uint32_t low = Key(-INFINITY), high = Key(0.0f);
    while (entries > kSampleList && low < high) {
      const uint32_t range = high - low;
      const int shift = max(0, 32 - __clz(static_cast<int>(range)) - 10);
      const auto sub_bucket = [&](float x) {
        const uint32_t key = Key(x);
        return Bucket(x) == bucket && key >= low && key <= high ? static_cast<int>((high - key) >> shift) : -1;
      };
      const float missing = s_.missing;
      Histogram(sub_bucket, [&](float) { return bucket; });
      FindBucket<kRank>(missing, false, bucket);
      entries = s_.total_count[s_.found];
      high -= static_cast<uint32_t>(s_.found) << shift;
      low = max(low, high - ((1u << shift) - 1));
    }
    if (entries <= kSampleList) {
      CutInList<kRank>(bucket, low, high);
    } else {
      CutAmongEqual<kRank>(bucket, high);
    }
  }

  static __device__ uint32_t Key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);  // one zero
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  }

  // Every block gathers the entries with keys in [low, high] and orders them.
  template <bool kRank>
  __device__ void CutInList(int bucket, uint32_t low, uint32_t high) {
    if (threadIdx.x == 0) s_.list_size = 0;
    Exchange({});
    for (int i = threadIdx.x; i < size_; i += kSampleThreads) {
      const float x = x_[i];
      if (!Kept(x, begin_ + i) || Bucket(x) != bucket || Key(x) < low || Key(x) > high) continue;
      const unsigned lack = Lack(x, bucket);
      for (int b = 0; b < blocks_; ++b) {
        SampleShared* other = InBlock(&s_, b);
        const int place = atomicAdd(&other->list_size, 1);
        other->list[place] = {x, begin_ + i};
        other->list_lack[place] = lack;
      }
    }
    Exchange({});
    const int size = s_.list_size;
    const float missing = s_.missing;
    // The list's order is free, and so are sums of integers.
    for (int i = threadIdx.x; i < size; i += kSampleThreads) {
      const SampleEntry entry = s_.list[i];
      unsigned count = 0, lack = 0;
      for (int j = 0; j < size; ++j) {
        if (!EntryBefore(s_.list[j], entry)) continue;
        ++count;
        lack += s_.list_lack[j];
      }
      const float before = kRank ? static_cast<float>(count) : Mass(bucket, count, lack);
      const float through = kRank ? static_cast<float>(count + 1) : Mass(bucket, count + 1, lack + s_.list_lack[i]);
      const bool crossing = (before < missing || count == 0) && through >= missing;
      const bool rest = static_cast<int>(count) + 1 == size && through < missing;
      if (crossing || rest) s_.cut = entry;
    }
    __syncthreads();
    cut_ = s_.cut;
    __syncthreads();
  }

  // More equal values than the list holds: the lowest ids among them stay.
  template <bool kRank>
  __device__ void CutAmongEqual(int bucket, uint32_t key) {
    const float value = __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
    const float each = kRank ? 1.0f : Mass(bucket, 1, Lack(value, bucket));
    const float wanted = each > 0 ? fmaxf(1.0f, ceilf(s_.missing / each)) : INFINITY;
    const auto equal = [&](int i) { return i < size_ && x_[i] == value && Kept(x_[i], begin_ + i); };
    int own = 0;
    for (int i = threadIdx.x; i < size_; i += kSampleThreads) own += equal(i);
    const float4* all = Exchange({BlockTotal(static_cast<float>(own)), 0.0f, 0.0f, 0.0f});
    float before = 0;
    for (int b = 0; b < rank_; ++b) before += all[b].x;
    const float in_block = all[rank_].x;
    SampleEntry last{value, INT_MAX};
    if (before < wanted && before + in_block >= wanted) {
      // The wanted id is in this slice; one warp counts to it.
      if (threadIdx.x < 32) {
        const int rest = static_cast<int>(wanted - before);
        int seen = 0;
        for (int base = 0; base < size_; base += 32) {
          const unsigned found = __ballot_sync(kAllLanes, equal(base + static_cast<int>(threadIdx.x)));
          if (seen + __popc(found) >= rest) {
            unsigned bits = found;
            for (int i = 1; i < rest - seen; ++i) bits &= bits - 1;
            if (threadIdx.x == 0) s_.cut = {value, begin_ + base + __ffs(static_cast<int>(bits)) - 1};
            break;
          }
          seen += __popc(found);
        }
      }
      __syncthreads();
      last = s_.cut;
    }
    const float4* cuts = Exchange({__int_as_float(last.id), 0.0f, 0.0f, 0.0f});
    for (int b = 0; b < blocks_; ++b) last.id = min(last.id, __float_as_int(cuts[b].x));
    cut_ = last;
    __syncthreads();
  }
};

}  // namespace k3::cuda
