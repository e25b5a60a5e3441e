#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace k3 {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

// The value of the first field with this name (any case); empty when there is none.
std::string_view FindHeader(const HttpHeaders& headers, std::string_view name);

struct HttpRequest {
  std::string method;
  std::string path;   // percent-decoded, without the query
  std::string query;  // as sent, without '?'
  HttpHeaders headers;
  std::string body;
  std::string peer;  // address:port

  std::string_view Header(std::string_view name) const { return FindHeader(headers, name); }
};

// Content-Length, Connection, Date and Transfer-Encoding are the connection's business.
struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";  // empty: no body kind is named
  std::string body = {};
  HttpHeaders headers = {};
};

// Splits a request target (origin or absolute form) into path and query. False when an escape is malformed.
bool ParseTarget(std::string_view target, std::string* path, std::string* query);

std::string_view HttpReason(int status);

}  // namespace k3
