#include "server/http/http_message.h"

#include "absl/strings/match.h"

namespace k3 {
namespace {

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

std::string_view FindHeader(const HttpHeaders& headers, std::string_view name) {
  for (const auto& [key, value] : headers) {
    if (absl::EqualsIgnoreCase({key.data(), key.size()}, {name.data(), name.size()})) return value;
  }
  return {};
}

bool ParseTarget(std::string_view target, std::string* path, std::string* query) {
  if (!target.starts_with('/')) {
    const size_t scheme = target.find("://");
    if (scheme != std::string_view::npos) {
      const size_t slash = target.find('/', scheme + 3);
      target = slash == std::string_view::npos ? std::string_view("/") : target.substr(slash);
    }
  }
  target = target.substr(0, target.find('#'));
  const size_t mark = target.find('?');
  query->assign(mark == std::string_view::npos ? std::string_view() : target.substr(mark + 1));
  target = target.substr(0, mark);
  path->clear();
  for (size_t i = 0; i < target.size(); ++i) {
    if (target[i] != '%') {
      path->push_back(target[i]);
      continue;
    }
    const int high = i + 2 < target.size() ? HexDigit(target[i + 1]) : -1;
    const int low = i + 2 < target.size() ? HexDigit(target[i + 2]) : -1;
    if (high < 0 || low < 0) return false;
    path->push_back(static_cast<char>(high * 16 + low));
    i += 2;
  }
  return true;
}

std::string_view HttpReason(int status) {
  switch (status) {
    case 100:
      return "Continue";
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 409:
      return "Conflict";
    case 413:
      return "Payload Too Large";
    case 415:
      return "Unsupported Media Type";
    case 417:
      return "Expectation Failed";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 499:
      return "Client Closed Request";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return status < 400 ? "OK" : "Error";
  }
}

}  // namespace k3
