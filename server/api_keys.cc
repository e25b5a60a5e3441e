#include "server/api_keys.h"

#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/error_details.h"

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

}  // namespace

absl::StatusOr<ApiKeys> ApiKeys::Load(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::InvalidArgumentError(absl::StrCat("--api-key-file: cannot read ", path));
  ApiKeys keys;
  std::string line;
  while (std::getline(file, line)) {
    const std::string key(absl::StripAsciiWhitespace(line));
    if (!key.empty() && key[0] != '#') keys.keys_.push_back(key);
  }
  if (keys.keys_.empty()) return absl::InvalidArgumentError(absl::StrCat("--api-key-file: ", path, " holds no key"));
  return keys;
}

absl::Status ApiKeys::Check(std::string_view authorization) const {
  if (keys_.empty()) return absl::OkStatus();
  if (authorization.empty())
    return Unauthenticated("missing_api_key", "an API key is needed: Authorization: Bearer KEY");
  constexpr std::string_view kScheme = "bearer ";
  if (authorization.size() <= kScheme.size() ||
      absl::AsciiStrToLower(absl::string_view(authorization.data(), kScheme.size())) != kScheme) {
    return Unauthenticated("invalid_api_key", "the Authorization header must be: Bearer KEY");
  }
  const std::string_view key = authorization.substr(kScheme.size());
  bool known = false;
  for (const std::string& candidate : keys_) known |= EqualInConstantTime(candidate, key);
  return known ? absl::OkStatus() : Unauthenticated("invalid_api_key", "the API key is not known");
}

}  // namespace k3
