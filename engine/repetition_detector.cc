#include "engine/repetition_detector.h"

#include <algorithm>

namespace k3 {

void RepetitionDetector::Begin(int32_t max_period, int32_t count, int32_t most_tokens) {
  count_ = count;
  const int32_t longest = count >= 2 ? std::min({max_period, most_tokens / count, kLongestPeriod}) : 0;
  equal_.assign(static_cast<size_t>(std::max(longest, 0)), 0);
}

bool RepetitionDetector::Add(std::span<const int32_t> generated) {
  bool found = false;
  const size_t last = generated.size() - 1;
  for (size_t period = 1; period <= equal_.size() && period <= last; ++period) {
    int32_t& equal = equal_[period - 1];
    equal = generated[last] == generated[last - period] ? equal + 1 : 0;
    found |= equal >= static_cast<int64_t>(period) * (count_ - 1);
  }
  return found;
}

}  // namespace k3
