#pragma once

#include <functional>

#include "kernels/comm/communicator.h"

namespace k3 {

// What ranks over host memory have in common: sums of F32 only, no stream, operations that block, so that their time is
// the host's. The Do methods are the operations themselves.
class HostCommunicator : public Communicator {
 public:
  void AllReduce(void* data, int64_t count, DType dtype, void* stream) final;
  void AllGather(const void* in, void* out, size_t bytes, void* stream) final;
  void ReduceScatter(const void* in, void* out, int64_t count, DType dtype, void* stream) final;
  void AllToAll(const void* in, void* out, size_t bytes, void* stream) final;
  void AllToAllRows(const void* in, void* out, int64_t rows, size_t row_bytes, const int32_t* sent, int32_t* received,
                    void* stream) final;
  void Broadcast(void* data, size_t bytes, int root, void* stream) final;

 protected:
  using Communicator::Communicator;

  virtual void DoAllReduce(float* data, int64_t count) = 0;
  virtual void DoAllGather(const void* in, void* out, size_t bytes) = 0;
  virtual void DoReduceScatter(const float* in, float* out, int64_t count) = 0;
  virtual void DoAllToAll(const void* in, void* out, size_t bytes) = 0;
  virtual void DoAllToAllRows(const void* in, void* out, int64_t rows, size_t row_bytes, const int32_t* sent,
                              int32_t* received) = 0;
  virtual void DoBroadcast(void* data, size_t bytes, int root) = 0;

 private:
  // Runs `operation`, which sends `bytes` to others.
  void Run(Collective kind, uint64_t bytes, const std::function<void()>& operation);
  uint64_t others() const { return static_cast<uint64_t>(size() - 1); }
};

}  // namespace k3
