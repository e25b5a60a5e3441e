#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/process_link.h"
#include "kernels/comm/host_communicator.h"

namespace k3 {

// Ranks in several processes of one machine, over host memory and loopback connections: the CPU backend where a
// launcher starts a process a rank. Each operation goes through the group's first rank, which adds in the fixed tree.
// It is meant for trying a launch and for tests, not for speed.
class SocketCommunicator final : public HostCommunicator {
 public:
  // The first rank listens on `port` of this machine, the others connect. Throws DeviceError when they do not come.
  static std::unique_ptr<Communicator> Join(int rank, int size, int port);

  std::unique_ptr<Communicator> Split(int color, int key) override;
  void Abort(const std::string& why) noexcept override;
  void Check() override;

 private:
  enum class Op : uint32_t { kHello, kAllReduce, kAllGather, kReduceScatter, kAllToAll, kAllToAllRows, kBroadcast };

  void DoAllReduce(float* data, int64_t count) override;
  void DoAllGather(const void* in, void* out, size_t bytes) override;
  void DoReduceScatter(const float* in, float* out, int64_t count) override;
  void DoAllToAll(const void* in, void* out, size_t bytes) override;
  void DoAllToAllRows(const void* in, void* out, int64_t rows, size_t row_bytes, const int32_t* sent,
                      int32_t* received) override;
  void DoBroadcast(void* data, size_t bytes, int root) override;

  SocketCommunicator(int rank, int size) : HostCommunicator(rank, size) {}
  static std::unique_ptr<SocketCommunicator> Join(int rank, int size, int port,
                                                  std::unique_ptr<ProcessListener> listener);
  // Sends `in` to the first rank, which makes everybody's answer of all inputs.
  template <typename Answer>
  std::string Exchange(Op op, std::string_view in, const Answer& answer);
  [[noreturn]] void Fail(const absl::Status& status, int peer);

  std::vector<std::unique_ptr<ProcessLink>>
      links_;  // of the first rank: by rank, its own null; of others: to the first
  std::mutex mutex_;
  std::string aborted_;  // why, if so; guarded by mutex_
};

}  // namespace k3
