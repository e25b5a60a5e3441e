#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/escaping.h"

namespace k3 {

// A name from a file as it may be shown in a message: control characters and bytes outside ASCII escaped.
inline std::string EscapeName(std::string_view name) {
  return absl::CHexEscape(absl::string_view(name.data(), name.size()));
}

// Collects names for a message: the first ten and how many there were.
class NameList {
 public:
  void Add(std::string_view name) {
    if (++count_ <= kShown) names_.emplace_back(name);
  }
  size_t count() const { return count_; }
  bool empty() const { return count_ == 0; }
  std::string ToString() const {
    std::string text;
    for (const std::string& name : names_) {
      if (!text.empty()) text += ", ";
      text += name;
    }
    if (count_ > kShown) text += " and " + std::to_string(count_ - kShown) + " more";
    return text;
  }

 private:
  static constexpr size_t kShown = 10;
  size_t count_ = 0;
  std::vector<std::string> names_;
};

}  // namespace k3
