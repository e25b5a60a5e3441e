#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace k3 {

// Whether a key is something that a header can carry and every client can send: printable ASCII without spaces.
inline bool CanBeKey(std::string_view key) {
  return !key.empty() && std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c < 0x7f; });
}

// The keys that callers may show as "Authorization: Bearer KEY". Thread-safe; copies are the same set, also after a
// Reload. Keys are never logged.
class ApiKeys {
 public:
  // No keys: everybody may call.
  ApiKeys() = default;
  // One key a line; blank lines and lines that begin with '#' do not count. INVALID_ARGUMENT when the file cannot be
  // read or holds no key.
  static absl::StatusOr<ApiKeys> Load(const std::string& path);

  // Reads the file again. On an error the keys stay as they were.
  absl::Status Reload();

  bool required() const { return shared_ != nullptr; }
  // `authorization` is the header's value, empty when absent. UNAUTHENTICATED unless it names one of the keys; takes
  // the same time for every wrong key of one length. `caller`, where wanted, gets a number that stands for the key,
  // also over a Reload; 0 when no keys are required.
  absl::Status Check(std::string_view authorization, uint64_t* caller = nullptr) const;

 private:
  struct Shared {
    std::string path;
    std::mutex mutex;
    std::vector<std::string> keys;  // guarded by mutex
  };
  std::shared_ptr<Shared> shared_;
};

}  // namespace k3
