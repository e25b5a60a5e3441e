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

// Takes the best of the lanes' candidates (key, id): highest key, ties to the lowest id.
__device__ __forceinline__ int WarpBest(uint32_t key, int id) {
  const uint32_t best = __reduce_max_sync(kAllLanes, key);
  return static_cast<int>(__reduce_min_sync(kAllLanes, key == best ? static_cast<uint32_t>(id) : 0xffffffffu));
}

// One warp a token (spec 3.6).
__global__ void RouterTopKKernel(RouterTopKParams p) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kRouterWarps + warp;
  if (token >= p.tokens) return;
  if (p.live_tokens != nullptr && token >= *p.live_tokens) {
    if (lane < p.top_k) {
      p.ids[token * p.top_k + lane] = -1;
      p.weights[token * p.top_k + lane] = 0;
    }
    return;
  }
  float* score = DynamicShared<float>() + warp * 2 * p.experts;    // [experts]
  uint32_t* key = reinterpret_cast<uint32_t*>(score + p.experts);  // [experts]
  const float* logits = p.logits + token * p.experts;

  if (p.score == RouterScore::kSigmoid) {
    for (int e = lane; e < p.experts; e += 32) score[e] = 1.0f / (1.0f + expf(-logits[e]));
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
  } else {
    for (int e = lane; e < p.experts; e += 32) key[e] = OrderedKey(score[e] + (p.bias != nullptr ? p.bias[e] : 0.0f));
    __syncwarp();
    if (p.topk_group < p.groups) {
      // A group's score is the sum of its two best biased scores; experts of the other groups are out.
      const int size = p.experts / p.groups;
      uint32_t group_key = 0;
      if (lane < p.groups) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = 0; i < size; ++i) {
          const int e = lane * size + i;
          const float value = score[e] + (p.bias != nullptr ? p.bias[e] : 0.0f);
          second = fmaxf(second, fminf(first, value));
          first = fmaxf(first, value);
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
      for (int e = lane; e < p.experts; e += 32) {
        if (key[e] > best) {
          best = key[e];
          best_id = e;
        }
      }
    };
    rescan();
    for (int j = 0; j < p.top_k; ++j) {
      const int id = WarpBest(best, best_id);
      if (lane == j) picked = id;
      if (id == best_id) {
        key[id] = 0;
        rescan();
      }
    }
  }

  // Ascending ids: each pick's place is the number of smaller ones.
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

}  // namespace k3::cuda
