#include "server/commands/http_url.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace k3 {

absl::StatusOr<HttpUrl> ParseHttpUrl(const std::string& url, const std::string& flag) {
  const auto bad = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(flag, " ", why, ", not \"", url.substr(0, 200), "\""));
  };
  HttpUrl parsed;
  parsed.https = url.rfind("https://", 0) == 0;
  if (!parsed.https && url.rfind("http://", 0) != 0) return bad("must be http://HOST[:PORT] or https://");
  if (parsed.https) parsed.port = "443";
  const std::string rest = url.substr(url.find("//") + 2);
  const size_t slash = rest.find('/');
  const std::string host = rest.substr(0, slash);
  parsed.base = slash == std::string::npos ? "" : rest.substr(slash);
  while (!parsed.base.empty() && parsed.base.back() == '/') parsed.base.pop_back();
  size_t port_from = host.find(':');
  if (!host.empty() && host.front() == '[') {
    const size_t end = host.find(']');
    if (end == std::string::npos) return bad("has an address without its closing bracket");
    parsed.host = host.substr(1, end - 1);
    port_from = end + 1 < host.size() ? end + 1 : std::string::npos;
    if (port_from != std::string::npos && host[port_from] != ':') return bad("must be http://HOST[:PORT] or https://");
  } else {
    parsed.host = host.substr(0, port_from);
  }
  if (parsed.host.empty()) return bad("needs a host");
  if (port_from != std::string::npos) {
    int port = 0;
    if (!absl::SimpleAtoi(host.substr(port_from + 1), &port) || port < 1 || port > 65535) {
      return bad("needs a port from 1 to 65535");
    }
    parsed.port = absl::StrCat(port);
  }
  return parsed;
}

}  // namespace k3
