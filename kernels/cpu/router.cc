#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

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
  if (const RouterBalance* balance = p.balance; balance != nullptr) {
    CheckTrue(balance->groups > 0 && balance->groups <= p.experts && balance->observe_every > 0, op,
              std::to_string(p.experts) + " experts cannot be balanced over " + std::to_string(balance->groups) +
                  " ranks, counting every " + std::to_string(balance->observe_every));
    CheckPointer(op, "balance.delta", balance->delta);
    CheckPointer(op, "balance.slot_of_sequence", balance->slot_of_sequence);
    CheckPointer(op, "balance.sequence_of_token", balance->sequence_of_token);
    CheckPointer(op, "balance.margins", balance->margins);
    CheckPointer(op, "balance.load", balance->load);
    CheckPointer(op, "balance.sums", balance->sums);
  }
  for (int64_t i = 0; p.forced_ids != nullptr && i < p.tokens * p.top_k; ++i) {
    CheckTrue(p.forced_ids[i] >= 0 && p.forced_ids[i] < p.experts, op,
              "forced id " + std::to_string(p.forced_ids[i]) + " is outside " + std::to_string(p.experts) + " experts");
  }
}

// A thread's memory for one token.
struct RouterScratch {
  float* scores;
  float* biased;
  float* group_scores;
  bool* taken;
  bool* group_taken;
};

// The `count` best of scratch.biased, best first; fewer where the groups hold no more. Returns how many.
int32_t PickBest(const RouterTopKParams& p, const RouterScratch& scratch, int32_t count, int32_t* ids) {
  std::fill_n(scratch.taken, p.experts, false);
  if (p.topk_group < p.groups) {
    KeepBestGroups(p, scratch.biased, scratch.taken, scratch.group_scores, scratch.group_taken);
  }
  for (int32_t j = 0; j < count; ++j) {
    const int64_t best = ArgMax(scratch.biased, scratch.taken, 0, p.experts);
    if (best < 0) return j;
    ids[j] = static_cast<int32_t>(best);
    scratch.taken[best] = true;
  }
  return count;
}

template <typename T>
void Count(T* counter, T amount) {
  std::atomic_ref<T>(*counter).fetch_add(amount, std::memory_order_relaxed);
}

int32_t MarginBin(float margin) {
  const float place = (margin - kMarginLow) * (kMarginBins / (kMarginHigh - kMarginLow));
  // NaN goes to the last bin, with what is far from being chosen.
  return place < kMarginBins - 1 ? static_cast<int32_t>(std::max(place, 0.0f)) : kMarginBins - 1;
}

uint64_t GapUnits(float gap) {
  const float units = gap * static_cast<float>(1 << kGapBits);
  return units > 0 && units < 0x1p31f ? static_cast<uint64_t>(units) : 0;
}

