#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "kernels/core/shape_check.h"
#include "kernels/cpu/cpu_ops.h"

// Sampling of one row at a time (SampleParams lists the order of operations). A filter is a Cut: the least (value, id)
// that it keeps, where a larger value comes first and equal values come in id order. Filters only raise the cut; the
// draw then walks the kept ids in ascending order.
namespace k3 {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Entry {
  float value;
  int32_t id;
};
bool Before(const Entry& a, const Entry& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

// Keeps every entry at or before itself in the order of Before.
using Cut = Entry;
bool Keeps(const Cut& cut, float value, int32_t id) { return !Before(cut, {value, id}); }

// The best `count` entries of a row, best first; -inf entries take part.
void TopEntries(const float* z, int64_t n, int count, std::vector<Entry>& top) {
  top.clear();
  if (count <= 0) return;
  for (int32_t i = 0; i < n; ++i) {
    // A heap whose front is the worst kept entry.
    if (static_cast<int>(top.size()) < count) {
      top.push_back({z[i], i});
      std::push_heap(top.begin(), top.end(), Before);
    } else if (z[i] > top.front().value) {  // an equal value with a higher id never displaces
      std::pop_heap(top.begin(), top.end(), Before);
      top.back() = {z[i], i};
      std::push_heap(top.begin(), top.end(), Before);
    }
  }
  std::sort_heap(top.begin(), top.end(), Before);
}

// Penalties, then biases; ids outside the vocabulary are skipped.
void ApplyEdits(const SampleRow& row, const LogitEdit* edits, int64_t vocab, float* z) {
  for (int32_t e = row.edit_begin; e < row.edit_end; ++e) {
    const LogitEdit& edit = edits[e];
    if (edit.id < 0 || edit.id >= vocab) continue;
    float& logit = z[edit.id];
    if (edit.kind == LogitEditKind::kBias) {
      logit += edit.value;
      continue;
    }
    if (edit.count > 0 || edit.in_prompt != 0) {
      logit = logit > 0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
    }
    if (edit.count > 0) {
      logit -= row.presence_penalty;
      logit -= row.frequency_penalty * static_cast<float>(edit.count);
    }
  }
}

void ApplyMask(const uint32_t* mask, int64_t vocab, float* z) {
  for (int64_t i = 0; i < vocab; ++i) {
    if ((mask[i / 32] >> (i % 32) & 1) == 0) z[i] = -kInfinity;
  }
}

// Finds cuts by rank or by probability mass without sorting the row: entries are counted into buckets by their distance
// to the maximum, and only the bucket in which the cut falls is sorted. `x` are log-probabilities up to a constant,
// with maximum 0; `weight` are their exponentials.
class CutFinder {
 public:
  CutFinder(const float* x, const float* weight, int64_t vocab) : x_(x), weight_(weight), vocab_(vocab) {}

  // Keeps the best `rank` of the entries that `cut` keeps.
  void CutToRank(int64_t rank, Cut& cut) {
    Count(cut);
    int bucket = 0;
    while (bucket < kBuckets && count_[bucket] < rank) rank -= count_[bucket++];
    if (bucket == kBuckets) return;
    SortBucket(bucket, cut);
    cut = sorted_[static_cast<size_t>(rank - 1)];
  }

  // Keeps the shortest prefix of the kept entries, best first, whose probability reaches `fraction` of theirs.
  void CutToMass(double fraction, Cut& cut) {
    Count(cut);
    double total = 0;
    for (double mass : mass_) total += mass;
    double missing = fraction * total;
    int bucket = 0;
    int last = 0;
    while (bucket < kBuckets && mass_[bucket] < missing) {
      if (count_[bucket] > 0) last = bucket;
      missing -= mass_[bucket++];
    }
    if (bucket == kBuckets) bucket = last;  // rounding left a rest: everything stays
    SortBucket(bucket, cut);
    for (const Entry& entry : sorted_) {
      cut = entry;
      missing -= static_cast<double>(weight_[entry.id]);
      if (missing <= 0) break;
    }
  }

 private:
  static constexpr int kBuckets = 1024;  // 1/32 apart: the last holds everything beyond a factor of exp(-32)

  static int Bucket(float x) { return x > -kBuckets / 32 ? static_cast<int>(x * -32) : kBuckets - 1; }

  template <typename F>
  void ForKept(const Cut& cut, const F& f) const {
    for (int32_t i = 0; i < vocab_; ++i) {
      if (x_[i] > -kInfinity && Keeps(cut, x_[i], i)) f(i);
    }
  }
  void Count(const Cut& cut) {
    std::fill_n(count_, kBuckets, 0);
    std::fill_n(mass_, kBuckets, 0.0);
    ForKept(cut, [&](int32_t i) {
      const int bucket = Bucket(x_[i]);
      ++count_[bucket];
      mass_[bucket] += static_cast<double>(weight_[i]);
    });
  }
  void SortBucket(int bucket, const Cut& cut) {
    sorted_.clear();
    ForKept(cut, [&](int32_t i) {
      if (Bucket(x_[i]) == bucket) sorted_.push_back({x_[i], i});
    });
    std::sort(sorted_.begin(), sorted_.end(), Before);
  }

  const float* x_;
  const float* weight_;
  int64_t vocab_;
  int64_t count_[kBuckets];
  double mass_[kBuckets];
  std::vector<Entry> sorted_;
};

// The id whose interval of the cumulative weight holds `uniform`; kept ids ascend. Weights are summed in blocks, four
// chains each, so that only the block of the drawn id is walked one by one.
int32_t Draw(const float* x, const float* weight, int64_t vocab, const Cut& cut, float uniform) {
  constexpr int64_t kBlock = 64;
  const auto kept = [&](int64_t i) { return Keeps(cut, x[i], static_cast<int32_t>(i)) ? double{weight[i]} : 0.0; };
  const auto block_sum = [&](int64_t begin) {
    double sums[4] = {};
    for (int64_t i = begin; i < std::min(vocab, begin + kBlock); ++i) sums[i % 4] += kept(i);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  };
  double total = 0;
  for (int64_t begin = 0; begin < vocab; begin += kBlock) total += block_sum(begin);
  const double target = double{uniform} * total;
  double cumulative = 0;
  int64_t last = -1;  // the block of the drawn id
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    const double sum = block_sum(begin);
    if (sum == 0) continue;
    last = begin;
    if (cumulative + sum > target) break;
    cumulative += sum;
  }
  int32_t drawn = -1;
  for (int64_t i = last; i < std::min(vocab, last + kBlock); ++i) {
    if (kept(i) == 0) continue;
    drawn = static_cast<int32_t>(i);
    cumulative += kept(i);
    if (cumulative > target) break;
  }
  return drawn;
}

void CheckSample(const SampleParams& p) {
  const char* op = "Sample";
  CheckMatrix(op, "logits", p.logits, p.logits.rows, p.logits.cols, DType::kF32);
  if (p.logits.rows == 0) return;
  CheckTrue(p.logits.cols > 0, op, "the vocabulary is empty");
  for (const auto& [name, pointer] : {std::pair<const char*, const void*>{"rows", p.rows},
                                      {"token", p.token},
                                      {"status", p.status},
                                      {"logprob", p.logprob},
                                      {"scratch", p.scratch}}) {
    CheckPointer(op, name, pointer);
  }
  for (int64_t r = 0; r < p.logits.rows; ++r) {
    const SampleRow& row = p.rows[r];
    const std::string where = "row " + std::to_string(r) + ": ";
    CheckTrue(row.top_logprobs >= 0 && row.top_logprobs <= p.max_top_logprobs, op,
              where + "top_logprobs " + std::to_string(row.top_logprobs) +
                  " is outside [0, max_top_logprobs = " + std::to_string(p.max_top_logprobs) + "]");
    CheckTrue(row.edit_begin <= row.edit_end, op, where + "edit_begin is above edit_end");
    CheckTrue(row.edit_begin == row.edit_end || p.edits != nullptr, op, where + "has edits, but edits is null");
    CheckTrue(row.mask_row < 0 || p.allowed_mask != nullptr, op, where + "has a mask, but allowed_mask is null");
    CheckTrue(row.temperature >= 0, op, where + "temperature must not be negative");
  }
  if (p.max_top_logprobs > 0) {
    CheckPointer(op, "top_ids", p.top_ids);
    CheckPointer(op, "top_logprobs", p.top_logprobs);
  }
}

}  // namespace

