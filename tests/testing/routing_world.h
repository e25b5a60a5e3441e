#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <vector>

namespace k3::testing {

// Synthetic tokens for the balance of experts: 896 experts, 16 a token, tokens of four domains in a latent space of 24
// dimensions, experts of different popularity, and a selection bias that was trained by quantile balancing on one mix
// of the domains. A larger `gap` between the domains lets the load drift further when the mix changes.
class RoutingWorld {
 public:
  static constexpr int32_t kExperts = 896;
  static constexpr int32_t kTopK = 16;
  static constexpr int kDims = 24;
  static constexpr int kDomains = 4;
  using Mix = std::array<double, kDomains>;
  static constexpr Mix kTrainingMix = {0.4, 0.3, 0.2, 0.1};
  static constexpr Mix kShiftedMix = {0.04, 0.03, 0.03, 0.9};  // 90 % of the rarest

  RoutingWorld(float gap, uint32_t seed);

  // Router logits of `count` tokens of a mix, [count][kExperts].
  std::vector<float> Logits(int count, const Mix& mix);
  const std::vector<float>& bias() const { return bias_; }  // [kExperts]

 private:
  void Train();

  float gap_;
  std::mt19937 random_;
  std::vector<float> directions_;  // [kDims][kExperts]
  std::vector<float> popularity_;  // [kExperts]
  std::vector<float> centres_;     // [kDomains][kDims]
  std::vector<float> bias_;
};

}  // namespace k3::testing
