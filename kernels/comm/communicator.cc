#include "kernels/comm/communicator.h"

#include <string>

#include "kernels/core/error.h"

namespace k3 {
namespace {

// A group of one has its result already when it computes in place; a copy is the caller's, who knows the device.
void RequireInPlace(const void* in, const void* out, const char* what) {
  if (in != out) throw DeviceError(std::string(what) + " in a group of one rank works in place only");
}

}  // namespace

uint64_t Communicator::bytes_sent() const {
  uint64_t bytes = 0;
  for (const CommCounters& counters : counters_) bytes += counters.bytes;
  return bytes;
}

void NullCommunicator::AllGather(const void* in, void* out, size_t, void*) { RequireInPlace(in, out, "AllGather"); }
void NullCommunicator::ReduceScatter(const void* in, void* out, int64_t, DType, void*) {
  RequireInPlace(in, out, "ReduceScatter");
}
void NullCommunicator::AllToAll(const void* in, void* out, size_t, void*) { RequireInPlace(in, out, "AllToAll"); }
void NullCommunicator::AllToAllRows(const void* in, void* out, int64_t, size_t, const int32_t*, int32_t*, void*) {
  RequireInPlace(in, out, "AllToAllRows");
}

}  // namespace k3
