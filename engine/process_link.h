#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace k3 {

// One TCP connection between two processes of a server, with framed messages. A peer that ends, or whose machine is
// lost, shows as UNAVAILABLE: at once where its kernel says so, else by keep-alive within ten seconds.
class ProcessLink {
 public:
  explicit ProcessLink(int socket);
  ~ProcessLink();
  ProcessLink(const ProcessLink&) = delete;
  ProcessLink& operator=(const ProcessLink&) = delete;

  // Tries until the peer listens or `patience` is over.
  static absl::StatusOr<std::unique_ptr<ProcessLink>> Connect(const std::string& host, int port,
                                                              std::chrono::milliseconds patience);

  struct Message {
    uint32_t kind = 0;
    std::string bytes;
  };
  // One thread sends and one receives at a time.
  absl::Status Send(uint32_t kind, std::string_view bytes);
  absl::StatusOr<Message> Receive();
  // Like Receive, which then fails with DEADLINE_EXCEEDED after `patience`.
  absl::StatusOr<Message> Receive(std::chrono::milliseconds patience);
  // Ends both directions; a thread in Receive returns. From any thread.
  void Close();

 private:
  absl::Status ReadAll(void* data, size_t size);
  int socket_;
};

// Where the others connect.
class ProcessListener {
 public:
  // Port 0: any free one.
  static absl::StatusOr<std::unique_ptr<ProcessListener>> Listen(int port);
  ~ProcessListener();
  int port() const { return port_; }
  absl::StatusOr<std::unique_ptr<ProcessLink>> Accept(std::chrono::milliseconds patience);

 private:
  ProcessListener(int socket, int port) : socket_(socket), port_(port) {}
  int socket_;
  int port_;
};

}  // namespace k3
