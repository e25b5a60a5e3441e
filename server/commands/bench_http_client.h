#pragma once

#include <cstdint>
#include <memory>

#include "server/commands/bench_client.h"
#include "server/commands/bench_config.h"
#include "server/commands/http_url.h"

namespace k3 {

// The OpenAI streaming routes over HTTP/1.1, plain or TLS, on one event loop; connections that stay open are used
// again.
class BenchHttpClient : public BenchClient {
 public:
  BenchHttpClient(const BenchConfig& config, HttpUrl url);
  ~BenchHttpClient() override;

  absl::StatusOr<BenchServerInfo> Prepare() override;
  void Send(const BenchRequest& request, Done done) override;

 private:
  class Exchange;
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace k3
