#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>

#include "server/http/http_message.h"

namespace k3 {

// Bytes of bodies that are being received, over all connections. Thread-safe.
class BodyBudget {
 public:
  explicit BodyBudget(uint64_t limit) : limit_(limit) {}
  bool Take(uint64_t bytes) {
    if (used_.fetch_add(bytes, std::memory_order_relaxed) + bytes <= limit_) return true;
    Return(bytes);
    return false;
  }
  void Return(uint64_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }

 private:
  const uint64_t limit_;
  std::atomic<uint64_t> used_{0};
};

// Reads one HTTP/1.x request from bytes in any pieces; Boost.Beast's parser behind a wall, since its headers are slow
// to compile. One object per request. Memory grows with the bytes received, never with a length that a client claims.
class HttpRequestParser {
 public:
  enum class State { kHead, kBody, kDone, kFailed };

  HttpRequestParser(uint32_t max_header_bytes, uint64_t max_body_bytes, BodyBudget& budget);
  ~HttpRequestParser();

  // Consumes a prefix of `bytes` and returns its length; stops after the head (state kBody, or kDone without a body),
  // after the body, and at errors. In state kHead all bytes not consumed must be passed again, with more behind.
  size_t Consume(std::string_view bytes);
  State state() const;
  // In kFailed: the status to answer with, and a sentence.
  int error_status() const;
  std::string_view error_message() const;

  // From kBody or kDone on.
  HttpRequest& request();
  bool keep_alive() const;
  bool http_1_0() const;
  bool expects_continue() const;
  // Throws the rest of the body away instead of keeping it.
  void DiscardBody();
  // The claimed length of the body; 0 without one, UINT64_MAX when chunked.
  uint64_t content_length() const;
  // Moves the request out; its body's bytes leave the budget when `lease` goes.
  HttpRequest TakeRequest(std::shared_ptr<void>* lease);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
