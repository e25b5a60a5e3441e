#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "server/commands/bench_client.h"
#include "server/commands/bench_config.h"

namespace k3 {

struct HttpUrl {
  std::string host;
  std::string port = "80";
  std::string base;  // path before /v1, without a slash at its end
  std::string authority() const { return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + port; }
};

// http://HOST[:PORT][/BASE], IPv6 hosts in brackets. INVALID_ARGUMENT for anything else, https included.
absl::StatusOr<HttpUrl> ParseHttpUrl(const std::string& url);

// The OpenAI streaming routes over HTTP/1.1 on one event loop; connections that stay open are used again.
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
