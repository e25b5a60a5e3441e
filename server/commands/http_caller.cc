#include "server/commands/http_caller.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <memory>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/tcp_connect.h"

namespace k3 {
namespace {

absl::Status SocketError(const std::string& what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::generic_category().message(errno)));
}

// A failed certificate check, an alert of the server, else what the socket says.
absl::Status TlsError(const std::string& what) {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return reason == nullptr ? SocketError(what) : absl::UnavailableError(absl::StrCat(what, ": ", reason));
}

class Connection {
 public:
  ~Connection() {
    if (fd_ >= 0) close(fd_);
  }

  // TLS unless `context` is null.
  absl::Status Open(const HttpUrl& url, SSL_CTX* context, std::chrono::seconds timeout) {
    const absl::StatusOr<int> fd = ConnectTcp(url.host, url.port, timeout);
    if (!fd.ok()) {
      return absl::UnavailableError(absl::StrCat("connect to ", url.authority(), ": ", fd.status().message()));
    }
    fd_ = *fd;
    if (context == nullptr) return absl::OkStatus();
    ssl_.reset(SSL_new(context));
    SSL_set_fd(ssl_.get(), fd_);
    SSL_set1_host(ssl_.get(), url.host.c_str());  // a name or an address
    in6_addr address;
    const bool is_address =
        inet_pton(AF_INET, url.host.c_str(), &address) == 1 || inet_pton(AF_INET6, url.host.c_str(), &address) == 1;
    if (!is_address) SSL_set_tlsext_host_name(ssl_.get(), url.host.c_str());
    if (SSL_connect(ssl_.get()) != 1) return TlsError("TLS with " + url.authority());
    return absl::OkStatus();
  }

  absl::Status Send(std::string_view text) {
    while (!text.empty()) {
      ssize_t n = 0;
      if (ssl_ != nullptr) {
        n = SSL_write(ssl_.get(), text.data(), static_cast<int>(std::min<size_t>(text.size(), INT_MAX)));
        if (n <= 0) return TlsError("send");
      } else {
        n = send(fd_, text.data(), text.size(), MSG_NOSIGNAL);
        if (n <= 0) return SocketError("send");
      }
      text.remove_prefix(static_cast<size_t>(n));
    }
    return absl::OkStatus();
  }

  // Appends what comes next; false at the end.
  absl::StatusOr<bool> Receive(std::string* text) {
    char buffer[16384];
    ssize_t n = 0;
    if (ssl_ != nullptr) {
      n = SSL_read(ssl_.get(), buffer, sizeof(buffer));
      if (n <= 0 && SSL_get_error(ssl_.get(), static_cast<int>(n)) != SSL_ERROR_ZERO_RETURN) return TlsError("receive");
      n = std::max<ssize_t>(n, 0);
    } else {
      n = recv(fd_, buffer, sizeof(buffer), 0);
      if (n < 0) return SocketError("receive");
    }
    text->append(buffer, static_cast<size_t>(n));
    return n > 0;
  }

 private:
  int fd_ = -1;
  std::unique_ptr<SSL, decltype(&SSL_free)> ssl_{nullptr, &SSL_free};
};

std::string RequestText(const HttpUrl& url, const std::string& method, const std::string& path, const std::string& body,
                        std::initializer_list<const HttpCaller::Headers*> headers) {
  std::string text = absl::StrCat(method, " ", url.base, path, " HTTP/1.1\r\nHost: ", url.authority(),
                                  "\r\nUser-Agent: k3serve-verify\r\nConnection: close\r\n");
  for (const HttpCaller::Headers* list : headers) {
    for (const auto& [name, value] : *list) absl::StrAppend(&text, name, ": ", value, "\r\n");
  }
  if (!body.empty()) {
    absl::StrAppend(&text, "Content-Type: application/json\r\nContent-Length: ", body.size(), "\r\n");
  }
  return absl::StrCat(text, "\r\n", body);
}

absl::StatusOr<std::string> Unchunk(std::string_view text) {
  std::string body;
  while (true) {
    const size_t line = text.find("\r\n");
    uint64_t size = 0;
    if (line == std::string_view::npos || !absl::SimpleHexAtoi(absl::string_view(text.data(), line), &size)) {
      return absl::UnavailableError("the answer's chunks are cut off");
    }
    text.remove_prefix(line + 2);
    if (size == 0) return body;
    if (text.size() < size + 2) return absl::UnavailableError("the answer's last chunk is cut off");
    body.append(text.substr(0, size));
    text.remove_prefix(size + 2);
  }
}

absl::StatusOr<HttpAnswer> ParseAnswer(const std::string& text) {
  const size_t end = text.find("\r\n\r\n");
  HttpAnswer answer;
  if (end == std::string::npos || text.rfind("HTTP/1.1 ", 0) != 0 ||
      !absl::SimpleAtoi(text.substr(9, 3), &answer.status)) {
    return absl::UnavailableError("no HTTP/1.1 answer");
  }
  for (size_t at = text.find("\r\n") + 2; at < end;) {
    const size_t line_end = text.find("\r\n", at);
    const size_t colon = text.find(':', at);
    if (colon < line_end) {
      answer.headers.emplace_back(
          absl::AsciiStrToLower(text.substr(at, colon - at)),
          std::string(absl::StripAsciiWhitespace(text.substr(colon + 1, line_end - colon - 1))));
    }
    at = line_end + 2;
  }
  answer.body = text.substr(end + 4);
  if (answer.Header("transfer-encoding") == "chunked") {
    absl::StatusOr<std::string> body = Unchunk(answer.body);
    if (!body.ok()) return body.status();
    answer.body = *std::move(body);
  }
  uint64_t length = 0;
  if (absl::SimpleAtoi(std::string(answer.Header("content-length")), &length) && length != answer.body.size()) {
    return absl::UnavailableError(absl::StrCat("the answer has ", answer.body.size(), " bytes, not ", length));
  }
  return answer;
}

}  // namespace

std::string_view HttpAnswer::Header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return value;
  }
  return {};
}

absl::StatusOr<HttpAnswer> HttpCaller::Call(const std::string& method, const std::string& path, const std::string& body,
                                            const Headers& headers) const {
  Connection connection;
  absl::Status status = connection.Open(url_, url_.https ? access_.context() : nullptr, timeout_);
  if (status.ok()) status = connection.Send(RequestText(url_, method, path, body, {&headers_, &headers}));
  if (!status.ok()) return status;
  std::string text;
  while (true) {
    const absl::StatusOr<bool> more = connection.Receive(&text);
    if (!more.ok()) return more.status();
    if (!*more) return ParseAnswer(text);
  }
}

absl::Status HttpCaller::CallAndLeave(const std::string& method, const std::string& path, const std::string& body,
                                      size_t bytes) const {
  Connection connection;
  absl::Status status = connection.Open(url_, url_.https ? access_.context() : nullptr, timeout_);
  if (status.ok()) status = connection.Send(RequestText(url_, method, path, body, {&headers_}));
  if (!status.ok()) return status;
  std::string text;
  while (text.size() < bytes) {
    const absl::StatusOr<bool> more = connection.Receive(&text);
    if (!more.ok()) return more.status();
    if (!*more) return absl::UnavailableError("the answer ended early");
  }
  return absl::OkStatus();
}

}  // namespace k3
