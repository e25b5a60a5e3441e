#include "engine/quantile_control.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"

namespace k3 {
namespace {

constexpr double kHalveAbove = 0.03;  // of the choices overridden
constexpr double kGiveUpAbove = 0.05;
constexpr double kResumeBelow = 0.015;  // a layer that was given up, or whose limit was halved, goes on
constexpr int32_t kCalmUpdates = 64;    // below that for so long, a halved limit doubles again
constexpr double kAmplitude = 0.01;
constexpr int kMostSignChanges = 4;  // of the last eight updates
constexpr double kLeastEta = 0.125;
constexpr int32_t kMostShift = 4;
constexpr double kLeastChange = 1.0 / 2048;  // of a bias, for a new epoch: an eighth of a bin
constexpr double kWindowHits = 1024;         // of a group with its fair share: 3 % error

absl::Status CheckRange(const char* field, double value, double least, double most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, ", must be in [", least, ", ", most, "]"));
}

}  // namespace

absl::Status QuantileOptions::Check() const {
  for (const absl::Status& status :
       {CheckRange("kappa", kappa, 1.02, 1.15), CheckRange("window", window, 1, 8),
        CheckRange("update_steps", update_steps, 1, 16), CheckRange("decay_shift", decay_shift, 2, kMostShift),
        CheckRange("eta", eta, 0.25, 1), CheckRange("max_delta", max_delta, 0.001, 0.2),
        CheckRange("epoch_updates", epoch_updates, 1, 1 << 20)}) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void MarginHistogram::Add(const uint32_t* margins, const uint64_t* sums) {
  for (size_t i = 0; i < bins_.size(); ++i) bins_[i] += margins[i] << kFraction;
  tokens_ += sums[0] << kFraction;
  gaps_ += sums[1] << kFraction;
  overrides_ += sums[2] << kFraction;
}

double MarginHistogram::MarginAt(int32_t group, double count) const {
  const uint32_t* bins = bins_.data() + static_cast<size_t>(group) * kMarginBins;
  const double wanted = count * (1 << kFraction);
  uint64_t below = 0;
  for (int32_t bin = 0; bin < kMarginBins; ++bin) {
    if (static_cast<double>(below + bins[bin]) >= wanted && bins[bin] > 0) {
      const double inside = (wanted - static_cast<double>(below)) / bins[bin];
      const double width = static_cast<double>(kMarginHigh - kMarginLow) / kMarginBins;
      return static_cast<double>(kMarginLow) + (bin + std::clamp(inside, 0.0, 1.0)) * width;
    }
    below += bins[bin];
  }
  return std::numeric_limits<double>::infinity();
}

double MarginHistogram::mean_gap() const {
  return tokens_ == 0 ? 0 : static_cast<double>(gaps_) / (1 << kGapBits) / static_cast<double>(tokens_);
}

double MarginHistogram::override_share() const {
  return tokens_ == 0 ? 0 : static_cast<double>(overrides_) / (static_cast<double>(tokens_) * top_k_);
}

void MarginHistogram::Decay(int32_t shift) {
  for (uint32_t& bin : bins_) bin -= bin >> shift;
  for (uint64_t* count : {&tokens_, &gaps_, &overrides_}) *count -= *count >> shift;
}

QuantileControl::QuantileControl(int32_t layers, int32_t groups, int32_t top_k, const QuantileOptions& options)
    : options_(options),
      groups_(groups),
      top_k_(top_k),
      least_tokens_(static_cast<int64_t>(std::ceil(options.window * kWindowHits * groups / top_k)) >>
                    options.decay_shift) {
  for (int32_t layer = 0; layer < layers; ++layer) layers_.emplace_back(groups, top_k, options);
  auto first = std::make_shared<BiasEpoch>();
  first->groups = groups;
  first->delta.assign(static_cast<size_t>(layers) * static_cast<size_t>(groups), 0.0f);
  epochs_.push_back(std::move(first));
}

QuantileControl::QuantileControl(int32_t top_k, BiasEpoch epoch) : groups_(epoch.groups), top_k_(top_k), frozen_(true) {
  K3_CHECK(groups_ > 0 && epoch.delta.size() % static_cast<size_t>(groups_) == 0);
  const int32_t layers = static_cast<int32_t>(epoch.delta.size()) / groups_;
  for (int32_t layer = 0; layer < layers; ++layer) layers_.emplace_back(groups_, top_k, options_);
  epochs_.push_back(std::make_shared<BiasEpoch>(std::move(epoch)));
}

bool QuantileControl::StepEnds(int64_t tokens, bool prompt) {
  tokens_ += tokens;
  ++steps_;
  if ((steps_ < options_.update_steps && !prompt) || tokens_ < least_tokens_ || tokens_ == 0) return false;
  steps_ = tokens_ = 0;
  return true;
}

void QuantileControl::Update() {
  ++stats_.updates;
  ++age_;
  for (Layer& layer : layers_) Update(layer);
  if (!frozen_ && age_ >= options_.epoch_updates) Publish();
}

void QuantileControl::Publish() {
  const std::vector<float>& before = epochs_.back()->delta;
  bool moved = false, any = false;
  size_t i = 0;
  for (const Layer& layer : layers_) {
    for (const double delta : layer.delta) {
      moved |= std::abs(delta - before[i++]) > kLeastChange;
      any |= delta < -kLeastChange;
    }
  }
  if (!moved && !(epochs_.back()->number != 0 && !any)) return;
  auto next = std::make_shared<BiasEpoch>();
  next->groups = groups_;
  next->number = any ? next_number_++ : 0;
  for (const Layer& layer : layers_) {
    for (const double delta : layer.delta) next->delta.push_back(any ? static_cast<float>(delta) : 0.0f);
  }
  epochs_.push_back(std::move(next));
  if (epochs_.size() > kKept) epochs_.pop_front();
  age_ = 0;
}

bool QuantileControl::Guard(Layer& layer) {
  if (!options_.guards || layer.histogram.tokens() == 0) return true;
  const double share = layer.histogram.override_share();
  ++layer.since_halving;
  if (share > kGiveUpAbove && !layer.given_up) {
    layer.given_up = true;
    ++stats_.alarms;
  } else if (layer.given_up && share < kResumeBelow) {
    layer.given_up = false;
  }
  // What was overridden before the last halving must have left the window before it counts for another.
  const bool again = layer.max_delta == options_.max_delta || layer.since_halving >= (1 << layer.decay_shift);
  if (share > kHalveAbove && again) {
    layer.max_delta /= 2;
    layer.since_halving = 0;
    ++stats_.halvings;
  } else if (share >= kResumeBelow) {
    layer.since_halving = std::min(layer.since_halving, 1 << layer.decay_shift);  // not calm
  } else if (layer.since_halving >= kCalmUpdates && layer.max_delta < options_.max_delta) {
    layer.max_delta = std::min(2 * layer.max_delta, options_.max_delta);
    layer.since_halving = 0;
  }
  return !layer.given_up;
}

void QuantileControl::Update(Layer& layer) {
  const MarginHistogram& counts = layer.histogram;
  if (!frozen_) {
    const double fair = counts.tokens() * top_k_ / groups_;
    const bool active = Guard(layer) && fair > 0;
    const double limit = std::min(layer.max_delta, counts.mean_gap());
    bool oscillates = false;
    for (int32_t g = 0; g < groups_; ++g) {
      double target = 0;
      if (active) target = std::clamp(std::min(0.0, counts.MarginAt(g, options_.kappa * fair)), -limit, 0.0);
      double& delta = layer.delta[static_cast<size_t>(g)];
      const double step = active ? layer.eta * (target - delta) : -delta;
      double& last = layer.last_step[static_cast<size_t>(g)];
      const bool changed = step * last < 0 && std::abs(step) > kAmplitude && std::abs(last) > kAmplitude;
      uint8_t& history = layer.changes[static_cast<size_t>(g)];
      history = static_cast<uint8_t>(history << 1 | (changed ? 1 : 0));
      stats_.sign_changes += changed;
      oscillates |= std::popcount(history) > kMostSignChanges;
      delta += step;
      last = step;
    }
    if (options_.guards && oscillates) {
      layer.eta = std::max(layer.eta / 2, kLeastEta);
      layer.decay_shift = std::min(layer.decay_shift + 1, kMostShift);
      std::fill(layer.changes.begin(), layer.changes.end(), uint8_t{0});
      ++stats_.dampings;
    }
  }
  layer.histogram.Decay(layer.decay_shift);
}

std::shared_ptr<const BiasEpoch> QuantileControl::Find(uint64_t number) const {
  for (auto epoch = epochs_.rbegin(); epoch != epochs_.rend(); ++epoch) {
    if ((*epoch)->number == number) return *epoch;
  }
  return nullptr;
}

QuantileControl::Stats QuantileControl::stats() const {
  Stats stats = stats_;
  const double values = static_cast<double>(layers_.size() * static_cast<size_t>(groups_));
  for (const Layer& layer : layers_) {
    const double share = layer.histogram.override_share();
    stats.override_share += share / static_cast<double>(layers_.size());
    stats.worst_override_share = std::max(stats.worst_override_share, share);
  }
  for (const float delta : epochs_.back()->delta) stats.mean_delta += std::abs(delta) / values;
  return stats;
}

}  // namespace k3
