#pragma once

#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/op_params.h"

namespace k3::cuda {

constexpr int kRouterWarps = 4;     // tokens of a block
constexpr int kRouterMaxTopK = 32;  // one lane a pick
constexpr int kRouterMaxGroups = 32;

// Unsigned integers in the order of the floats they stand for; every number is above 0, which marks "not a candidate".
__device__ __forceinline__ uint32_t OrderedKey(float value) {
  const uint32_t bits = __float_as_uint(value);
  return max((bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u, 1u);
}

// to[e] = value(e) for the lane's experts: several values are read before the first is stored, because each may wait
// for memory.
template <typename T, typename Value>
__device__ __forceinline__ void ForExperts(int experts, int lane, const Value& value, T* to) {
  constexpr int kTogether = 8;
  for (int base = lane; base < experts; base += 32 * kTogether) {
    T values[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (base + 32 * i < experts) values[i] = value(base + 32 * i);  // never another lane's expert
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (base + 32 * i < experts) to[base + 32 * i] = values[i];
    }
  }
}

// Takes the best of the lanes' candidates (key, id): highest key, ties to the lowest id.
__device__ __forceinline__ int WarpBest(uint32_t key, int id) {
  const uint32_t best = __reduce_max_sync(kAllLanes, key);
  return static_cast<int>(__reduce_min_sync(kAllLanes, key == best ? static_cast<uint32_t>(id) : 0xffffffffu));
}

// The `count` best of a token's experts under value(e), best first: lane j gets the j-th, 0x7fffffff where there are no
// more. key [experts] is the warp's.
template <typename Value>
__device__ __forceinline__ int SelectExperts(const RouterTopKParams& p, uint32_t* key, int lane, int count,
                                             const Value& value) {
  int picked = 0x7fffffff;
  ForExperts(
      p.experts, lane, [&](int e) { return OrderedKey(value(e)); }, key);
  __syncwarp();
  if (p.topk_group < p.groups) {
    // A group's score is the sum of its two best biased scores; experts of the other groups are out.
    const int size = p.experts / p.groups;
    uint32_t group_key = 0;
    if (lane < p.groups) {
      float first = -INFINITY, second = -INFINITY;
      for (int i = 0; i < size; ++i) {
        const float candidate = value(lane * size + i);
        second = fmaxf(second, fminf(first, candidate));
        first = fmaxf(first, candidate);
      }
      group_key = OrderedKey(size > 1 ? first + second : first);
    }
    uint32_t kept = 0;
    for (int round = 0; round < p.topk_group; ++round) {
      const int group = WarpBest(group_key, lane);
      kept |= 1u << group;
      if (lane == group) group_key = 0;
    }
    for (int e = lane; e < p.experts; e += 32) {
      if ((kept >> (e / size) & 1) == 0) key[e] = 0;
    }
    __syncwarp();
  }
  // Each lane offers the best of its experts and looks again only when that one was taken.
  uint32_t best = 0;
  int best_id = 0x7fffffff;
  const auto rescan = [&] {
    best = 0;
    best_id = 0x7fffffff;
#pragma unroll 8
    for (int e = lane; e < p.experts; e += 32) {
      if (key[e] > best) {
        best = key[e];
        best_id = e;
      }
    }
  };
  rescan();
  for (int j = 0; j < count; ++j) {
    const int id = WarpBest(best, best_id);
    if (lane == j) picked = id;
    if (id == best_id && best != 0) {
      key[id] = 0;
      rescan();
    }
  }
  return picked;
}

// The same from keys in registers, where a lane has at most kEach experts, lane + 32 i, and all may be picked.
template <int kEach>
__device__ __forceinline__ int SelectHeld(uint32_t (&key)[kEach], int lane, int count) {
  static_assert((kEach & (kEach - 1)) == 0);
  int picked = 0x7fffffff;
  uint32_t best = 0;
  int place = 0;
  const auto look = [&] {
    uint32_t tree[kEach];
    int at[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) tree[i] = key[i], at[i] = i;
#pragma unroll
    for (int half = kEach / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) {
        // Of equal keys the lower expert's.
        const bool other = tree[i + half] > tree[i] || (tree[i + half] == tree[i] && at[i + half] < at[i]);
        at[i] = other ? at[i + half] : at[i];
        tree[i] = max(tree[i], tree[i + half]);
      }
    }
    best = tree[0];
    place = at[0];
  };
  look();
  for (int j = 0; j < count; ++j) {
    const int own = best != 0 ? lane + 32 * place : 0x7fffffff;
    const int id = WarpBest(best, own);
    if (lane == j) picked = id;
#pragma unroll
    for (int i = 0; i < kEach; ++i) key[i] = id == own && i == place ? 0 : key[i];
    look();
  }
  return picked;
}

__device__ __forceinline__ int MarginBin(float margin) {
  const float place = (margin - kMarginLow) * (kMarginBins / (kMarginHigh - kMarginLow));
  // NaN goes to the last bin, with what is far from being chosen.
  return place < kMarginBins - 1 ? static_cast<int>(fmaxf(place, 0.0f)) : kMarginBins - 1;
}

__device__ __forceinline__ void CountSum(uint64_t* sums, int which, uint64_t amount) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sums + which), static_cast<unsigned long long>(amount));
}

