#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "engine/request.h"

namespace k3 {

class TlsStore;

struct HttpServerOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 0;  // 0: any free one
  int io_threads = 2;
  int worker_threads = 2;
  int max_connections = 16384;
  const TlsStore* tls = nullptr;  // null: plain HTTP; must outlive the server

  uint64_t max_body_bytes = 64ull << 20;
  uint64_t max_buffered_bytes = 1ull << 30;  // bodies of all requests being read; beyond it 503
  uint32_t max_header_bytes = 64 << 10;
  size_t inline_body_bytes = 32 << 10;  // larger ones are handled on a worker
  size_t read_ahead_bytes = 64 << 10;   // pipelined requests kept while one is answered

  Clock::duration handshake_timeout = std::chrono::seconds(10);  // of TLS
  Clock::duration idle_timeout = std::chrono::seconds(120);      // between requests
  Clock::duration head_timeout = std::chrono::seconds(30);       // for all of a request's head
  Clock::duration body_timeout = std::chrono::seconds(30);       // for the next bytes of a body
  Clock::duration stall_limit = std::chrono::seconds(60);        // a reader that takes nothing so long is cut off
  Clock::duration linger_timeout = std::chrono::seconds(10);
  Clock::duration silence_interval = std::chrono::seconds(15);  // 0: HttpJob::OnSilence is not called
  Clock::duration sweep_interval = std::chrono::milliseconds(250);
};

}  // namespace k3
