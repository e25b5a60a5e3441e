#include "kernels/comm/host_communicator.h"

#include <chrono>
#include <string>

#include "kernels/core/error.h"

namespace k3 {
namespace {

void RequireF32(const char* op, DType dtype) {
  if (dtype != DType::kF32) throw DeviceError(std::string(op) + ": the CPU sums F32, not " + Name(dtype));
}

}  // namespace

void HostCommunicator::Run(Collective kind, uint64_t bytes, const std::function<void()>& operation) {
  const auto start = std::chrono::steady_clock::now();
  operation();
  const auto spent = std::chrono::steady_clock::now() - start;
  AddTime(kind, static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count()));
  Count(kind, bytes);
}

void HostCommunicator::AllReduce(void* data, int64_t count, DType dtype, void*) {
  RequireF32("AllReduce", dtype);
  const uint64_t bytes = static_cast<uint64_t>(count) * sizeof(float);
  Run(Collective::kAllReduce, 2 * bytes * others() / static_cast<uint64_t>(size()),
      [&] { DoAllReduce(static_cast<float*>(data), count); });
}

void HostCommunicator::AllGather(const void* in, void* out, size_t bytes, void*) {
  Run(Collective::kAllGather, bytes * others(), [&] { DoAllGather(in, out, bytes); });
}

void HostCommunicator::ReduceScatter(const void* in, void* out, int64_t count, DType dtype, void*) {
  RequireF32("ReduceScatter", dtype);
  Run(Collective::kReduceScatter, static_cast<uint64_t>(count) * sizeof(float) * others(),
      [&] { DoReduceScatter(static_cast<const float*>(in), static_cast<float*>(out), count); });
}

void HostCommunicator::AllToAll(const void* in, void* out, size_t bytes, void*) {
  Run(Collective::kAllToAll, bytes * others(), [&] { DoAllToAll(in, out, bytes); });
}

void HostCommunicator::AllToAllRows(const void* in, void* out, int64_t rows, size_t row_bytes, const int32_t* sent,
                                    int32_t* received, void*) {
  uint64_t bytes = received != nullptr ? sizeof(int32_t) * others() : 0;
  for (int peer = 0; peer < size(); ++peer) {
    if (sent[peer] < 0 || sent[peer] > rows) {
      throw DeviceError("AllToAllRows: " + std::to_string(sent[peer]) + " rows for rank " + std::to_string(peer) +
                        " in a block of " + std::to_string(rows));
    }
    if (peer != rank()) bytes += static_cast<uint64_t>(sent[peer]) * row_bytes;
  }
  Run(Collective::kAllToAll, bytes, [&] { DoAllToAllRows(in, out, rows, row_bytes, sent, received); });
}

void HostCommunicator::Broadcast(void* data, size_t bytes, int root, void*) {
  Run(Collective::kBroadcast, rank() == root ? bytes * others() : 0, [&] { DoBroadcast(data, bytes, root); });
}

}  // namespace k3
