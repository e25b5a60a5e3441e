#include "engine/quantile_control.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace k3 {
namespace {

constexpr double kGapUnit = 1 << 20;
constexpr double kHalveAbove = 0.03;  // of the choices overridden
constexpr double kGiveUpAbove = 0.05;
constexpr double kAmplitude = 0.01;
constexpr int kMostSignChanges = 4;  // of the last eight updates
constexpr double kLeastEta = 0.125;
constexpr int32_t kMostShift = 4;

}  // namespace

int32_t MarginHistogram::BinOf(float margin) {
  const float place = (margin - kLow) * (static_cast<float>(kBins) / (kHigh - kLow));
  return static_cast<int32_t>(std::clamp(place, 0.0f, static_cast<float>(kBins - 1)));
}

void MarginHistogram::AddToken(float gap, int32_t overrides) {
  tokens_ += uint64_t{1} << kFraction;
  gaps_ += static_cast<uint64_t>(std::llround(std::max(gap, 0.0f) * kGapUnit)) << kFraction;
  overrides_ += static_cast<uint64_t>(overrides) << kFraction;
}

double MarginHistogram::MarginAt(int32_t group, double count) const {
  const uint32_t* bins = bins_.data() + static_cast<size_t>(group) * kBins;
  const double wanted = count * (1 << kFraction);
  uint64_t below = 0;
  for (int32_t bin = 0; bin < kBins; ++bin) {
    if (static_cast<double>(below + bins[bin]) >= wanted && bins[bin] > 0) {
      const double inside = (wanted - static_cast<double>(below)) / bins[bin];
      return kLow + (bin + std::clamp(inside, 0.0, 1.0)) * (static_cast<double>(kHigh - kLow) / kBins);
    }
    below += bins[bin];
  }
  return std::numeric_limits<double>::infinity();
}

double MarginHistogram::mean_gap() const {
  return tokens_ == 0 ? 0 : static_cast<double>(gaps_) / kGapUnit / static_cast<double>(tokens_);
}

double MarginHistogram::override_share() const {
  return chosen_ == 0 ? 0 : static_cast<double>(overrides_) / static_cast<double>(chosen_);
}

void MarginHistogram::Decay(int32_t shift) {
  for (uint32_t& bin : bins_) bin -= bin >> shift;
  for (uint64_t* count : {&tokens_, &gaps_, &overrides_, &chosen_}) *count -= *count >> shift;
}

QuantileControl::QuantileControl(int32_t layers, int32_t groups, int32_t top_k, const QuantileOptions& options)
    : options_(options), groups_(groups), top_k_(top_k) {
  for (int32_t layer = 0; layer < layers; ++layer) layers_.emplace_back(groups, options);
  auto first = std::make_shared<BiasEpoch>();
  first->groups = groups;
  first->delta.assign(static_cast<size_t>(layers) * static_cast<size_t>(groups), 0.0f);
  epochs_.push_back(std::move(first));
}

void QuantileControl::EndStep() {
  if (++steps_ % options_.update_steps != 0) return;
  auto next = std::make_shared<BiasEpoch>();
  next->number = epochs_.back()->number + 1;
  next->groups = groups_;
  for (Layer& layer : layers_) {
    Update(layer);
    for (const double delta : layer.delta) next->delta.push_back(static_cast<float>(delta));
  }
  epochs_.push_back(std::move(next));
  if (epochs_.size() > kLiveEpochs) epochs_.pop_front();
}

void QuantileControl::Update(Layer& layer) {
  const MarginHistogram& counts = layer.histogram;
  const double fair = counts.tokens() * top_k_ / groups_;
  bool give_up = false;
  if (options_.guards && counts.tokens() > 0) {
    const double share = counts.override_share();
    if (share > kGiveUpAbove) {
      give_up = true;
      ++stats_.alarms;
    }
    if (share > kHalveAbove) {
      layer.max_delta /= 2;
      ++stats_.halvings;
    }
  }
  const double limit = std::min(layer.max_delta, counts.mean_gap());
  bool oscillates = false;
  for (int32_t g = 0; g < groups_; ++g) {
    double target = 0;
    if (!give_up && fair > 0)
      target = std::clamp(std::min(0.0, counts.MarginAt(g, options_.kappa * fair)), -limit, 0.0);
    double& delta = layer.delta[static_cast<size_t>(g)];
    const double step = give_up ? -delta : layer.eta * (target - delta);
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
  layer.histogram.Decay(layer.decay_shift);
}

std::shared_ptr<const BiasEpoch> QuantileControl::Find(uint64_t number) const {
  for (const auto& epoch : epochs_) {
    if (epoch->number == number) return epoch;
  }
  return nullptr;
}

QuantileControl::Stats QuantileControl::stats() const {
  Stats stats = stats_;
  double sum = 0;
  for (const Layer& layer : layers_) {
    stats.override_share = std::max(stats.override_share, layer.histogram.override_share());
    for (const double delta : layer.delta) sum += std::abs(delta);
  }
  stats.mean_delta = sum / static_cast<double>(layers_.size() * static_cast<size_t>(groups_));
  return stats;
}

}  // namespace k3