// A token's choice under the bias of its groups, counted. Lane j < top_k gets the j-th pick.
__device__ __forceinline__ int SelectBalanced(const RouterTopKParams& p, const RouterBalance& balance, int64_t token,
                                              const float* score, uint32_t* key, int lane) {
  const auto own = [&](int e) { return p.bias != nullptr ? score[e] + p.bias[e] : score[e]; };
  const auto group_of = [&](int e) { return GroupOfExpert(e, p.experts, balance.groups); };
  const int64_t slot = balance.slot_of_sequence[balance.sequence_of_token[token]];
  const float* delta = balance.delta + slot * balance.slot_stride;
  const auto biased = [&](int e) { return own(e) + delta[group_of(e)]; };
  bool here = false;
  for (int g = lane; g < balance.groups; g += 32) here |= delta[g] != 0.0f;
  const bool shifted = __any_sync(kAllLanes, here);
  const bool observed = token % balance.observe_every == 0;

  int exact = -1;
  if (observed && shifted) {
    exact = SelectExperts(p, key, lane, p.top_k, own);
    __syncwarp();
  }
  const int most = min(2 * p.top_k, p.experts);
  const bool wants_candidates = observed || balance.candidates != nullptr;
  const int picked = SelectExperts(p, key, lane, wants_candidates ? most : p.top_k, biased);
  __syncwarp();
  const bool chosen = lane < p.top_k;
  if (chosen) atomicAdd(balance.load + group_of(picked), 1u);
  const bool candidate = lane < most && picked < p.experts;
  if (balance.candidates != nullptr && lane < 2 * p.top_k) {
    const int64_t at = token * 2 * p.top_k + lane;
    balance.candidates[at] = candidate ? picked : -1;
    balance.candidate_values[at] = candidate ? biased(picked) : 0.0f;
    balance.candidate_scores[at] = !candidate ? 0.0f : p.biased_weights ? own(picked) : score[picked];
  }
  if (!observed) return picked;
  const int found = __popc(__ballot_sync(kAllLanes, candidate));
  if (lane == 0) CountSum(balance.sums, 0, 1);
  if (found <= p.top_k) return picked;
  const float value = candidate ? biased(picked) : 0.0f;
  const float cutoff = __shfl_sync(kAllLanes, value, p.top_k);
  const float worst = __shfl_sync(kAllLanes, value, p.top_k - 1);
  const float last = __shfl_sync(kAllLanes, value, found - 1);
  if (candidate) {
    atomicAdd(balance.margins + group_of(picked) * kMarginBins + MarginBin(cutoff - own(picked)), 1u);
  }
  if (lane == 0) {
    const float units = (worst - last) * static_cast<float>(1 << kGapBits);
    CountSum(balance.sums, 1, units > 0 && units < 0x1p31f ? static_cast<uint64_t>(units) : 0);
  }
  if (!shifted) return picked;
  bool kept = false;
  for (int j = 0; j < p.top_k; ++j) kept |= __shfl_sync(kAllLanes, exact, j) == picked;
  const int overrides = __popc(__ballot_sync(kAllLanes, chosen && !kept));
  if (lane == 0) CountSum(balance.sums, 2, static_cast<uint64_t>(overrides));
  return picked;
}

