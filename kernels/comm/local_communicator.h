#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "kernels/comm/host_communicator.h"

namespace k3 {

class LocalGroup;

// Ranks as threads of one process over host memory: what the CPU backend serves with, and how everything above it is
// tested without devices. Every operation is a rendezvous of all ranks; who waits longer than `timeout` for a peer
// aborts the group and names the ranks that did not come. Calls that do not match are an error on all ranks.
class LocalCommunicator final : public HostCommunicator {
 public:
  // One communicator for each rank of a new group, to be used by a thread each.
  static std::vector<std::unique_ptr<Communicator>> MakeGroup(
      int size, std::chrono::milliseconds timeout = std::chrono::minutes(5));

  LocalCommunicator(std::shared_ptr<LocalGroup> group, int rank);

  std::unique_ptr<Communicator> Split(int color, int key) override;
  void Abort(const std::string& why) noexcept override;
  void Check() override;

 private:
  void DoAllReduce(float* data, int64_t count) override;
  void DoAllGather(const void* in, void* out, size_t bytes) override;
  void DoReduceScatter(const float* in, float* out, int64_t count) override;
  void DoAllToAll(const void* in, void* out, size_t bytes) override;
  void DoAllToAllRows(const void* in, void* out, int64_t rows, size_t row_bytes, const int32_t* sent,
                      int32_t* received) override;
  void DoBroadcast(void* data, size_t bytes, int root) override;

  // Rendezvous before the exchange: publishes `data` and compares the call with everybody else's.
  template <typename Last>
  void Enter(const char* op, const void* data, uint64_t size, const Last& last);
  void Enter(const char* op, const void* data, uint64_t size);
  // Rendezvous after it: nobody reads this rank's memory any more.
  void Leave();

  std::shared_ptr<LocalGroup> group_;
};

}  // namespace k3
