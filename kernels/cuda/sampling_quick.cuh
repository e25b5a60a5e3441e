#pragma once

#include "kernels/cuda/sampling_choice.cuh"
#include "kernels/cuda/sampling_scan.cuh"

namespace k3::cuda {

constexpr int kQuickBuckets = 256;
constexpr int kQuickGroups = 256;      // groups of a block that may hold candidates
constexpr int kQuickCandidates = 256;  // of a block

struct QuickShared {
  float2 partial[kSampleBlocks * kSampleWarps];  // ScanResult of every warp of the row; of others in block 0 only
  unsigned count[2][kQuickBuckets];
  int groups_size, candidates, close_size;
  float log_sum;            // of exponentials relative to the maximum; infinite where there is no distribution
  int sent[kSampleBlocks];  // candidates of each block, or more than fit
  int groups[kQuickGroups];
  SampleEntry candidate[kSampleBlocks][kQuickCandidates];  // in block 0 of all
  SampleEntry close[kSampleBlocks * kQuickCandidates];     // those near the best top_k
  SampleChoice choice;
};

// Rows that need few entries only: greedy ones and those with a small top_k, unedited, without a list of the best. The
// row is read once. Each thread reads groups of 20 logits and leaves their maxima in shared memory; the k-th largest of
// these bounds the k-th largest entry, so that only groups above it are looked at again. Every block of the cluster
// sends the first block what may be among the row's best.
template <int kThreads>
class QuickSampler {
 public:
  static __device__ bool Takes(const SampleRow& row) {
    const bool few = row.top_k > 0 && row.top_k <= kSampleFewTop;
    return row.top_logprobs <= 0 && row.edit_begin >= row.edit_end && row.mask_row < 0 &&
           (row.draw == 0 || row.temperature <= 0 || few);
  }
  // Shared memory of a block with `slices` slices.
  static __host__ __device__ size_t SharedBytes(int slices, int slice) {
    return sizeof(QuickShared) + static_cast<size_t>(slices) * ScanBatches(slice) * kSampleThreads * sizeof(float);
  }

  // `slices` of the row, shared by the `blocks` blocks of the cluster.
  __device__ QuickSampler(const SampleParams& p, QuickShared& s, const SampleRow& row, int index, int slices,
                          int blocks)
      : p_(p),
        s_(s),
        group_top_(reinterpret_cast<float*>(&s + 1)),
        row_(row),
        index_(index),
        slices_(slices),
        blocks_(blocks),
        rank_(blocks > 1 ? static_cast<int>(ClusterRank()) : 0) {
    vocab_ = static_cast<int>(p.logits.cols);
    slice_ = SampleSlice(vocab_, slices);
    batches_ = ScanBatches(slice_);
    logits_ = static_cast<const float*>(p.logits.data) + index * p.logits.ld;
  }

  // Asks for the cache lines of a block's only slice, so that they are on their way while the row's parameters are.
  static __device__ void Prefetch(const SampleParams& p, int index, int slices, int slice_index) {
    const int vocab = static_cast<int>(p.logits.cols), slice = SampleSlice(vocab, slices);
    const float* row = static_cast<const float*>(p.logits.data) + index * p.logits.ld;
    const int begin = slice_index * slice, end = min(vocab, begin + slice);
    for (int i = begin + 32 * static_cast<int>(threadIdx.x); i < end; i += 32 * kThreads) PrefetchL2(row + i);
  }

  // The cluster has arrived once. False, for all blocks, when some block has too many candidates: nothing is written.
  __device__ bool Run() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < 2 * kQuickBuckets; i += kThreads) (&s_.count[0][0])[i] = 0;
    if (threadIdx.x == 0) s_.groups_size = s_.candidates = s_.close_size = 0;
    const int own_slices = slices_ / blocks_, first = rank_ * own_slices;
    const int t = threadIdx.x % kSampleThreads, part = threadIdx.x / kSampleThreads;
    bool started = blocks_ == 1;
    for (int n = part; n < own_slices; n += kThreads / kSampleThreads) {
      const int begin = min(vocab_, (first + n) * slice_);
      float* tops = group_top_ + n * batches_ * kSampleThreads;
      const float2 result =
          ScanSlice(logits_ + begin, min(slice_, vocab_ - begin), t,
                    [&](int batch, float top, const float4*) { tops[batch * kSampleThreads + t] = top; });
      if (!started) ClusterWait();
      started = true;
      if (lane == 0) {
        const int place = (first + n) * kSampleWarps + warp % kSampleWarps;
        s_.partial[place] = result;
        if (rank_ != 0) *InBlock(&s_.partial[place], 0) = result;
      }
    }
    if (!started) ClusterWait();
    __syncthreads();