// Lane j < top_k has a token's j-th pick: stored with its weight, by ascending id. `score` is the warp's.
__device__ __forceinline__ void StorePicks(const RouterTopKParams& p, int64_t token, int picked, const float* score,
                                           int lane) {
  // Each pick's place is the number of smaller ones.
  int place = 0;
  for (int j = 0; j < p.top_k; ++j) {
    const int other = __shfl_sync(kAllLanes, picked, j);
    place += other < picked || (other == picked && j < lane);
  }
  __syncwarp();
  const bool mine = lane < p.top_k;
  float weight = 0;
  if (mine) {
    weight = score[picked];
    if (p.biased_weights && p.bias != nullptr) weight += p.bias[picked];
  }
  if (p.renormalize) weight /= WarpSum(weight) + 1e-20f;
  if (mine) {
    p.ids[token * p.top_k + place] = picked;
    p.weights[token * p.top_k + place] = weight * p.scale;
  }
}

// A token's choice from logits that the lanes hold, lane + 32 i, with their bias; at most 32 kHeld experts, of which
// all may be picked.
template <int kHeld>
__device__ __forceinline__ void ChooseHeld(const RouterTopKParams& p, int64_t token, float (&held)[kHeld],
                                           const float (&bias)[kHeld], float* score, int lane) {
  const auto exists = [&](int i) { return lane + 32 * i < p.experts; };
  if (p.score == RouterScore::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = 1.0f / (1.0f + expf(-held[i]));
  } else {
    float top = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) top = exists(i) ? fmaxf(top, held[i]) : top;
    top = WarpMax(top);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) sum += exists(i) ? held[i] = expf(held[i] - top) : 0.0f;
    sum = WarpSum(sum);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] /= sum;
  }
  uint32_t key[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (exists(i)) score[lane + 32 * i] = held[i];
    key[i] = exists(i) ? OrderedKey(held[i] + bias[i]) : 0;
  }
  __syncwarp();
  int picked = 0x7fffffff;
  if (p.forced_ids != nullptr) {
    if (lane < p.top_k) picked = p.forced_ids[token * p.top_k + lane];
  } else {
    picked = SelectHeld(key, lane, p.top_k);
  }
  StorePicks(p, token, picked, score, lane);
}

template <int kHeld>
__device__ __forceinline__ void LoadBias(const RouterTopKParams& p, int lane, float (&bias)[kHeld]) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    bias[i] = p.bias != nullptr && lane + 32 * i < p.experts ? p.bias[lane + 32 * i] : 0.0f;
  }
}

// Tokens from this one on are padding. Older than the launch before.
__device__ __forceinline__ int64_t LiveTokens(const RouterTopKParams& p) {
  return p.live_tokens != nullptr ? *p.live_tokens : p.tokens;
}
__device__ __forceinline__ void StoreNoPicks(const RouterTopKParams& p, int64_t token, int lane) {
  if (lane >= p.top_k) return;
  p.ids[token * p.top_k + lane] = -1;
  p.weights[token * p.top_k + lane] = 0;
}

// One warp a token (spec 3.6), of at most 32 kHeld experts of which all may be picked.
template <int kHeld>
__global__ void RouterHeldKernel(RouterTopKParams p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kRouterWarps + warp;
  const int64_t live = LiveTokens(p);
  float bias[kHeld];
  LoadBias(p, lane, bias);
  GridDependencyWait();
  GridDependencyRelease();
  if (token >= p.tokens) return;
  if (token >= live) return StoreNoPicks(p, token, lane);
  float held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    held[i] = lane + 32 * i < p.experts ? p.logits[token * p.experts + lane + 32 * i] : 0.0f;
  }
  ChooseHeld(p, token, held, bias, DynamicShared<float>() + warp * p.experts, lane);
}

