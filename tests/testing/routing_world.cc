#include "tests/testing/routing_world.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace k3::testing {
namespace {

constexpr float kPopularity = 0.3f;
constexpr float kOffset = -1.0f;

}  // namespace

RoutingWorld::RoutingWorld(float gap, uint32_t seed)
    : gap_(gap),
      random_(seed),
      directions_(static_cast<size_t>(kDims * kExperts)),
      popularity_(kExperts),
      centres_(static_cast<size_t>(kDomains * kDims)) {
  std::normal_distribution<float> normal;
  for (int e = 0; e < kExperts; ++e) {
    for (int d = 0; d < kDims; ++d)
      directions_[static_cast<size_t>(d * kExperts + e)] = normal(random_) / std::sqrt(static_cast<float>(kDims));
  }
  for (float& p : popularity_) p = kPopularity * normal(random_);
  for (float& c : centres_) c = normal(random_);
  Train();
}

std::vector<float> RoutingWorld::Logits(int count, const Mix& mix) {
  std::discrete_distribution<int> domains(mix.begin(), mix.end());
  std::normal_distribution<float> normal;
  std::vector<float> logits(static_cast<size_t>(count) * kExperts);
  for (int t = 0; t < count; ++t) {
    const int domain = domains(random_);
    float* row = logits.data() + static_cast<size_t>(t) * kExperts;
    for (int e = 0; e < kExperts; ++e) row[e] = popularity_[static_cast<size_t>(e)] + kOffset;
    for (int d = 0; d < kDims; ++d) {
      const float z = gap_ * centres_[static_cast<size_t>(domain * kDims + d)] + normal(random_);
      const float* direction = directions_.data() + static_cast<size_t>(d) * kExperts;
      for (int e = 0; e < kExperts; ++e) row[e] += direction[e] * z;
    }
  }
  return logits;
}

// The rule of training: what bias an expert needs for its share of a batch, given the others'; then averaged.
void RoutingWorld::Train() {
  constexpr int kBatch = 2048, kSteps = 16, kJumps = 6;
  bias_.assign(kExperts, 0.0f);
  std::vector<float> cutoff(kBatch), biased(kExperts), required(kBatch);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<float> scores = Logits(kBatch, kTrainingMix);
    for (float& s : scores) s = 1.0f / (1.0f + std::exp(-s));
    for (int t = 0; t < kBatch; ++t) {
      const float* row = scores.data() + static_cast<size_t>(t) * kExperts;
      for (int e = 0; e < kExperts; ++e) biased[static_cast<size_t>(e)] = row[e] + bias_[static_cast<size_t>(e)];
      std::nth_element(biased.begin(), biased.begin() + kTopK, biased.end(), std::greater<>());
      cutoff[static_cast<size_t>(t)] = biased[kTopK];
    }
    const float keep = step < kJumps ? 0.0f : 1.0f - 1.0f / static_cast<float>(step - kJumps + 2);
    for (int e = 0; e < kExperts; ++e) {
      for (int t = 0; t < kBatch; ++t)
        required[static_cast<size_t>(t)] =
            cutoff[static_cast<size_t>(t)] - scores[static_cast<size_t>(t) * kExperts + static_cast<size_t>(e)];
      const auto place = required.begin() + kBatch * kTopK / kExperts;
      std::nth_element(required.begin(), place, required.end());
      float& bias = bias_[static_cast<size_t>(e)];
      bias = keep * bias + (1 - keep) * *place;
    }
    const float mean = std::accumulate(bias_.begin(), bias_.end(), 0.0f) / kExperts;
    for (float& b : bias_) b -= mean;
  }
}

}  // namespace k3::testing
