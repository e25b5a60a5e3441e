#include <algorithm>
#include <limits>
#include <string>

#include "kernels/core/shape_check.h"
#include "kernels/cpu/cpu_ops.h"

namespace k3 {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Position of the largest value in [begin, end), ties to the lowest; NaN counts as minus infinity. Taken entries are
// marked by `taken`.
int64_t ArgMax(const float* values, const bool* taken, int64_t begin, int64_t end) {
  int64_t best = -1;
  float best_value = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (taken[i]) continue;
    const float value = values[i] == values[i] ? values[i] : kMinusInfinity;
    if (best < 0 || value > best_value) {
      best = i;
      best_value = value;
    }
  }
  return best;
}

// Spec 3.6: a group scores the sum of its two largest biased scores; all but the best groups are taken out.
void KeepBestGroups(const RouterTopKParams& p, const float* biased, bool* taken, float* group_scores,
                    bool* group_taken) {
  const int64_t size = p.experts / p.groups;
  for (int64_t g = 0; g < p.groups; ++g) {
    const int64_t begin = g * size, end = begin + size;
    const int64_t first = ArgMax(biased, taken, begin, end);
    taken[first] = true;
    const int64_t second = ArgMax(biased, taken, begin, end);
    taken[first] = false;
    group_scores[g] = biased[first] + (second >= 0 ? biased[second] : 0.0f);
    group_taken[g] = false;
  }
  for (int32_t i = 0; i < p.topk_group; ++i) group_taken[ArgMax(group_scores, group_taken, 0, p.groups)] = true;
  for (int64_t e = 0; e < p.experts; ++e) taken[e] = !group_taken[e / size];
}

void CheckRouter(const RouterTopKParams& p) {
  const char* op = "RouterTopK";
  CheckTrue(p.experts > 0 && p.top_k > 0 && p.top_k <= p.experts, op,
            "top_k must be in [1, experts = " + std::to_string(p.experts) + "], got " + std::to_string(p.top_k));
  CheckTrue(p.groups > 0 && p.experts % p.groups == 0, op,
            std::to_string(p.experts) + " experts do not divide into " + std::to_string(p.groups) + " groups");
  CheckTrue(
      p.topk_group > 0 && p.topk_group <= p.groups, op,
      "topk_group must be in [1, groups = " + std::to_string(p.groups) + "], got " + std::to_string(p.topk_group));
  CheckTrue(int64_t{p.topk_group} * (p.experts / p.groups) >= p.top_k, op,
            std::to_string(p.topk_group) + " groups hold fewer than top_k = " + std::to_string(p.top_k) + " experts");
  if (p.tokens == 0) return;
  CheckPointer(op, "logits", p.logits);
  CheckPointer(op, "ids", p.ids);
  CheckPointer(op, "weights", p.weights);
  for (int64_t i = 0; p.forced_ids != nullptr && i < p.tokens * p.top_k; ++i) {
    CheckTrue(p.forced_ids[i] >= 0 && p.forced_ids[i] < p.experts, op,
              "forced id " + std::to_string(p.forced_ids[i]) + " is outside " + std::to_string(p.experts) + " experts");
  }
}

}  // namespace

void CpuOps::RouterTopK(const RouterTopKParams& p, Stream) {
  CheckRouter(p);
  ForRows(p.tokens, int64_t{p.experts} * (10 + 2 * p.top_k), [&](int64_t begin, int64_t end, int thread) {
    float* scores = ThreadFloats(thread, 4 * int64_t{p.experts});
    float* biased = scores + p.experts;
    float* group_scores = biased + p.experts;
    bool* taken = reinterpret_cast<bool*>(group_scores + p.experts);
    bool* group_taken = taken + p.experts;
    for (int64_t t = begin; t < end; ++t) {
      if (p.live_tokens != nullptr && t >= *p.live_tokens) {
        std::fill_n(p.ids + t * p.top_k, p.top_k, -1);
        std::fill_n(p.weights + t * p.top_k, p.top_k, 0.0f);
        continue;
      }
      const float* logits = p.logits + t * p.experts;
      if (p.score == RouterScore::kSigmoid) {
        kernels_.sigmoid(logits, p.experts, scores);
      } else {
        kernels_.softmax(logits, p.experts, scores);
      }
      for (int32_t e = 0; e < p.experts; ++e) {
        biased[e] = p.bias != nullptr ? scores[e] + p.bias[e] : scores[e];
        taken[e] = false;
      }
      int32_t* ids = p.ids + t * p.top_k;
      if (p.forced_ids != nullptr) {
        std::copy_n(p.forced_ids + t * p.top_k, p.top_k, ids);
      } else {
        if (p.topk_group < p.groups) KeepBestGroups(p, biased, taken, group_scores, group_taken);
        for (int32_t j = 0; j < p.top_k; ++j) {
          ids[j] = static_cast<int32_t>(ArgMax(biased, taken, 0, p.experts));
          taken[ids[j]] = true;
        }
      }
      std::sort(ids, ids + p.top_k);
      float* weights = p.weights + t * p.top_k;
      float sum = 0;
      for (int32_t j = 0; j < p.top_k; ++j) {
        weights[j] = p.biased_weights ? biased[ids[j]] : scores[ids[j]];
        sum += weights[j];
      }
      for (int32_t j = 0; j < p.top_k; ++j) {
        if (p.renormalize) weights[j] = weights[j] / (sum + 1e-20f);
        weights[j] *= p.scale;
      }
    }
  });
}

}  // namespace k3
