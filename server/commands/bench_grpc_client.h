#pragma once

#include <grpcpp/channel.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "k3serve/inference/v1/generation_service.grpc.pb.h"
#include "server/commands/bench_client.h"
#include "server/commands/bench_config.h"

namespace k3 {

// StreamGenerate over a few HTTP/2 connections, with the callback API: no thread per request. Tokens are counted by the
// ids that each message carries.
class BenchGrpcClient : public BenchClient {
 public:
  explicit BenchGrpcClient(const BenchConfig& config);
  ~BenchGrpcClient() override;

  absl::StatusOr<BenchServerInfo> Prepare() override;
  void Send(const BenchRequest& request, Done done) override;

 private:
  class Exchange;

  const BenchConfig& config_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  std::vector<std::unique_ptr<::k3serve::inference::v1::GenerationService::Stub>> stubs_;  // one per channel
  std::string model_;
  std::atomic<uint64_t> next_stub_{0};

  std::mutex mutex_;
  std::condition_variable idle_;
  int64_t in_flight_ = 0;  // guarded by mutex_
};

}  // namespace k3