size_t CpuOps::SampleScratchBytes(int64_t, int64_t vocab) const {
  return static_cast<size_t>(pool_.threads()) * 2 * static_cast<size_t>(vocab) * sizeof(float) + 64;
}

void CpuOps::Sample(const SampleParams& p, Stream) {
  CheckSample(p);
  const int64_t vocab = p.logits.cols;
  const int64_t mask_words = (vocab + 31) / 32;
  ForTasks(p.logits.rows, 8 * vocab, [&](int64_t r, int thread) {
    const SampleRow& row = p.rows[r];
    float* z = p.logits.as<float>() + r * p.logits.ld;
    int32_t* top_ids = p.top_ids + r * p.max_top_logprobs;
    float* top_logprobs = p.top_logprobs + r * p.max_top_logprobs;
    p.token[r] = -1;
    p.logprob[r] = kNan;
    for (int i = 0; i < p.max_top_logprobs; ++i) {
      top_ids[i] = -1;
      top_logprobs[i] = kNan;
    }

    float max;
    bool bad;
    kernels_.logit_range(z, vocab, &max, &bad);
    if (bad || max == -kInfinity) {
      p.status[r] = static_cast<int32_t>(SampleStatus::kNonFinite);
      return;
    }
    p.status[r] = static_cast<int32_t>(SampleStatus::kOk);

    // Of the raw logits, so taken before the edits. logprob_of and the draw share the formula with the top list, hence
    // equal ids get equal bits.
    const float log_sum = static_cast<float>(std::log(kernels_.sum_exp(z, vocab, max)));
    const auto log_probability = [&](float raw) { return raw - max - log_sum; };
    if (row.top_logprobs > 0) {
      std::vector<Entry> top;
      TopEntries(z, vocab, row.top_logprobs, top);
      for (size_t i = 0; i < top.size(); ++i) {
        top_ids[i] = top[i].id;
        top_logprobs[i] = log_probability(top[i].value);
      }
    }
    if (row.logprob_of >= 0 && row.logprob_of < vocab) p.logprob[r] = log_probability(z[row.logprob_of]);
    if (row.draw == 0) return;

    std::vector<Entry> raw;  // what the edits overwrite
    for (int32_t e = row.edit_begin; e < row.edit_end; ++e) {
      const int32_t id = p.edits[e].id;
      if (id >= 0 && id < vocab) raw.push_back({z[id], id});
    }
    ApplyEdits(row, p.edits, vocab, z);
    if (row.mask_row >= 0) ApplyMask(p.allowed_mask + row.mask_row * mask_words, vocab, z);

    float best_logit;
    kernels_.logit_range(z, vocab, &best_logit, &bad);
    if (!(best_logit > -kInfinity)) {
      p.status[r] = static_cast<int32_t>(SampleStatus::kNothingAllowed);
      return;
    }
    const auto best = static_cast<int32_t>(std::find(z, z + vocab, best_logit) - z);
    int32_t chosen = best;
    if (row.temperature > 0 && row.top_k != 1) {
      float* x = static_cast<float*>(p.scratch) + thread * 2 * vocab;
      float* weight = x + vocab;
      for (int64_t i = 0; i < vocab; ++i) x[i] = (z[i] - best_logit) / row.temperature;
      kernels_.exp(x, vocab, weight);
      Cut cut{-kInfinity, static_cast<int32_t>(vocab)};
      CutFinder finder(x, weight, vocab);
      if (row.top_k > 0 && row.top_k < vocab) finder.CutToRank(row.top_k, cut);
      if (row.top_p < 1) finder.CutToMass(static_cast<double>(row.top_p), cut);
      if (row.min_p > 0) {
        const Cut floor{std::log(row.min_p), static_cast<int32_t>(vocab)};
        if (Before(floor, cut)) cut = floor;
      }
      chosen = Draw(x, weight, vocab, cut, row.uniform);
    }
    p.token[r] = chosen;
    if (row.logprob_of < 0) {
      float logit = z[chosen];
      for (const Entry& entry : raw) {
        if (entry.id == chosen) {
          logit = entry.value;
          break;
        }
      }
      p.logprob[r] = log_probability(logit);
    }
  });
}

}  // namespace k3
