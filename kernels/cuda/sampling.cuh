#pragma once

#include "kernels/cuda/sampling_few.cuh"
#include "kernels/cuda/sampling_quick.cuh"

// Sampling: a cluster of blocks owns a row and keeps it in shared memory, each block a slice of consecutive ids, so
// that the logits are read once. Sums run in fixed orders and the histograms below are of integers, hence the result
// depends on the row alone.
namespace k3::cuda {

// One row.
class RowSampler : public FewSampler {
 public:
  __device__ RowSampler(const SampleParams& p, SampleShared& s, float* slice, int row, int blocks)
      : FewSampler(p, s, slice, row, blocks) {}

  __device__ void Run() {
    if (rank_ == 0) Clear();
    float own_top = -INFINITY;
    const float2 scanned = ScanSlice(logits_ + begin_, size_, threadIdx.x, [&](int batch, float top, const float4* z) {
      own_top = fmaxf(own_top, top);
#pragma unroll
      for (int j = 0; j < kScanPacks; ++j) {
        const int i = static_cast<int>(threadIdx.x) + kSampleThreads * (batch * kScanPacks + j);
        if (i < packs_) Slice(i) = z[j];
      }
    });
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Join();
    if (lane < blocks_) *InBlock(&s_.partial[rank_ * kSampleWarps + warp], lane) = scanned;
    Exchange({});
    const ScanTotal scan = ScanCombine(s_.partial, blocks_, lane);
    if (!(scan.sum > 0)) return Finish(SampleStatus::kNonFinite);
    raw_top_ = scan.top;
    log_sum_ = logf(scan.sum);

    if (row_.top_logprobs > 0) TopLogprobs(min(min(row_.top_logprobs, p_.max_top_logprobs), kSampleMaxTop));
    if (row_.logprob_of >= 0 && row_.logprob_of < vocab_ && First()) p_.logprob[index_] = Logprob(row_.logprob_of);
    if (row_.draw == 0) return Finish(SampleStatus::kOk);

    const bool greedy = row_.temperature <= 0 || row_.top_k == 1;
    const bool edited = row_.edit_begin < row_.edit_end || row_.mask_row >= 0;
    SampleEntry best{raw_top_, 0};
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
    if (row_.top_k > 0 && row_.top_k < vocab_) {
      CutAt<true>(static_cast<float>(row_.top_k));
      if (row_.top_k <= kSampleFewTop) return ChooseAmongKept();
    }
    if (row_.top_p < 1) CutAt<false>(row_.top_p);
    if (row_.min_p > 0 && logf(row_.min_p) > cut_.value) cut_ = {logf(row_.min_p), INT_MAX};
    Draw();
  }

 private:
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
};

// A row that asks for anything, whose cluster has arrived once. The slice is the block's second part of shared memory.
__device__ inline void SampleAnyRow(const SampleParams& p, SampleShared& s, int row, int blocks) {
  RowSampler(p, s, reinterpret_cast<float*>(&s + 1), row, blocks).Run();
}

// Grid (rows * blocks) in clusters of `blocks`.
__global__ void __launch_bounds__(kSampleThreads, 1) SampleKernel(SampleParams p, int blocks) {
  SampleShared& s = *DynamicShared<SampleShared>();
  const int index = blockIdx.x / blocks;
  // Only asks for lines of the second-level cache, where later writes reach them.
  QuickSampler<kSampleThreads>::Prefetch(p, index, blocks, blockIdx.x % blocks);
  GridDependencyWait();
  GridDependencyRelease();
  const SampleRow row = p.rows[index];
  ClusterArrive();
  if (QuickSampler<kSampleThreads>::Takes(row)) {
    // In the place of the slice.
    QuickShared& quick = *reinterpret_cast<QuickShared*>(&s + 1);
    if (QuickSampler<kSampleThreads>(p, quick, row, index, blocks, blocks).Run()) return;
    __syncthreads();
    ClusterArrive();
  }
  SampleAnyRow(p, s, index, blocks);
}

constexpr int kQuickThreads = 1024;
constexpr int32_t kSamplePending = -1;  // status of a row that QuickSampleKernel leaves to SamplePendingKernel

// Many rows: the quick ones, each by a cluster of `blocks`.
__global__ void __launch_bounds__(kQuickThreads, 1) QuickSampleKernel(SampleParams p, int blocks) {
  QuickShared& s = *DynamicShared<QuickShared>();
  const int index = blockIdx.x / blocks;
  const SampleRow row = p.rows[index];
  if (blocks > 1) ClusterArrive();
  if (QuickSampler<kQuickThreads>::Takes(row)) {
    if (QuickSampler<kQuickThreads>(p, s, row, index, kSampleBlocks, blocks).Run()) return;
  } else if (blocks > 1) {
    ClusterWait();
  }
  if (blockIdx.x % blocks == 0 && threadIdx.x == 0) p.status[index] = kSamplePending;
}

// What QuickSampleKernel left, by resident clusters of kSampleBlocks.
__global__ void __launch_bounds__(kSampleThreads, 1) SamplePendingKernel(SampleParams p, int rows) {
  SampleShared& s = *DynamicShared<SampleShared>();
  for (int row = blockIdx.x / kSampleBlocks; row < rows; row += gridDim.x / kSampleBlocks) {
    if (p.status[row] != kSamplePending) continue;
    ClusterArrive();
    SampleAnyRow(p, s, row, kSampleBlocks);
    // All have left the row before its shared memory is another's.
    ClusterArrive();
    ClusterWait();
  }
}

}  // namespace k3::cuda
