#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace k3 {

// Notices when the last tokens are `count` copies of one period of at most `max_period` tokens. For every period it
// keeps how many tokens in a row equal the one a period earlier: O(max_period) per token, no search.
class RepetitionDetector {
 public:
  static constexpr int32_t kLongestPeriod = 1024;

  // Off unless max_period >= 1 and count >= 2. A period of which `count` copies exceed `most_tokens` cannot occur and
  // is not watched; nor is one over kLongestPeriod, which bounds the work per token.
  void Begin(int32_t max_period, int32_t count, int32_t most_tokens);
  // `generated`: all generated tokens so far, the newest last. Whether the loop is there now.
  bool Add(std::span<const int32_t> generated);

 private:
  int32_t count_ = 0;
  std::vector<int32_t> equal_;  // [period - 1]
};

}  // namespace k3
