#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace k3 {

struct HttpUrl {
  bool https = false;
  std::string host;
  std::string port = "80";
  std::string base;  // path before /v1, without a slash at its end
  std::string authority() const { return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + port; }
};

// http://HOST[:PORT][/BASE] or https://, IPv6 hosts in brackets. INVALID_ARGUMENT for anything else, beginning with the
// flag's name.
absl::StatusOr<HttpUrl> ParseHttpUrl(const std::string& url, const std::string& flag = "--url");

}  // namespace k3
