#include "tests/testing/http_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

namespace k3::testing {

std::string HttpReplyText::Header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key.size() == name.size() && strncasecmp(key.data(), name.data(), name.size()) == 0) return value;
  }
  return "";
}

HttpClient::HttpClient(uint16_t port, int receive_buffer) {
  fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (receive_buffer > 0) setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) Close();
}

HttpClient::~HttpClient() { Close(); }

bool HttpClient::Send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n <= 0) return false;
    bytes.remove_prefix(n);
  }
  return true;
}

void HttpClient::HalfClose() { shutdown(fd_, SHUT_WR); }

void HttpClient::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void HttpClient::Reset() {
  const linger option{1, 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &option, sizeof(option));
  Close();
}

bool HttpClient::Fill() {
  pollfd poll_fd{fd_, POLLIN, 0};
  if (poll(&poll_fd, 1, static_cast<int>(timeout_.count())) <= 0) return false;
  char bytes[65536];
  const ssize_t n = recv(fd_, bytes, sizeof(bytes), 0);
  if (n <= 0) return false;
  buffer_.append(bytes, n);
  return true;
}

bool HttpClient::Line(std::string* line) {
  for (;;) {
    const size_t end = buffer_.find("\r\n");
    if (end != std::string::npos) {
      *line = buffer_.substr(0, end);
      buffer_.erase(0, end + 2);
      return true;
    }
    if (!Fill()) return false;
  }
}

std::optional<HttpReplyText> HttpClient::ReadHead() {
  HttpReplyText reply;
  std::string line;
  if (!Line(&line) || line.size() < 12 || line.substr(0, 7) != "HTTP/1.") return std::nullopt;
  reply.status = std::atoi(line.c_str() + 9);
  for (;;) {
    if (!Line(&line)) return std::nullopt;
    if (line.empty()) break;
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) return std::nullopt;
    reply.headers.emplace_back(line.substr(0, colon), line.substr(colon + 2));
  }
  ended_ = false;
  return reply;
}

std::optional<HttpReplyText> HttpClient::ReadReply(bool head_only) {
  std::optional<HttpReplyText> reply = ReadHead();
  while (reply && reply->status == 100) reply = ReadHead();
  if (!reply || head_only || reply->status == 204) return reply;
  std::optional<std::string> body = ReadBody(*reply);
  if (!body) return std::nullopt;
  reply->body = *std::move(body);
  return reply;
}

std::optional<std::string> HttpClient::ReadBody(const HttpReplyText& head) {
  if (head.Header("Transfer-Encoding") == "chunked") {
    while (ReadChunk()) {
    }
    if (!ended_) return std::nullopt;
    return std::exchange(events_, "");
  }
  const std::string length = head.Header("Content-Length");
  if (length.empty()) {
    while (Fill()) {
    }
    return std::exchange(buffer_, "");
  }
  const size_t size = std::strtoull(length.c_str(), nullptr, 10);
  while (buffer_.size() < size) {
    if (!Fill()) return std::nullopt;
  }
  std::string body = buffer_.substr(0, size);
  buffer_.erase(0, size);
  return body;
}

bool HttpClient::ReadChunk() {
  std::string line;
  if (ended_ || !Line(&line)) return false;
  const size_t size = std::strtoull(line.c_str(), nullptr, 16);
  while (buffer_.size() < size + 2) {
    if (!Fill()) return false;
  }
  if (buffer_.compare(size, 2, "\r\n") != 0) return false;
  events_.append(buffer_, 0, size);
  buffer_.erase(0, size + 2);
  if (size == 0) ended_ = true;
  return size > 0;
}

std::optional<std::string> HttpClient::ReadEvent() {
  for (;;) {
    const size_t end = events_.find("\n\n");
    if (end != std::string::npos) {
      std::string event = events_.substr(0, end);
      events_.erase(0, end + 2);
      if (event.rfind("data: ", 0) == 0) event.erase(0, 6);
      return event;
    }
    if (!events_.empty()) event_was_split_ = true;
    if (!ReadChunk()) return std::nullopt;
  }
}

bool HttpClient::WaitForClose() {
  while (Fill()) buffer_.clear();
  // Fill fails for a time-out too: only a readable socket without bytes is closed.
  pollfd poll_fd{fd_, POLLIN, 0};
  return poll(&poll_fd, 1, 0) > 0;
}

bool HttpClient::SendRequest(std::string_view method, std::string_view target, std::string_view body,
                             std::string_view extra_headers) {
  std::string text;
  text.append(method).append(" ").append(target).append(" HTTP/1.1\r\nHost: localhost\r\n").append(extra_headers);
  if (!body.empty() || method == "POST") {
    text.append("Content-Type: application/json\r\nContent-Length: ")
        .append(std::to_string(body.size()))
        .append("\r\n");
  }
  text.append("\r\n").append(body);
  return Send(text);
}

std::optional<HttpReplyText> HttpClient::Call(std::string_view method, std::string_view target, std::string_view body,
                                              std::string_view extra_headers) {
  SendRequest(method, target, body, extra_headers);
  return ReadReply(method == "HEAD");
}

}  // namespace k3::testing
