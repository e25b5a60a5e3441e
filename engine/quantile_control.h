#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

namespace k3 {

// Balance of experts by their own margins (`--moe-routing local-quantile`): each source rank keeps, for each
// destination rank, how far its recent tokens were from choosing that rank's experts, and lowers the selection bias of
// a destination that gets more than `kappa` times its share, as far as its histogram says is needed and no further. No
// rank asks another. Everything that decides is an integer count, so ranks that see the same tokens in any order
// publish the same.
//
// Margin of expert j of rank g for a token: x = a - s_j - b_j, a the token's cutoff (the (k+1)-th biased score). The
// expert is chosen while x < delta_g, so the load of g at another delta is the count of margins below it.
struct QuantileOptions {
  double kappa = 1.05;       // dead band: more than this times the fair share is suppressed
  int32_t update_steps = 4;  // U
  int32_t decay_shift = 2;   // sh: the window is about U * 2^sh steps
  double eta = 1.0;          // share of the way to the target
  double max_delta = 0.10;   // also never above the mean gap between the k-th and the last candidate
  bool guards = true;
};

// What one rank has counted of one layer; integers only.
class MarginHistogram {
 public:
  static constexpr int32_t kBins = 128;
  static constexpr float kLow = -0.25f, kHigh = 0.25f;
  static constexpr int32_t kFraction = 10;  // counts are Q22.10, so that decay keeps small ones

  explicit MarginHistogram(int32_t groups) : bins_(static_cast<size_t>(groups) * kBins) {}

  static int32_t BinOf(float margin);
  void AddMargin(int32_t group, float margin) {
    bins_[static_cast<size_t>(group) * kBins + BinOf(margin)] += 1u << kFraction;
  }
  // `gap`: k-th minus last candidate's biased score. `overrides`: choices that the frozen bias would not have made.
  void AddToken(float gap, int32_t overrides);
  void AddChosen(int32_t count) { chosen_ += static_cast<uint64_t>(count) << kFraction; }

  int32_t groups() const { return static_cast<int32_t>(bins_.size()) / kBins; }
  // Tokens in the window.
  double tokens() const { return static_cast<double>(tokens_) / (1 << kFraction); }
  // Smallest margin below which `count` of the group's margins lie; infinite when there are fewer.
  double MarginAt(int32_t group, double count) const;
  double mean_gap() const;
  double override_share() const;
  void Decay(int32_t shift);

 private:
  std::vector<uint32_t> bins_;  // [groups][kBins]
  uint64_t tokens_ = 0;         // Q.10
  uint64_t gaps_ = 0;           // Q.10 of gaps in units of 2^-20
  uint64_t overrides_ = 0;      // Q.10
  uint64_t chosen_ = 0;         // Q.10
};

// The bias in force: [layers][groups], at most 0. Immutable once published.
struct BiasEpoch {
  uint64_t number = 0;  // 0: nothing is changed
  int32_t groups = 0;
  std::vector<float> delta;

  std::span<const float> layer(int32_t layer) const {
    return {delta.data() + static_cast<size_t>(layer) * static_cast<size_t>(groups), static_cast<size_t>(groups)};
  }
};

// One source rank's control of all layers. Not thread-safe.
class QuantileControl {
 public:
  static constexpr size_t kLiveEpochs = 8;

  QuantileControl(int32_t layers, int32_t groups, int32_t top_k, const QuantileOptions& options = {});

  // The layer's counts of the step under way, filled by whoever routes.
  MarginHistogram& histogram(int32_t layer) { return layers_[static_cast<size_t>(layer)].histogram; }
  // A step has ended; every `update_steps` of them a new epoch is published.
  void EndStep();

  std::shared_ptr<const BiasEpoch> current() const { return epochs_.back(); }
  // A live epoch, or null: requests are pinned to the one current when they were admitted.
  std::shared_ptr<const BiasEpoch> Find(uint64_t number) const;

  struct Stats {
    double override_share = 0;  // the worst layer's
    double mean_delta = 0;      // absolute, over layers and groups
    uint64_t sign_changes = 0;
    uint64_t halvings = 0;  // of max_delta by the guard
    uint64_t alarms = 0;    // a layer given up to the frozen bias
    uint64_t dampings = 0;  // of eta by the oscillation guard
  };
  Stats stats() const;

 private:
  static constexpr int32_t kHistory = 8;
  struct Layer {
    Layer(int32_t groups, const QuantileOptions& options)
        : histogram(groups),
          delta(static_cast<size_t>(groups)),
          last_step(static_cast<size_t>(groups)),
          changes(static_cast<size_t>(groups)),
          eta(options.eta),
          max_delta(options.max_delta),
          decay_shift(options.decay_shift) {}
    MarginHistogram histogram;
    std::vector<double> delta;
    std::vector<double> last_step;
    std::vector<uint8_t> changes;  // one bit an update: the step changed its sign, with amplitude
    double eta;
    double max_delta;
    int32_t decay_shift;
  };
  void Update(Layer& layer);

  const QuantileOptions options_;
  const int32_t groups_;
  const int32_t top_k_;
  std::vector<Layer> layers_;
  int64_t steps_ = 0;
  std::deque<std::shared_ptr<const BiasEpoch>> epochs_;
  Stats stats_;
};

}  // namespace k3
