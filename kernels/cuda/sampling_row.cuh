#pragma once

#include <climits>

#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/op_params.h"

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

// The entries that a small top_k keeps.
struct SampleChoice {
  SampleEntry kept[kSampleFewTop];  // best first, by their distance from the maximum
  int id_place[kSampleFewTop];      // of the kept entries in the order of ids
  int id_at[kSampleFewTop];         // ids in that order
  float by_id[kSampleFewTop];       // and weights
};

struct SampleShared {
  float4 exchange[2][kSampleBlocks];
  float2 partial[kSampleBlocks * kSampleWarps];  // of every warp of the row: ScanSlice's result
  SampleEntry warp_best[kSampleWarps];
  float warp_sum[kSampleWarps];
  unsigned count[kSampleBuckets], lack[kSampleBuckets];              // this block's
  unsigned total_count[kSampleBuckets], total_lack[kSampleBuckets];  // the cluster's
  union {
    SampleEntry list[kSampleList];                   // entries of the bucket with the cut
    SampleEntry few[kSampleBlocks][kSampleFewList];  // candidates for a small top_k: the block's, in block 0 all
    SampleEntry top[kSampleBlocks][kSampleMaxTop];   // the blocks' best raw logits, in block 0
  };
  unsigned list_lack[kSampleList];
  SampleChoice choice;
  int list_size;
  int found;      // bucket, or place in the list
  float missing;  // what the entries of that bucket must still bring
  SampleEntry cut;
};

// One row as a block of its cluster sees it: its slice of the logits, reductions over the row, and the outputs.
class SampleSliceView {
 protected:
  __device__ SampleSliceView(const SampleParams& p, SampleShared& s, float* slice, int row, int blocks)
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
  // The other blocks have started, so their shared memory may be written.
  __device__ void Join() {
    if (!running_) ClusterWait();
    running_ = true;
  }
  // Every block's value, by rank. Also a barrier of the cluster.
  __device__ const float4* Exchange(float4 value) {
    float4(&slots)[kSampleBlocks] = s_.exchange[parity_];
    parity_ ^= 1;
    Join();
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

}  // namespace k3::cuda