// The same for any number of experts, groups and balance.
template <bool kBalanced>
__global__ void RouterTopKKernel(RouterTopKParams p, RouterBalance balance) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kRouterWarps + warp;
  const int64_t live = LiveTokens(p);
  if (p.bias != nullptr) {
    for (int e = lane; e < p.experts; e += 32) PrefetchL1(p.bias + e);
  }
  GridDependencyWait();
  GridDependencyRelease();
  if (token >= p.tokens) return;
  if (token >= live) return StoreNoPicks(p, token, lane);
  float* score = DynamicShared<float>() + warp * 2 * p.experts;    // [experts]
  uint32_t* key = reinterpret_cast<uint32_t*>(score + p.experts);  // [experts]
  const float* logits = p.logits + token * p.experts;

  if (p.score == RouterScore::kSigmoid) {
    ForExperts(
        p.experts, lane, [&](int e) { return 1.0f / (1.0f + expf(-logits[e])); }, score);
  } else {
    float top = -INFINITY;
    for (int e = lane; e < p.experts; e += 32) top = fmaxf(top, logits[e]);
    top = WarpMax(top);
    float sum = 0;
    for (int e = lane; e < p.experts; e += 32) sum += score[e] = expf(logits[e] - top);
    sum = WarpSum(sum);
    for (int e = lane; e < p.experts; e += 32) score[e] /= sum;
  }

  int picked = 0x7fffffff;  // lane j < top_k: the j-th pick
  if (p.forced_ids != nullptr) {
    if (lane < p.top_k) picked = p.forced_ids[token * p.top_k + lane];
  } else if constexpr (kBalanced) {
    picked = SelectBalanced(p, balance, token, score, key, lane);
  } else {
    picked =
        SelectExperts(p, key, lane, p.top_k, [&](int e) { return score[e] + (p.bias != nullptr ? p.bias[e] : 0.0f); });
  }
  StorePicks(p, token, picked, score, lane);
}

// The cap goes through the tokens one after the other: one warp, a lane a choice where choices do not depend on each
// other. taken and seen [groups] are in shared memory.
__global__ void RouterSoftCapKernel(RouterSoftCapParams p, RouterBalance balance) {
  const int lane = threadIdx.x;
  uint32_t* taken = DynamicShared<uint32_t>();
  uint32_t* seen = taken + balance.groups;
  const int64_t live = p.live_tokens != nullptr ? min(static_cast<int64_t>(*p.live_tokens), p.tokens) : p.tokens;
  const auto group_of = [&](int e) { return GroupOfExpert(e, p.experts, balance.groups); };
  for (int g = lane; g < balance.groups; g += 32) taken[g] = seen[g] = 0;
  __syncwarp();
  for (int64_t i = lane; i < live * p.top_k; i += 32) atomicAdd(taken + group_of(p.ids[i]), 1u);
  __syncwarp();
  const auto capacity =
      static_cast<uint32_t>(ceilf(p.factor * static_cast<float>(live * p.top_k) / static_cast<float>(balance.groups)));
  const int width = 2 * p.top_k;
  for (int64_t t = 0; t < live; ++t) {
    const int own = lane < width ? balance.candidates[t * width + lane] : -1;
    const int own_group = own >= 0 ? group_of(own) : 0;
    const float value = own >= 0 ? balance.candidate_values[t * width + lane] : -INFINITY;
    const float least = __shfl_sync(kAllLanes, value, p.top_k) - p.tau;
    // Lane c >= top_k may step in while its group has room; lane j < top_k keeps its choice or names who steps in.
    bool free = lane >= p.top_k && own >= 0 && value >= least;
    int mine = lane;
    int swaps = 0;
    for (int j = 0; j < p.top_k; ++j) {
      const int group = __shfl_sync(kAllLanes, own_group, j);
      const uint32_t order = seen[group] + 1;
      __syncwarp();
      if (lane == 0) seen[group] = order;
      __syncwarp();
      if (order <= capacity) continue;
      const uint32_t willing = __ballot_sync(kAllLanes, free && taken[own_group] < capacity);
      __syncwarp();
      if (willing == 0) continue;
      const int best = __ffs(willing) - 1;
      if (lane == j) mine = best;
      if (lane == best) {
        free = false;
        ++taken[own_group];
        atomicAdd(balance.load + own_group, 1u);
        atomicAdd(balance.load + group, ~0u);  // one less
      }
      ++swaps;
      __syncwarp();
    }
    if (swaps == 0) continue;
    if (lane == 0) CountSum(balance.sums, 3, static_cast<uint64_t>(swaps));
    int picked = __shfl_sync(kAllLanes, own, mine);
    const float score = lane < width ? balance.candidate_scores[t * width + lane] : 0.0f;
    float weight = __shfl_sync(kAllLanes, score, mine);
    const bool chosen = lane < p.top_k;
    int place = 0;
    for (int j = 0; j < p.top_k; ++j) place += __shfl_sync(kAllLanes, picked, j) < picked;
    if (p.renormalize) weight /= WarpSum(chosen ? weight : 0.0f) + 1e-20f;
    if (chosen) {
      p.ids[t * p.top_k + place] = picked;
      p.weights[t * p.top_k + place] = weight * p.scale;
    }
  }
}

}  // namespace k3::cuda
