#pragma once

#include "kernels/cuda/math.cuh"
#include "kernels/cuda/mla.cuh"

// How many blocks attend over the keys of each sequence of a decode. Decided on the device, by the lengths alone: a
// captured launch stays right while contexts grow, long sequences get more blocks than short ones, and each block has
// one piece of one sequence.
namespace k3::cuda {

constexpr int kSplitKeys = 64;               // pieces begin at multiples of it: a step
constexpr int kSplitMost = 160;              // sequences, at least as many as there are multiprocessors
constexpr int kSplitEach = kSplitMost / 32;  // of a lane

// The part of a sequence's keys that one of its blocks takes.
struct SequenceSplit {
  int sequence;  // -1: nothing is left for the block
  int keys;      // of the sequence's last row, which sees the most
  int splits;    // of the sequence
  int index;     // of them
  int all;       // splits of all sequences

  // In keys; never empty, as there are at most as many splits as steps.
  __device__ int Begin(int which) const {
    const unsigned steps = (keys + kSplitKeys - 1) / kSplitKeys;
    return min(keys, static_cast<int>(which * steps / splits) * kSplitKeys);
  }
};

// By one warp: visit(sequence, keys, splits, splits before it) for all sequences, 32 at a time, `keys` 0 beyond the
// last. At most `blocks` splits, so many that the longest piece is about as short as can be. Returns all splits.
template <typename F>
__device__ __forceinline__ int ForSplits(const MlaRows& rows, const SequenceBatch& batch, int blocks, int lane,
                                         F&& visit) {
  const int sequences = batch.num_sequences;
  int keys[kSplitEach];
  float steps[kSplitEach];  // less one
  unsigned longest = 0, total = 0;
#pragma unroll
  for (int i = 0; i < kSplitEach; ++i) {
    const int s = 32 * i + lane;
    keys[i] = 0;
    if (s < sequences) {
      const int last = rows.one_token_each ? rows.token_begin + s : min(batch.token_begin[s + 1], rows.token_end) - 1;
      keys[i] = batch.position[last] + 1;
    }
  }
#pragma unroll
  for (int i = 0; i < kSplitEach; ++i) {
    const unsigned own = (keys[i] + kSplitKeys - 1) / kSplitKeys;
    steps[i] = static_cast<float>(own) - 1.0f;
    longest = max(longest, own);
    total += own;
  }
  longest = __reduce_max_sync(kAllLanes, longest);
  total = __reduce_add_sync(kAllLanes, total);
  // The fewest steps a piece with which the blocks suffice. Splits of `steps` steps: as many as pieces of `most` give.
  const auto splits_of = [&](int i, float inverse) {
    return keys[i] > 0 ? static_cast<int>(steps[i] * inverse) + 1 : 0;
  };
  unsigned most = longest;
  if (total == longest * sequences) {
    const unsigned each = blocks / sequences;
    most = (longest + each - 1) / each;
  } else {
    unsigned low = (total + blocks - 1) / blocks;
    if (blocks > sequences) most = min(most, (total + blocks - sequences - 1) / (blocks - sequences));
    while (low < most) {
      const unsigned middle = (low + most) / 2;
      const float inverse = 1.0f / static_cast<float>(middle);
      int count = 0;
#pragma unroll
      for (int i = 0; i < kSplitEach; ++i) count += splits_of(i, inverse);
      if (__reduce_add_sync(kAllLanes, count) <= blocks) {
        most = middle;
      } else {
        low = middle + 1;
      }
    }
  }
  const float inverse = 1.0f / static_cast<float>(most);
  int before = 0;
#pragma unroll
  for (int i = 0; i < kSplitEach; ++i) {
    if (32 * i >= sequences) break;
    const int own = splits_of(i, inverse);
    int sum = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += other;
    }
    visit(32 * i + lane, keys[i], own, before + sum - own);
    before += __shfl_sync(kAllLanes, sum, 31);
  }
  return before;
}

// What block `block` of `blocks` takes. By one warp.
__device__ __forceinline__ SequenceSplit FindSplit(const MlaRows& rows, const SequenceBatch& batch, int block,
                                                   int blocks, int lane) {
  SequenceSplit split = {-1, 0, 0, 0, 0};
  split.all = ForSplits(rows, batch, blocks, lane, [&](int sequence, int keys, int splits, int before) {
    const unsigned here = __ballot_sync(kAllLanes, before <= block && block < before + splits);
    if (here == 0) return;
    const int owner = __ffs(static_cast<int>(here)) - 1;
    split.sequence = __shfl_sync(kAllLanes, sequence, owner);
    split.keys = __shfl_sync(kAllLanes, keys, owner);
    split.splits = __shfl_sync(kAllLanes, splits, owner);
    split.index = block - __shfl_sync(kAllLanes, before, owner);
  });
  return split;
}

}  // namespace k3::cuda