    const int k = row_.temperature <= 0 ? 1 : row_.top_k;
    if (row_.draw != 0) Gather(first, own_slices, k, lane);
    __syncthreads();
    if (blocks_ > 1) {
      if (static_cast<int>(threadIdx.x) < blocks_) *InBlock(&s_.sent[rank_], threadIdx.x) = s_.candidates;
      ClusterArrive();
      ClusterWait();
    } else {
      if (threadIdx.x == 0) s_.sent[0] = s_.candidates;
      __syncthreads();
    }
    int total = 0;
    bool fits = true;
    for (int b = 0; b < blocks_; ++b) {
      const int sent = s_.sent[b];
      fits = fits && sent <= kQuickCandidates;
      total += sent;
    }
    if (!fits) return false;
    if (rank_ != 0) return true;
    Finish(total, k, lane, warp);
    return true;
  }

 private:
  // Buckets of equal width from the largest value down; width by the spread of the warps' maxima, which suits any scale
  // of logits. The last takes all that is farther away.
  struct Buckets {
    float top, scale;
    __device__ int Of(float z) const {
      return min(kQuickBuckets - 1, static_cast<int>(fminf((top - z) * scale, 1e9f)));
    }
  };
  __device__ Buckets BucketsOf(int begin, int count, int lane) const {
    float top = -INFINITY, low = INFINITY;
    for (int i = lane; i < count; i += 32) {
      const float value = s_.partial[begin + i].x;
      top = fmaxf(top, value);
      if (value > -FLT_MAX) low = fminf(low, value);  // others had no logits
    }
    top = WarpMax(top);
    low = -WarpMax(-low);
    return {top, kQuickBuckets / 4 / fmaxf(top - low, 1e-30f)};
  }
  // The bucket in which the running sum over `count` reaches k, or the last.
  static __device__ int Bound(const unsigned* count, int k, int lane) {
    const uint4 low = reinterpret_cast<const uint4*>(count)[2 * lane];
    const uint4 high = reinterpret_cast<const uint4*>(count)[2 * lane + 1];
    const unsigned own[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += own[i];
    unsigned through = sum;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const unsigned other = __shfl_up_sync(kAllLanes, through, offset);
      if (lane >= offset) through += other;
    }
    const unsigned reached = __ballot_sync(kAllLanes, through >= static_cast<unsigned>(k));
    if (reached == 0) return kQuickBuckets - 1;
    int bound = 8 * lane;
    unsigned running = through - sum;
#pragma unroll
    for (int i = 0; i < 7; ++i) {
      running += own[i];
      bound += running < static_cast<unsigned>(k);
    }
    return __shfl_sync(kAllLanes, bound, __ffs(static_cast<int>(reached)) - 1);
  }

  // Sends block 0 the entries of these slices that may be among the row's best k: at least the slices' own best k.
  __device__ void Gather(int first, int own_slices, int k, int lane) {
    const Buckets buckets = BucketsOf(first * kSampleWarps, own_slices * kSampleWarps, lane);
    const int groups = own_slices * batches_ * kSampleThreads;
    for (int i = threadIdx.x; i < groups; i += kThreads) {
      const int bucket = buckets.Of(group_top_[i]);
      if (bucket < kQuickBuckets - 1) atomicAdd(&s_.count[0][bucket], 1u);
    }
    __syncthreads();
    const int bound = Bound(s_.count[0], k, lane);
    for (int i = threadIdx.x; i < groups; i += kThreads) {
      const float top = group_top_[i];
      if (!(top > -INFINITY) || buckets.Of(top) > bound) continue;
      const int place = atomicAdd(&s_.groups_size, 1);
      if (place < kQuickGroups) s_.groups[place] = i;
    }
    __syncthreads();
    const int listed = s_.groups_size;
    if (listed > kQuickGroups) {
      if (threadIdx.x == 0) s_.candidates = kQuickCandidates + 1;
      return;
    }
    SampleEntry* to = blocks_ > 1 ? InBlock(s_.candidate[rank_], 0) : s_.candidate[0];
    for (int i = threadIdx.x; i < listed * kScanPacks; i += kThreads) {
      const int group = s_.groups[i / kScanPacks];
      const int t = group % kSampleThreads, batch = group / kSampleThreads % batches_;
      const int slice = first + group / kSampleThreads / batches_;
      const int in_slice = 4 * (t + kSampleThreads * (batch * kScanPacks + i % kScanPacks));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int id = slice * slice_ + in_slice + e;
        if (in_slice + e >= slice_ || id >= vocab_) continue;
        const float z = logits_[id];
        if (!(z > -INFINITY) || buckets.Of(z) > bound) continue;
        const int place = atomicAdd(&s_.candidates, 1);
        if (place < kQuickCandidates) to[place] = {z, id};
      }
    }
  }

  // By block 0.
  __device__ void Finish(int total, int k, int lane, int warp) {
    // One warp sees to the statistics while the others find the best.
    if (warp == kThreads / 32 - 1) {
      const ScanTotal scan = ScanCombine(s_.partial, slices_, lane);
      const bool finite = scan.sum > 0;
      const float log_sum = logf(scan.sum);
      if (lane == 0) {
        s_.log_sum = finite ? log_sum : INFINITY;
        p_.status[index_] = static_cast<int32_t>(finite ? SampleStatus::kOk : SampleStatus::kNonFinite);
        if (!finite || row_.draw == 0) p_.token[index_] = -1;
        if (finite && row_.logprob_of >= 0 && row_.logprob_of < vocab_) {
          p_.logprob[index_] = logits_[row_.logprob_of] - scan.top - log_sum;
        } else if (!finite || row_.draw == 0 || row_.logprob_of >= 0) {
          p_.logprob[index_] = __uint_as_float(0x7fc00000u);
        }
      }
    }
    for (int i = threadIdx.x; i < p_.max_top_logprobs; i += kThreads) {
      p_.top_ids[static_cast<int64_t>(index_) * p_.max_top_logprobs + i] = -1;
      p_.top_logprobs[static_cast<int64_t>(index_) * p_.max_top_logprobs + i] = __uint_as_float(0x7fc00000u);
    }
    if (row_.draw == 0) return;

    // Candidates of several blocks are several times k: buckets of the whole row leave little more than k.
    const SampleEntry* list = s_.candidate[0];
    int size = total;
    const Buckets buckets = BucketsOf(0, slices_ * kSampleWarps, lane);
    if (blocks_ > 1) {
      const auto for_candidates = [&](const auto& f) {
        for (int i = threadIdx.x; i < blocks_ * kQuickCandidates; i += kThreads) {
          if (i % kQuickCandidates < s_.sent[i / kQuickCandidates]) f((&s_.candidate[0][0])[i]);
        }
      };
      for_candidates([&](const SampleEntry& entry) { atomicAdd(&s_.count[1][buckets.Of(entry.value)], 1u); });
      __syncthreads();
      const int bound = Bound(s_.count[1], k, lane);
      for_candidates([&](const SampleEntry& entry) {
        if (buckets.Of(entry.value) <= bound) s_.close[atomicAdd(&s_.close_size, 1)] = entry;
      });
      __syncthreads();
      list = s_.close;
      size = s_.close_size;
    }
    const int kept = min(size, k);
    const float inverse_temperature = 1.0f / fmaxf(row_.temperature, 1e-37f);
    SampleOrder(s_.choice, list, size, kept, [&](float z) { return (z - buckets.top) * inverse_temperature; });
    const float log_sum = s_.log_sum;
    if (warp != 0 || log_sum == INFINITY) return;
    const int id = SampleDrawOrdered(s_.choice, kept, row_, lane);
    if (lane == 0) {
      p_.token[index_] = id;
      if (row_.logprob_of < 0) p_.logprob[index_] = logits_[id] - buckets.top - log_sum;
    }
  }

  const SampleParams& p_;
  QuickShared& s_;
  float* group_top_;  // [own slices][batches][kSampleThreads]
  const SampleRow& row_;
  const int index_, slices_, blocks_, rank_;
  int vocab_, slice_, batches_;
  const float* logits_;
};

}  // namespace k3::cuda
