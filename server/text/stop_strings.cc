#include "server/text/stop_strings.h"

#include <algorithm>
#include <utility>

namespace k3 {

StopStrings::StopStrings(std::vector<std::string> stops) {
  for (std::string& stop : stops) {
    Pattern& pattern = patterns_.emplace_back();
    pattern.text = std::move(stop);
    const std::string& text = pattern.text;
    pattern.border.assign(text.size() + 1, 0);
    size_t length = 0;
    for (size_t n = 1; n < text.size(); ++n) {
      while (length > 0 && text[n] != text[length]) length = pattern.border[length];
      if (text[n] == text[length]) ++length;
      pattern.border[n + 1] = length;
    }
  }
}

int StopStrings::Append(std::string_view text, std::string* out) {
  if (matched_ != kNoMatch) return matched_;
  if (patterns_.empty()) {
    out->append(text);
    return kNoMatch;
  }
  size_t longest_prefix = 0;
  for (const char c : text) {
    held_.push_back(c);
    longest_prefix = 0;
    size_t longest_match = 0;
    for (size_t i = 0; i < patterns_.size(); ++i) {
      Pattern& pattern = patterns_[i];
      while (pattern.length > 0 && pattern.text[pattern.length] != c) pattern.length = pattern.border[pattern.length];
      if (pattern.text[pattern.length] == c) ++pattern.length;
      longest_prefix = std::max(longest_prefix, pattern.length);
      if (pattern.length == pattern.text.size() && pattern.length > longest_match) {
        longest_match = pattern.length;
        matched_ = static_cast<int>(i);
      }
    }
    if (matched_ != kNoMatch) {
      out->append(held_, 0, held_.size() - longest_match);
      held_.clear();
      return matched_;
    }
  }
  if (!text.empty()) {
    out->append(held_, 0, held_.size() - longest_prefix);
    held_.erase(0, held_.size() - longest_prefix);
  }
  return kNoMatch;
}

void StopStrings::Flush(std::string* out) {
  out->append(held_);
  held_.clear();
  // What comes later does not continue this text.
  for (Pattern& pattern : patterns_) pattern.length = 0;
}

}  // namespace k3
