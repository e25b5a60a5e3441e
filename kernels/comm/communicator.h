#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/comm/collective.h"
#include "kernels/core/dtype.h"

namespace k3 {

// What one rank's collectives of a kind have cost. Bytes are what this rank sent to others, as the algorithm's lower
// bound counts them: the payload, not the protocol. Written by the rank's thread, readable from any.
struct CommCounters {
  std::atomic<uint64_t> calls{0};
  std::atomic<uint64_t> bytes{0};
  // Time inside: of the host where it waits there (CPU), of the device where steps are profiled, else 0.
  std::atomic<uint64_t> nanoseconds{0};
};

// Collective operations of one group of ranks. All ranks of a group issue the same operations in the same order with
// the same sizes, which the host knows; an idle rank issues them too. Operations run in the order of the stream (the
// CPU's: at once), can be captured into a graph, and need no host synchronization.
//
// Sums have one fixed order (tree_sum.h) in the local and the socket communicator, and in NCCL's when it was made so.
//
// A rank that fails calls Abort. Everybody else then gets a DeviceError from the operation that he waits in or from the
// next one, instead of waiting for ever. Abort may be called from any thread, all else from the rank's thread only.
class Communicator {
 public:
  virtual ~Communicator() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // data[i] = sum over ranks; F32, and on devices BF16.
  virtual void AllReduce(void* data, int64_t count, DType dtype, void* stream) = 0;
  // out [size][bytes] = every rank's `in`, which may be this rank's block of `out`.
  virtual void AllGather(const void* in, void* out, size_t bytes, void* stream) = 0;
  // out [count] = sum over ranks of block `rank` of their in [size][count]. `out` and `in` do not overlap.
  virtual void ReduceScatter(const void* in, void* out, int64_t count, DType dtype, void* stream) = 0;
  // out [size][bytes]: block r is what rank r had in block `rank` of its in [size][bytes]. They do not overlap.
  virtual void AllToAll(const void* in, void* out, size_t bytes, void* stream) = 0;
  // The same of blocks of `rows` rows each, of which only the first sent[r] of block r hold something; the rest of
  // `out` is undefined. sent [size] is device memory, as is received [size], which gets how many rows came from each
  // rank, or is null. Host memory sends only those rows; a device, whose counts the host does not know, whole blocks.
  virtual void AllToAllRows(const void* in, void* out, int64_t rows, size_t row_bytes, const int32_t* sent,
                            int32_t* received, void* stream) = 0;
  virtual void Broadcast(void* data, size_t bytes, int root, void* stream) = 0;

  // Operations between the two may be started together; none may depend on another's result.
  virtual void BeginGroup() {}
  virtual void EndGroup() {}

  // Groups of the ranks with equal `color`, ordered by `key`. Collective; not under capture.
  virtual std::unique_ptr<Communicator> Split(int color, int key) = 0;

  // Ends this group and those split from it, for all ranks. Keeps the first reason.
  virtual void Abort(const std::string& why) noexcept = 0;
  // Throws DeviceError when the group was aborted or a peer is lost: what a device result is worth after a
  // synchronization. Empty work otherwise.
  virtual void Check() = 0;

  const CommCounters& counters(Collective kind) const { return counters_[static_cast<size_t>(kind)]; }
  uint64_t bytes_sent() const;  // over all kinds
  // For whoever measures it from outside.
  void AddTime(Collective kind, uint64_t nanoseconds) {
    counters_[static_cast<size_t>(kind)].nanoseconds.fetch_add(nanoseconds, std::memory_order_relaxed);
  }

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}
  void Count(Collective kind, uint64_t bytes) {
    CommCounters& counters = counters_[static_cast<size_t>(kind)];
    counters.calls.fetch_add(1, std::memory_order_relaxed);
    counters.bytes.fetch_add(bytes, std::memory_order_relaxed);
  }

 private:
  int rank_;
  int size_;
  std::array<CommCounters, kCollectives> counters_;
};

// A group of one: nothing to exchange. AllGather and the like copy nothing, for the callers test size() first; called
// all the same they refuse, because a result would be missing.
class NullCommunicator final : public Communicator {
 public:
  NullCommunicator() : Communicator(0, 1) {}
  void AllReduce(void*, int64_t, DType, void*) override {}
  void AllGather(const void* in, void* out, size_t bytes, void* stream) override;
  void ReduceScatter(const void* in, void* out, int64_t count, DType dtype, void* stream) override;
  void AllToAll(const void* in, void* out, size_t bytes, void* stream) override;
  void AllToAllRows(const void* in, void* out, int64_t rows, size_t row_bytes, const int32_t* sent, int32_t* received,
                    void* stream) override;
  void Broadcast(void*, size_t, int, void*) override {}
  std::unique_ptr<Communicator> Split(int, int) override { return std::make_unique<NullCommunicator>(); }
  void Abort(const std::string&) noexcept override {}
  void Check() override {}
};

}  // namespace k3