// Chooses token t's experts under its bias and counts. scratch.biased holds s + b and gets the bias added; `ids`
// [top_k] comes out in order of preference.
void PickBalanced(const RouterTopKParams& p, int64_t t, const RouterScratch& scratch, int32_t* picks, int32_t* ids) {
  const RouterBalance& balance = *p.balance;
  const int64_t slot = balance.slot_of_sequence[balance.sequence_of_token[t]];
  const float* delta = balance.delta + slot * balance.slot_stride;
  const bool observed = t % balance.observe_every == 0;
  const int32_t most = std::min(2 * p.top_k, p.experts);
  const bool shifted = std::any_of(delta, delta + balance.groups, [](float d) { return d != 0; });
  int32_t* exact = picks + most;
  if (observed && shifted) {
    PickBest(p, scratch, p.top_k, exact);
    std::sort(exact, exact + p.top_k);
  }
  const auto group_of = [&](int32_t e) { return GroupOfExpert(e, p.experts, balance.groups); };
  if (shifted) {
    for (int32_t e = 0; e < p.experts; ++e) scratch.biased[e] += delta[group_of(e)];
  }
  const bool wants_candidates = observed || balance.candidates != nullptr;
  const int32_t found = PickBest(p, scratch, wants_candidates ? most : p.top_k, picks);
  std::copy_n(picks, p.top_k, ids);
  for (int32_t j = 0; j < p.top_k; ++j) Count(balance.load + group_of(ids[j]), 1u);
  if (balance.candidates != nullptr) {
    for (int32_t j = 0; j < 2 * p.top_k; ++j) {
      const int64_t at = t * 2 * p.top_k + j;
      balance.candidates[at] = j < found ? picks[j] : -1;
      balance.candidate_values[at] = j < found ? scratch.biased[picks[j]] : 0;
      balance.candidate_scores[at] = j >= found ? 0
                                     : p.biased_weights
                                         ? scratch.scores[picks[j]] + (p.bias != nullptr ? p.bias[picks[j]] : 0.0f)
                                         : scratch.scores[picks[j]];
    }
  }
  if (!observed) return;
  Count(balance.sums, uint64_t{1});
  if (found <= p.top_k) return;  // nothing to prefer over anything
  const float cutoff = scratch.biased[picks[p.top_k]];
  for (int32_t j = 0; j < found; ++j) {
    const int32_t e = picks[j], group = group_of(e);
    const float own = p.bias != nullptr ? scratch.scores[e] + p.bias[e] : scratch.scores[e];
    Count(balance.margins + group * kMarginBins + MarginBin(cutoff - own), 1u);
  }
  Count(balance.sums + 1, GapUnits(scratch.biased[picks[p.top_k - 1]] - scratch.biased[picks[found - 1]]));
  if (!shifted) return;
  uint64_t overrides = 0;
  for (int32_t j = 0; j < p.top_k; ++j) overrides += !std::binary_search(exact, exact + p.top_k, ids[j]);
  Count(balance.sums + 2, overrides);
}

}  // namespace

void CpuOps::RouterTopK(const RouterTopKParams& p, Stream) {
  CheckRouter(p);
  const bool balanced = p.balance != nullptr && p.forced_ids == nullptr;
  ForRows(p.tokens, int64_t{p.experts} * (10 + 2 * p.top_k), [&](int64_t begin, int64_t end, int thread) {
    float* memory = ThreadFloats(thread, 4 * int64_t{p.experts} + (balanced ? 3 * int64_t{p.top_k} : 0));
    RouterScratch scratch;
    scratch.scores = memory;
    scratch.biased = memory + p.experts;
    scratch.group_scores = memory + 2 * p.experts;
    scratch.taken = reinterpret_cast<bool*>(memory + 3 * p.experts);
    scratch.group_taken = scratch.taken + p.experts;
    auto* picks = reinterpret_cast<int32_t*>(memory + 4 * p.experts);  // [2 * top_k] candidates, [top_k] exact choices
    for (int64_t t = begin; t < end; ++t) {
      if (p.live_tokens != nullptr && t >= *p.live_tokens) {
        std::fill_n(p.ids + t * p.top_k, p.top_k, -1);
        std::fill_n(p.weights + t * p.top_k, p.top_k, 0.0f);
        continue;
      }
      const float* logits = p.logits + t * p.experts;
      if (p.score == RouterScore::kSigmoid) {
        kernels_.sigmoid(logits, p.experts, scratch.scores);
      } else {
        kernels_.softmax(logits, p.experts, scratch.scores);
      }
      for (int32_t e = 0; e < p.experts; ++e) {
        scratch.biased[e] = p.bias != nullptr ? scratch.scores[e] + p.bias[e] : scratch.scores[e];
      }
      int32_t* ids = p.ids + t * p.top_k;
      if (p.forced_ids != nullptr) {
        std::copy_n(p.forced_ids + t * p.top_k, p.top_k, ids);
      } else if (balanced) {
        PickBalanced(p, t, scratch, picks, ids);
      } else {
        PickBest(p, scratch, p.top_k, ids);
      }
      std::sort(ids, ids + p.top_k);
      float* weights = p.weights + t * p.top_k;
      float sum = 0;
      for (int32_t j = 0; j < p.top_k; ++j) {
        weights[j] = scratch.scores[ids[j]];
        // The bias of a group is for the choice alone.
        if (p.biased_weights && p.bias != nullptr) weights[j] += p.bias[ids[j]];
        sum += weights[j];
      }
      for (int32_t j = 0; j < p.top_k; ++j) {
        if (p.renormalize) weights[j] = weights[j] / (sum + 1e-20f);
        weights[j] *= p.scale;
      }
    }
  });
}

