#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/op_params.h"

namespace k3 {

// Balance of experts by their own margins (`--moe-routing local-quantile`): each source rank keeps, for each
// destination rank, how far its recent tokens were from choosing that rank's experts, and lowers the selection bias of
// a destination that gets more than `kappa` times its share, as far as its histogram says is needed and no further. No
// rank asks another: where every source spreads its own tokens, the sum is spread too. Everything that decides is an
// integer count, so ranks that see the same tokens in any order publish the same.
//
// Margin of expert j of rank g for a token: x = a - s_j - b_j, a the token's cutoff (the (k+1)-th biased score). The
// expert is chosen while x < delta_g, so the load of g at another delta is the count of margins below it.
struct QuantileOptions {
  double kappa = 1.05;        // dead band: more than this times the fair share is suppressed
  double window = 1;          // times 1024 * groups / top_k tokens: what an update looks back on, at least
  int32_t update_steps = 4;   // U, of decode steps; a step with a prompt is worth as many
  int32_t decay_shift = 2;    // sh: an update looks back on about 2^sh of them
  double eta = 1.0;           // share of the way to the target
  double max_delta = 0.10;    // also never above the mean gap between the k-th and the last candidate
  int32_t epoch_updates = 1;  // an epoch stays current for so many updates, at least
  bool guards = true;

  // INVALID_ARGUMENT with the field, its value and what is allowed.
  absl::Status Check() const;
};

// What one rank has counted of one layer over its window; integers only.
class MarginHistogram {
 public:
  static constexpr int32_t kFraction = 10;  // counts are Q22.10, so that decay keeps small ones

  MarginHistogram(int32_t groups, int32_t top_k) : top_k_(top_k), bins_(static_cast<size_t>(groups) * kMarginBins) {}

  // Takes over what a layer's RouterBalance has counted: margins [groups, kMarginBins], sums [kBalanceSums].
  void Add(const uint32_t* margins, const uint64_t* sums);

  // Tokens in the window.
  double tokens() const { return static_cast<double>(tokens_) / (1 << kFraction); }
  // Smallest margin below which `count` of the group's margins lie; infinite when there are fewer.
  double MarginAt(int32_t group, double count) const;
  double mean_gap() const;
  // Of all choices, those that the frozen bias would not have made.
  double override_share() const;
  void Decay(int32_t shift);

 private:
  int32_t top_k_;
  std::vector<uint32_t> bins_;  // [groups][kMarginBins]
  uint64_t tokens_ = 0;         // Q.10
  uint64_t gaps_ = 0;           // Q.10 of gaps in units of 2^-kGapBits
  uint64_t overrides_ = 0;      // Q.10
};

// The bias in force: [layers][groups], at most 0. Immutable once made. Epoch 0 changes nothing, and is what a control
// that has nothing to suppress goes back to; all others have numbers of their own.
struct BiasEpoch {
  uint64_t number = 0;
  int32_t groups = 0;
  std::vector<float> delta;

  std::span<const float> layer(int32_t layer) const {
    return {delta.data() + static_cast<size_t>(layer) * static_cast<size_t>(groups), static_cast<size_t>(groups)};
  }
};

// One source rank's control of all layers. Not thread-safe.
class QuantileControl {
 public:
  static constexpr size_t kKept = 8;

  QuantileControl(int32_t layers, int32_t groups, int32_t top_k, const QuantileOptions& options = {});
  // Holds one recorded epoch for good.
  QuantileControl(int32_t top_k, BiasEpoch epoch);

  int32_t layers() const { return static_cast<int32_t>(layers_.size()); }
  int32_t groups() const { return groups_; }
  // A step of `tokens` counted rows has been planned. True when its end is to be followed by an update: after
  // `update_steps` of them, or one with a prompt, and not before an update's part of the window is full.
  bool StepEnds(int64_t tokens, bool prompt);
  // The layer's counts since the last update; Add to them, then Update.
  MarginHistogram& histogram(int32_t layer) { return layers_[static_cast<size_t>(layer)].histogram; }
  // Moves every layer's bias, and makes a new epoch of it where it has moved.
  void Update();

  std::shared_ptr<const BiasEpoch> current() const { return epochs_.back(); }
  // One of the last that were made, or null.
  std::shared_ptr<const BiasEpoch> Find(uint64_t number) const;

  struct Stats {
    double override_share = 0;  // over all layers
    double worst_override_share = 0;
    double mean_delta = 0;  // absolute, over layers and groups
    uint64_t updates = 0;
    uint64_t sign_changes = 0;
    uint64_t halvings = 0;  // of max_delta by the guard
    uint64_t alarms = 0;    // a layer given up to the frozen bias
    uint64_t dampings = 0;  // of eta by the oscillation guard
  };
  Stats stats() const;

 private:
  struct Layer {
    Layer(int32_t groups, int32_t top_k, const QuantileOptions& options)
        : histogram(groups, top_k),
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
    bool given_up = false;
    int32_t since_halving = 0;  // updates
  };
  // Sets the layer's limit by the share of overrides; false when it is given up.
  bool Guard(Layer& layer);
  void Update(Layer& layer);
  void Publish();

  const QuantileOptions options_;
  const int32_t groups_;
  const int32_t top_k_;
  const bool frozen_ = false;
  int64_t least_tokens_ = 0;  // of an update
  std::vector<Layer> layers_;
  int64_t steps_ = 0;  // since the last update
  int64_t tokens_ = 0;
  int64_t age_ = 0;  // updates since the current epoch was made
  uint64_t next_number_ = 1;
  std::deque<std::shared_ptr<const BiasEpoch>> epochs_;
  Stats stats_;
};

}  // namespace k3
