#pragma once

#include <climits>

#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/op_params.h"

// Sampling: a cluster of blocks owns a row and keeps it in shared memory, each block a slice of consecutive ids, so
// that the logits are read once. Sums run in fixed orders and the histograms below are of integers, hence the result
// depends on the row alone.
//
// The order of entries is by value, then by lower id. A filter is a Cut, the last entry that it keeps. To find one, the
// kept entries are counted into buckets by their distance x <= 0 from the maximum, 1/32 apart. All weights of a bucket
// lie within 3.1 % of its largest, so its mass is kept as a count and a fixed-point sum of what the weights lack.
namespace k3::cuda {

constexpr int kSampleThreads = 512;
constexpr int kSampleWarps = kSampleThreads / 32;
constexpr int kSampleBlocks = 8;  // of a cluster, for large vocabularies
constexpr int kSampleBuckets = 1024;
constexpr int kSampleList = 512;  // entries that are ordered by comparing all with all
constexpr int kSampleMaxTop = 128;
constexpr int kSampleFewTop = 64;               // top_k up to which the kept entries are gathered in one block at once
constexpr int kSampleFewList = 256;             // a block's candidates for them
constexpr float kLog2Of = 1.4426950408889634f;  // of e
constexpr float kLackUnit = 1.0f / (1 << 19);

// Ids of a block: a multiple of 4, so that slices are moved 16 bytes at a time; the last may end in -inf.
__host__ __device__ constexpr int SampleSlice(int vocab, int blocks) {
  return ((vocab + blocks - 1) / blocks + 3) / 4 * 4;
}

struct SampleEntry {
  float value;
  int id;
};
__device__ __forceinline__ bool EntryBefore(const SampleEntry& a, const SampleEntry& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

struct SampleShared {
  float4 exchange[2][kSampleBlocks];
  SampleEntry warp_best[kSampleWarps];
  float warp_sum[kSampleWarps];
  unsigned count[kSampleBuckets], lack[kSampleBuckets];              // this block's
  unsigned total_count[kSampleBuckets], total_lack[kSampleBuckets];  // the cluster's
  union {
    SampleEntry list[kSampleList];                   // entries of the bucket with the cut
    SampleEntry few[kSampleBlocks][kSampleFewList];  // candidates for a small top_k: the block\'s, in block 0 all
    SampleEntry top[kSampleBlocks][kSampleMaxTop];   // the blocks' best raw logits, in block 0
  };
  unsigned list_lack[kSampleList];
  SampleEntry warp_few[kSampleFewTop];  // kept entries of a small top_k, best first
  float warp_weight[kSampleFewTop];
  int list_size;
  int found;      // bucket, or place in the list
  float missing;  // what the entries of that bucket must still bring
  SampleEntry cut;
};

// One row as a block sees it.
class RowSampler {
 public:
  __device__ RowSampler(const SampleParams& p, SampleShared& s, float* slice, int row, int blocks)
      : p_(p),
        s_(s),
        x_(slice),
        row_(p.rows[row]),
        index_(row),
        blocks_(blocks),
        rank_(static_cast<int>(ClusterRank())) {
    vocab_ = static_cast<int>(p.logits.cols);
    const int per_block = SampleSlice(vocab_, blocks);
    begin_ = min(vocab_, rank_ * per_block);
    size_ = min(vocab_ - begin_, per_block);
    packs_ = (size_ + 3) / 4;
    logits_ = static_cast<const float*>(p.logits.data) + row * p.logits.ld;
  }

  __device__ void Run() {
    if (rank_ == 0) Clear();
    // Raw statistics: maximum, sum of exponentials, anything that is not a number below +inf.
    float own_top = -INFINITY;
    bool bad = false;
    const float* from = logits_ + begin_;
    const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0;
#pragma unroll 5
    for (int i = threadIdx.x; i < packs_; i += kSampleThreads) {
      float4 z;
      if (aligned && 4 * i + 3 < size_) {
        z = *reinterpret_cast<const float4*>(from + 4 * i);
      } else {
        z.x = from[4 * i];
        z.y = 4 * i + 1 < size_ ? from[4 * i + 1] : -INFINITY;
        z.z = 4 * i + 2 < size_ ? from[4 * i + 2] : -INFINITY;
        z.w = 4 * i + 3 < size_ ? from[4 * i + 3] : -INFINITY;
      }
      Slice(i) = z;
      bad |= !(z.x < INFINITY) || !(z.y < INFINITY) || !(z.z < INFINITY) || !(z.w < INFINITY);
      own_top = fmaxf(own_top, fmaxf(fmaxf(z.x, z.y), fmaxf(z.z, z.w)));
    }
    const float top = BlockBest({own_top, 0}).value;
    float sum = 0;
    if (top > -INFINITY) {
      const auto power = [&](float z) { return Exp2((z - top) * kLog2Of); };
#pragma unroll 5
      for (int i = threadIdx.x; i < packs_; i += kSampleThreads) {
        const float4 z = Slice(i);
        sum += (power(z.x) + power(z.y)) + (power(z.z) + power(z.w));
      }
    }
    sum = BlockTotal(sum);
    const bool block_bad = __syncthreads_or(bad) != 0;
    const float4* all = Exchange({top, sum, block_bad ? 1.0f : 0.0f, 0.0f});
    float raw_top = -INFINITY;
    bool any_bad = false;
    for (int b = 0; b < blocks_; ++b) {
      raw_top = fmaxf(raw_top, all[b].x);
      any_bad |= all[b].z != 0;
    }
    if (any_bad || !(raw_top > -INFINITY)) return Finish(SampleStatus::kNonFinite);
    float total = 0;
    for (int b = 0; b < blocks_; ++b) total += all[b].y > 0 ? all[b].y * __expf(all[b].x - raw_top) : 0.0f;
    raw_top_ = raw_top;
    log_sum_ = logf(total);

    if (row_.top_logprobs > 0) TopLogprobs(min(min(row_.top_logprobs, p_.max_top_logprobs), kSampleMaxTop));
    if (row_.logprob_of >= 0 && row_.logprob_of < vocab_ && First()) p_.logprob[index_] = Logprob(row_.logprob_of);
    if (row_.draw == 0) return Finish(SampleStatus::kOk);

    const bool greedy = row_.temperature <= 0 || row_.top_k == 1;
    const bool edited = row_.edit_begin < row_.edit_end || row_.mask_row >= 0;
    SampleEntry best{raw_top, 0};
    if (edited || greedy) {
      if (edited) {
        Edit();
        own_top = ThreadTop();
      }
      best = ClusterBest(Best([](const SampleEntry&) { return true; }));
      if (!(best.value > -INFINITY)) return Finish(SampleStatus::kNothingAllowed);
    }
    if (greedy) {
      if (First()) Choose(best.id);
      return;
    }

    best_ = best.value;
    inverse_temperature_ = 1.0f / fmaxf(row_.temperature, 1e-37f);
    cut_ = {-INFINITY, -1};
    if (row_.top_k > 0 && row_.top_k <= kSampleFewTop && ChooseAmongFew(Distance(own_top))) return;
    for (int i = threadIdx.x; i < packs_; i += kSampleThreads) {
      const float4 z = Slice(i);
      Slice(i) = {Distance(z.x), Distance(z.y), Distance(z.z), Distance(z.w)};
    }
    __syncthreads();
    if (row_.top_k > 0 && row_.top_k < vocab_) CutAt<true>(static_cast<float>(row_.top_k));
    if (row_.top_p < 1) CutAt<false>(row_.top_p);
    if (row_.min_p > 0 && logf(row_.min_p) > cut_.value) cut_ = {logf(row_.min_p), INT_MAX};
    Draw();
  }

 private:
  __device__ float4& Slice(int pack) const { return reinterpret_cast<float4*>(x_)[pack]; }
  // From the maximum, in units of temperature: at most 0.
  __device__ float Distance(float z) const { return (z - best_) * inverse_temperature_; }
  __device__ float ThreadTop() const {
    float top = -INFINITY;
    for (int i = threadIdx.x; i < packs_; i += kSampleThreads) {
      const float4 z = Slice(i);
      top = fmaxf(top, fmaxf(fmaxf(z.x, z.y), fmaxf(z.z, z.w)));
    }
    return top;
  }
  __device__ bool First() const { return rank_ == 0 && threadIdx.x == 0; }
  __device__ float Logprob(int id) const { return logits_[id] - raw_top_ - log_sum_; }
  __device__ bool Kept(float x, int id) const { return x > cut_.value || (x == cut_.value && id <= cut_.id); }

  __device__ void Clear() {
    if (threadIdx.x == 0) {
      p_.token[index_] = -1;
      p_.logprob[index_] = __uint_as_float(0x7fc00000u);
    }
    for (int i = threadIdx.x; i < p_.max_top_logprobs; i += kSampleThreads) {
      p_.top_ids[static_cast<int64_t>(index_) * p_.max_top_logprobs + i] = -1;
      p_.top_logprobs[static_cast<int64_t>(index_) * p_.max_top_logprobs + i] = __uint_as_float(0x7fc00000u);
    }
    __syncthreads();
  }
  __device__ void Finish(SampleStatus status) {
    if (First()) p_.status[index_] = static_cast<int32_t>(status);
  }
  // By one thread of the cluster.
  __device__ void Choose(int id) {
    p_.status[index_] = static_cast<int32_t>(SampleStatus::kOk);
    p_.token[index_] = id;
    if (row_.logprob_of < 0) p_.logprob[index_] = Logprob(id);
  }

  // --- reductions: every thread gets the result ---

  __device__ SampleEntry BlockBest(SampleEntry entry) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const SampleEntry other{__shfl_xor_sync(kAllLanes, entry.value, offset),
                              __shfl_xor_sync(kAllLanes, entry.id, offset)};
      if (EntryBefore(other, entry)) entry = other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) s_.warp_best[threadIdx.x / 32] = entry;
    __syncthreads();
    entry = s_.warp_best[0];
    for (int w = 1; w < kSampleWarps; ++w) {
      if (EntryBefore(s_.warp_best[w], entry)) entry = s_.warp_best[w];
    }
    return entry;
  }
  __device__ float BlockTotal(float value) {
    value = WarpSum(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) s_.warp_sum[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0;
    for (int w = 0; w < kSampleWarps; ++w) total += s_.warp_sum[w];
    return total;
  }
  // Every block's value, by rank. Also a barrier of the cluster.
  __device__ const float4* Exchange(float4 value) {
    float4(&slots)[kSampleBlocks] = s_.exchange[parity_];
    parity_ ^= 1;
    if (!running_) ClusterWait();  // the other blocks have started, so their shared memory may be written
    running_ = true;
    if (static_cast<int>(threadIdx.x) < blocks_) *InBlock(&slots[rank_], threadIdx.x) = value;
    ClusterArrive();
    ClusterWait();
    return slots;
  }
  __device__ SampleEntry ClusterBest(SampleEntry entry) {
    const float4* all = Exchange({entry.value, __int_as_float(entry.id), 0.0f, 0.0f});
    entry = {all[0].x, __float_as_int(all[0].y)};
    for (int b = 1; b < blocks_; ++b) {
      const SampleEntry other{all[b].x, __float_as_int(all[b].y)};
      if (EntryBefore(other, entry)) entry = other;
    }
    return entry;
  }
  // The block's best entry for which `wanted` holds.
  template <typename F>
  __device__ SampleEntry ThreadBest(const F& wanted) const {
    SampleEntry best{-INFINITY, INT_MAX};
    for (int i = threadIdx.x; i < size_; i += kSampleThreads) {
      const SampleEntry entry{x_[i], begin_ + i};
      if (EntryBefore(entry, best) && wanted(entry)) best = entry;
    }
    return best;
  }
  template <typename F>
  __device__ SampleEntry Best(const F& wanted) {
    return BlockBest(ThreadBest(wanted));
  }

  // --- steps ---

  __device__ void TopLogprobs(int count) {
    SampleEntry own = ThreadBest([](const SampleEntry&) { return true; });
    for (int n = 0; n < count; ++n) {
      const SampleEntry best = BlockBest(own);
      if (threadIdx.x == 0) InBlock(&s_, 0)->top[rank_][n] = best;
      if (own.id == best.id) own = ThreadBest([&](const SampleEntry& entry) { return EntryBefore(best, entry); });
    }
    Exchange({});
    if (rank_ == 0) {
      // Each entry's place is the number of entries before it. Slices with fewer entries end in fillers.
      for (int i = threadIdx.x; i < blocks_ * count; i += kSampleThreads) {
        const SampleEntry entry = s_.top[i / count][i % count];
        if (entry.id == INT_MAX) continue;
        int place = 0;
        for (int b = 0; b < blocks_; ++b) {
          for (int n = 0; n < count && place < count; ++n) place += EntryBefore(s_.top[b][n], entry);
        }
        if (place < count) {
          const int64_t to = static_cast<int64_t>(index_) * p_.max_top_logprobs + place;
          p_.top_ids[to] = entry.id;
          p_.top_logprobs[to] = entry.value - raw_top_ - log_sum_;
        }
      }
    }
    __syncthreads();
  }

  // Penalties, then biases, then the mask. Ids of one kind are distinct within a row.
  __device__ void Edit() {
    for (int kind = 0; kind < 2; ++kind) {
      for (int e = row_.edit_begin + static_cast<int>(threadIdx.x); e < row_.edit_end; e += kSampleThreads) {
        const LogitEdit edit = p_.edits[e];
        if (static_cast<int>(edit.kind) != kind || edit.id < begin_ || edit.id >= begin_ + size_) continue;
        float z = x_[edit.id - begin_];
        if (edit.kind == LogitEditKind::kBias) {
          z += edit.value;
        } else {
          if (edit.count > 0 || edit.in_prompt != 0) {
            z = z > 0 ? z / row_.repetition_penalty : z * row_.repetition_penalty;
          }
          if (edit.count > 0) {
            z -= row_.presence_penalty;
            z -= row_.frequency_penalty * static_cast<float>(edit.count);
          }
        }
        x_[edit.id - begin_] = z;
      }
      __syncthreads();
    }
    if (row_.mask_row >= 0) {
      const uint32_t* mask = p_.allowed_mask + static_cast<int64_t>(row_.mask_row) * ((vocab_ + 31) / 32);
      for (int i = threadIdx.x; i < size_; i += kSampleThreads) {
        const int id = begin_ + i;
        if ((mask[id / 32] >> (id % 32) & 1) == 0) x_[i] = -INFINITY;
      }
      __syncthreads();
    }
  }

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

  // Inverse transform over the kept ids in ascending order. Each warp sums a stretch of consecutive ids; the warp whose
  // stretch holds the target walks it.
  __device__ void Draw() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int stretch = (size_ + kSampleThreads - 1) / kSampleThreads * 32;
    const int from = min(size_, warp * stretch), to = min(size_, from + stretch);
    const auto weight = [&](int i) { return i < to && Kept(x_[i], begin_ + i) ? __expf(x_[i]) : 0.0f; };
    float sum = 0;
    for (int i = from; i < to; i += 32) sum += weight(i + lane);
    sum = WarpSum(sum);
    __syncthreads();
    if (lane == 0) s_.warp_sum[warp] = sum;
    __syncthreads();
    float block_sum = 0, before_warp = 0;
    for (int w = 0; w < kSampleWarps; ++w) {
      if (w < warp) before_warp += s_.warp_sum[w];
      block_sum += s_.warp_sum[w];
    }
    const float4* all = Exchange({block_sum, 0.0f, 0.0f, 0.0f});
    float total = 0;
    for (int b = 0; b < blocks_; ++b) total += all[b].x;
    const float target = row_.uniform * total;
    // The owner is the last block, then warp, with weight whose sum before does not exceed the target.
    int owner = -1;
    float before = 0, before_owner = 0;
    for (int b = 0; b < blocks_; ++b) {
      if (all[b].x > 0 && (owner < 0 || before <= target)) {
        owner = b;
        before_owner = before;
      }
      before += all[b].x;
    }
    if (owner != rank_) return;
    int owner_warp = -1;
    float partial = before_owner;
    for (int w = 0; w < kSampleWarps; ++w) {
      if (s_.warp_sum[w] > 0 && (owner_warp < 0 || partial <= target)) {
        owner_warp = w;
        before = partial;
      }
      partial += s_.warp_sum[w];
    }
    if (warp != owner_warp) return;
    int chosen = -1;
    for (int base = from; base < to; base += 32) {
      const float own = weight(base + lane);
      float through = own;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float other = __shfl_up_sync(kAllLanes, through, offset);
        if (lane >= offset) through += other;
      }
      const unsigned kept = __ballot_sync(kAllLanes, own > 0);
      const unsigned crossed = __ballot_sync(kAllLanes, own > 0 && before + through > target);
      if (crossed != 0) {
        chosen = begin_ + base + __ffs(static_cast<int>(crossed)) - 1;
        break;
      }
      if (kept != 0) chosen = begin_ + base + 31 - __clz(static_cast<int>(kept));
      before += __shfl_sync(kAllLanes, through, 31);
    }
    if (lane == 0) Choose(chosen);
  }

  const SampleParams& p_;
  SampleShared& s_;
  float* x_;  // the block's slice: raw logits, edited logits, then their distances
  const SampleRow row_;
  const int index_;
  const int blocks_;
  const int rank_;
  int vocab_, begin_, size_, packs_;
  const float* logits_;
  float raw_top_ = 0, log_sum_ = 0;
  float best_ = 0, inverse_temperature_ = 1;  // of the edited logits
  SampleEntry cut_{};
  int parity_ = 0;
  bool running_ = false;
};

// Grid (rows * blocks) in clusters of `blocks`.
__global__ void __launch_bounds__(kSampleThreads) SampleKernel(SampleParams p, int blocks) {
  SampleShared& s = *DynamicShared<SampleShared>();
  float* slice = reinterpret_cast<float*>(&s + 1);
  ClusterArrive();
  RowSampler(p, s, slice, blockIdx.x / blocks, blocks).Run();
}

}  // namespace k3::cuda