void CpuOps::RouterSoftCap(const RouterSoftCapParams& p, Stream) {
  const char* op = "RouterSoftCap";
  CheckPointer(op, "balance", p.balance);
  const RouterBalance& balance = *p.balance;
  CheckPointer(op, "balance.candidates", balance.candidates);
  CheckPointer(op, "balance.candidate_values", balance.candidate_values);
  CheckPointer(op, "balance.candidate_scores", balance.candidate_scores);
  CheckTrue(p.factor >= 1 && p.tau >= 0, op,
            "factor must be at least 1 and tau at least 0, they are " + std::to_string(p.factor) + " and " +
                std::to_string(p.tau));
  const int64_t live = p.live_tokens != nullptr ? std::min<int64_t>(*p.live_tokens, p.tokens) : p.tokens;
  const float share = p.factor * static_cast<float>(live * p.top_k) / static_cast<float>(balance.groups);
  const auto capacity = static_cast<int32_t>(std::ceil(share));
  const auto group_of = [&](int32_t e) { return GroupOfExpert(e, p.experts, balance.groups); };
  std::vector<int32_t> taken(static_cast<size_t>(balance.groups)), seen(taken.size());
  for (int64_t i = 0; i < live * p.top_k; ++i) ++taken[static_cast<size_t>(group_of(p.ids[i]))];
  const int32_t width = 2 * p.top_k;
  std::vector<int32_t> chosen(static_cast<size_t>(p.top_k));  // places in the row's candidates
  for (int64_t t = 0; t < live; ++t) {
    const int32_t* candidates = balance.candidates + t * width;
    const float* values = balance.candidate_values + t * width;
    const float* scores = balance.candidate_scores + t * width;
    uint64_t swaps = 0;
    std::vector<bool> used(static_cast<size_t>(width));
    for (int32_t j = 0; j < p.top_k; ++j) {
      const int32_t group = group_of(candidates[j]);
      chosen[static_cast<size_t>(j)] = j;
      if (++seen[static_cast<size_t>(group)] <= capacity) continue;
      for (int32_t c = p.top_k; c < width && candidates[c] >= 0; ++c) {
        // The cutoff is the first candidate that was not chosen.
        if (!(values[c] >= values[p.top_k] - p.tau)) break;
        int32_t& room = taken[static_cast<size_t>(group_of(candidates[c]))];
        if (used[static_cast<size_t>(c)] || room >= capacity) continue;
        used[static_cast<size_t>(c)] = true;
        chosen[static_cast<size_t>(j)] = c;
        ++room;
        ++swaps;
        Count(balance.load + group, ~0u);  // one less
        Count(balance.load + group_of(candidates[c]), 1u);
        break;
      }
    }
    if (swaps == 0) continue;
    Count(balance.sums + 3, swaps);
    std::sort(chosen.begin(), chosen.end(), [&](int32_t a, int32_t b) { return candidates[a] < candidates[b]; });
    float sum = 0;
    for (const int32_t c : chosen) sum += scores[c];
    for (int32_t j = 0; j < p.top_k; ++j) {
      const int32_t c = chosen[static_cast<size_t>(j)];
      p.ids[t * p.top_k + j] = candidates[c];
      p.weights[t * p.top_k + j] = (p.renormalize ? scores[c] / (sum + 1e-20f) : scores[c]) * p.scale;
    }
  }
}

}  // namespace k3
