#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace k3 {

// The keys that callers may show as "Authorization: Bearer KEY". Immutable, so thread-safe. Keys are never logged.
class ApiKeys {
 public:
  // No keys: everybody may call.
  ApiKeys() = default;
  // One key a line; blank lines and lines that begin with '#' do not count. INVALID_ARGUMENT when the file cannot be
  // read or holds no key.
  static absl::StatusOr<ApiKeys> Load(const std::string& path);

  bool required() const { return !keys_.empty(); }
  // `authorization` is the header's value, empty when absent. UNAUTHENTICATED unless it names one of the keys; takes
  // the same time for every wrong key of one length.
  absl::Status Check(std::string_view authorization) const;

 private:
  std::vector<std::string> keys_;
};

}  // namespace k3
