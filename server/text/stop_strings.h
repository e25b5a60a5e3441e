#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

// Watches text for stop strings. Text that could still turn out to begin one is held back; the rest passes through. The
// result does not depend on how the text was cut: the stop string that is complete first wins, of several that end at
// one place the longest. One per choice of a request.
class StopStrings {
 public:
  static constexpr int kNoMatch = -1;

  // Stop strings are non-empty; without any, all text passes.
  explicit StopStrings(std::vector<std::string> stops);

  // Appends to `out` the text that is safe to show. Returns the index of the stop string that ended the text (it is not
  // shown, nor is anything after it), or kNoMatch. After a match nothing passes any more.
  int Append(std::string_view text, std::string* out);

  // At the end of the text: what was held back is shown.
  void Flush(std::string* out);

  int matched() const { return matched_; }

 private:
  struct Pattern {
    std::string text;
    std::vector<size_t>
        border;         // border[n]: longest proper prefix of text that ends its first n bytes (Knuth-Morris-Pratt)
    size_t length = 0;  // of the prefix that the text seen so far ends with
  };

  std::vector<Pattern> patterns_;
  std::string held_;
  int matched_ = kNoMatch;
};

}  // namespace k3
