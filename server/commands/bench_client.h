#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "server/commands/bench_request.h"

namespace k3 {

struct BenchServerInfo {
  std::string server;      // for the report
  std::string model;       // the name that requests carry
  int32_t vocab_size = 0;  // 0: the server does not tell
};

// Sends requests and times their replies. Thread-safe. The destructor waits for what is under way.
class BenchClient {
 public:
  using Done = std::function<void(RequestRecord)>;

  virtual ~BenchClient() = default;
  // Connects and asks what is served. Before the first Send.
  virtual absl::StatusOr<BenchServerInfo> Prepare() = 0;
  // Returns at once. `done` is called exactly once, from a thread of the client, with everything but the record's
  // `scheduled` filled in.
  virtual void Send(const BenchRequest& request, Done done) = 0;
};

}  // namespace k3
