#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/flags.h"
#include "server/grpc_info.h"

namespace k3 {

class ApiKeys;
class GenerationService;
class ServerHealth;
class TlsStore;

struct GrpcServerOptions {
  std::string host = "127.0.0.1";
  Port port = 50051;
  Port admin_port;
  int64_t max_message_mib = 64;
  int max_connections = 16384;            // of the public listener
  int64_t max_concurrent_streams = 4096;  // per connection; at or above queue + running
  const TlsStore* tls = nullptr;          // null: plain; must outlive the server
  std::chrono::milliseconds write_stall_limit{60000};
  int pump_threads = 1;
  std::string default_effort;
};

// The gRPC front end: the public listener with generation, tokenizer, model, health and reflection services, and the
// admin listener, where there is one. Serves from Start on, also while the model loads.
class GrpcServer {
 public:
  // UNAVAILABLE naming the address when it cannot be bound. The pointers must outlive the server.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const GrpcServerOptions& options,
                                                           GenerationService* generation, ServerHealth* health,
                                                           const ApiKeys* keys, AdminActions actions);
  ~GrpcServer();

  // The bound ports; 0 where there is no listener.
  int port() const;
  int admin_port() const;

  // Generation calls that gRPC is not yet done with: their status may still be on its way.
  int calls() const;

  // Takes no new connection, lets generation calls end within `grace`, then ends the connections: whatever still runs
  // or is just arriving becomes UNAVAILABLE at its client. Returns when all calls have ended here too.
  void Shutdown(std::chrono::milliseconds grace);

 private:
  struct Impl;
  explicit GrpcServer(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
