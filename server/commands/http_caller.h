#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/commands/client_access.h"
#include "server/commands/http_url.h"

namespace k3 {

struct HttpAnswer {
  int status = 0;
  std::vector<std::pair<std::string, std::string>> headers;  // names in lower case
  std::string body;
  std::string_view Header(std::string_view name) const;
};

// HTTP/1.1 calls, plain or TLS by the URL's scheme, one after the other, each on a connection of its own. Blocking; a
// call that takes longer than the time-out fails. `access` gives the certificates and must outlive this.
class HttpCaller {
 public:
  using Headers = std::vector<std::pair<std::string, std::string>>;

  HttpCaller(HttpUrl url, const ClientAccess& access, Headers headers, std::chrono::seconds timeout)
      : url_(std::move(url)), access_(access), headers_(std::move(headers)), timeout_(timeout) {}

  // UNAVAILABLE when there is no whole answer.
  absl::StatusOr<HttpAnswer> Call(const std::string& method, const std::string& path, const std::string& body = "",
                                  const Headers& headers = {}) const;
  // Sends a request, reads until `bytes` of the answer are there and leaves.
  absl::Status CallAndLeave(const std::string& method, const std::string& path, const std::string& body,
                            size_t bytes) const;

 private:
  const HttpUrl url_;
  const ClientAccess& access_;
  const Headers headers_;
  const std::chrono::seconds timeout_;
};

}  // namespace k3
