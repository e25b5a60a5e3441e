#pragma once

#include <grpcpp/server_builder.h>
#include <sys/types.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"

namespace k3 {

// The listening sockets of a gRPC server. They are not left to gRPC, which takes any number of connections and, in this
// version, listens no more after the first accept that fails for want of a descriptor. Connections beyond the limit are
// closed at once, which a client sees as UNAVAILABLE; without descriptors they wait in the backlog.
//
// An accepted connection belongs to gRPC. Which of them are still open is read off their descriptors.
class GrpcAcceptor {
 public:
  // Binds `port` (0: a free one) on every address of `host`, brackets around an IPv6 address allowed. UNAVAILABLE names
  // address and reason.
  static absl::StatusOr<std::unique_ptr<GrpcAcceptor>> Listen(const std::string& host, int port, int max_connections);
  ~GrpcAcceptor();

  int port() const { return port_; }

  // Takes connections from now on. The server behind `target` must have been started.
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> target);

  // New connections are refused from now on, those that wait to be accepted are reset. Returns when no more goes to
  // gRPC.
  void Stop();

  // Open connections read an end of stream after what has already arrived, as if the peers had left. Returns how many
  // were still open. Call after Stop.
  int EndConnections();

  int connections() const;

 private:
  struct Accepted {
    int fd;
    ino_t inode;  // of the socket: the number of a closed descriptor may be used again
  };

  explicit GrpcAcceptor(int max_connections) : max_connections_(max_connections) {}
  absl::Status Bind(const std::string& host, int port);
  void Run();
  // Accepts what waits on one socket. False when it has to pause: no descriptor is free.
  bool AcceptFrom(int listening);
  bool IsFull();
  // Waits for connections, or for `limit` of a pause; false when Stop was called.
  bool Wait(std::chrono::milliseconds limit, bool paused);
  void Warn(const std::string& what);
  static bool IsOpen(const Accepted& accepted);

  const int max_connections_;
  int port_ = 0;
  std::vector<int> listening_;
  int stop_ = -1;  // an eventfd that ends the thread
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> target_;
  std::thread thread_;
  std::chrono::steady_clock::time_point next_warning_;
  std::chrono::steady_clock::time_point next_count_;  // of the open ones, while full

  mutable std::mutex mutex_;
  std::vector<Accepted> accepted_;  // guarded by mutex_; some may be closed by now
};

}  // namespace k3
