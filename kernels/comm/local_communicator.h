#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "kernels/comm/communicator.h"

namespace k3 {

class LocalGroup;

// Ranks as threads of one process over host memory: what the CPU backend serves with, and how everything above it is
// tested without devices. Every operation is a rendezvous of all ranks; who waits longer than `timeout` for a peer
// aborts the group and names the ranks that did not come. Calls that do not match are an error on all ranks.
class LocalCommunicator final : public Communicator {
 public:
  // One communicator for each rank of a new group, to be used by a thread each.
  static std::vector<std::unique_ptr<Communicator>> MakeGroup(
      int size, std::chrono::milliseconds timeout = std::chrono::minutes(5));

  LocalCommunicator(std::shared_ptr<LocalGroup> group, int rank);

  void AllReduce(void* data, int64_t count, DType dtype, void* stream) override;
  void AllGather(const void* in, void* out, size_t bytes, void* stream) override;
  void ReduceScatter(const void* in, void* out, int64_t count, DType dtype, void* stream) override;
  void AllToAll(const void* in, void* out, size_t bytes, void* stream) override;
  void Broadcast(void* data, size_t bytes, int root, void* stream) override;
  std::unique_ptr<Communicator> Split(int color, int key) override;
  void Abort(const std::string& why) noexcept override;
  void Check() override;

 private:
  // Rendezvous before the exchange: publishes `data` and compares the call with everybody else's.
  template <typename Last>
  void Enter(const char* op, const void* data, uint64_t size, const Last& last);
  void Enter(const char* op, const void* data, uint64_t size);
  // Rendezvous after it: nobody reads this rank's memory any more.
  void Leave();

  std::shared_ptr<LocalGroup> group_;
};

}  // namespace k3
