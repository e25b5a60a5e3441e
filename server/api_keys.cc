#include "server/api_keys.h"

#include <algorithm>
#include <functional>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/text_file.h"

namespace k3 {
namespace {

bool EqualInConstantTime(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

absl::Status Unauthenticated(const std::string& reason, const std::string& message) {
  ErrorDetails details;
  details.reason = reason;
  return WithDetails(absl::UnauthenticatedError(message), details);
}

absl::StatusOr<std::vector<std::string>> ReadKeys(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadTextFile(path);
  if (!text.ok()) return absl::InvalidArgumentError(absl::StrCat("--api-key-file: ", text.status().message()));
  std::istringstream file(*text);
  std::vector<std::string> keys;
  std::string line;
  int number = 0;
  while (std::getline(file, line)) {
    const std::string key(absl::StripAsciiWhitespace(line));
    ++number;
    if (key.empty() || key[0] == '#') continue;
    if (!CanBeKey(key)) {
      return absl::InvalidArgumentError(absl::StrCat("--api-key-file: ", path, " line ", number,
                                                     " is no key: expected printable ASCII without spaces"));
    }
    keys.push_back(key);
  }
  if (keys.empty()) return absl::InvalidArgumentError(absl::StrCat("--api-key-file: ", path, " holds no key"));
  return keys;
}

}  // namespace

absl::StatusOr<ApiKeys> ApiKeys::Load(const std::string& path) {
  ApiKeys keys;
  keys.shared_ = std::make_shared<Shared>();
  keys.shared_->path = path;
  const absl::Status status = keys.Reload();
  if (!status.ok()) return status;
  return keys;
}

absl::Status ApiKeys::Reload() {
  if (shared_ == nullptr) return absl::OkStatus();
  absl::StatusOr<std::vector<std::string>> keys = ReadKeys(shared_->path);
  if (!keys.ok()) return keys.status();
  std::lock_guard lock(shared_->mutex);
  shared_->keys = *std::move(keys);
  return absl::OkStatus();
}

absl::Status ApiKeys::Check(std::string_view authorization, uint64_t* caller) const {
  if (caller != nullptr) *caller = 0;
  if (shared_ == nullptr) return absl::OkStatus();
  if (authorization.empty())
    return Unauthenticated("missing_api_key", "an API key is needed: Authorization: Bearer KEY");
  constexpr std::string_view kScheme = "bearer ";
  if (authorization.size() <= kScheme.size() ||
      absl::AsciiStrToLower(absl::string_view(authorization.data(), kScheme.size())) != kScheme) {
    return Unauthenticated("invalid_api_key", "the Authorization header must be: Bearer KEY");
  }
  const std::string_view key = authorization.substr(kScheme.size());
  bool known = false;
  {
    std::lock_guard lock(shared_->mutex);
    for (const std::string& candidate : shared_->keys) known |= EqualInConstantTime(candidate, key);
  }
  if (!known) return Unauthenticated("invalid_api_key", "the API key is not known");
  if (caller != nullptr) *caller = std::hash<std::string_view>()(key) | 1;
  return absl::OkStatus();
}

}  // namespace k3
