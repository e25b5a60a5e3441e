#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/http/http_handler.h"
#include "server/http/http_options.h"

namespace k3 {

// HTTP/1.1 on a few event loops: keep-alive, pipelined requests answered in order, chunked streams with back-pressure,
// limits and time-outs. A client that closes its connection, or only its sending side, ends its request: that is seen
// within one pass of the event loop, whether or not anything is being written. Knows nothing of routes or JSON.
class HttpServer {
 public:
  // Runs a task on another thread; used for requests with large bodies. Empty: everything runs on the event loops.
  using Offload = std::function<void(std::function<void()>)>;

  // Listens and serves. `handler`, and what `offload` needs, must outlive the server. UNAVAILABLE when the address
  // cannot be had; the message names it.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(HttpServerOptions options, HttpHandler& handler,
                                                           Offload offload);
  // Stop(0).
  ~HttpServer();

  // The port that it listens on.
  uint16_t port() const;
  // From now on every connection is closed after its current answer. New ones are still taken, so that probes and late
  // clients get an honest answer; what to refuse is the handler's business.
  void StartDrain();
  // Takes no more connections, waits up to `grace` for answers being made, closes everything. The second call does
  // nothing.
  void Stop(Clock::duration grace);

  int connections() const;
  // Requests that are being answered.
  int exchanges() const;

 private:
  class Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
