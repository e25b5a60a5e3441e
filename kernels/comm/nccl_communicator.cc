#include <cuda_runtime_api.h>
#include <sys/statvfs.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/comm/nccl.h"
#include "kernels/comm/nccl_library.h"
#include "kernels/core/error.h"

namespace k3 {
namespace {

constexpr auto kPatience = std::chrono::seconds(2);  // of an abort for a rank's thread that is inside the library

// What containers most often lack, to be told with a failed start.
std::string SharedMemoryText() {
  constexpr uint64_t kWantedMiB = 1024;  // enough for all transports of eight GPUs
  struct statvfs file_system;
  if (statvfs("/dev/shm", &file_system) != 0) return "; there is no shared memory at /dev/shm";
  const uint64_t unit = file_system.f_frsize;
  return "; shared memory (/dev/shm): " + std::to_string(unit * file_system.f_bavail >> 20) + " MiB free of " +
         std::to_string(unit * file_system.f_blocks >> 20) + ", NCCL may need " + std::to_string(kWantedMiB) +
         " (--shm-size=1g of a container)";
}

ncclDataType_t TypeOf(DType dtype, const char* op) {
  if (dtype == DType::kF32) return ncclFloat32;
  if (dtype == DType::kBF16) return ncclBfloat16;
  throw DeviceError(std::string(op) + ": NCCL sums F32 and BF16 here, not " + Name(dtype));
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(ncclComm_t comm, int rank, int size, Ops& ops, const NcclOptions& options)
      : Communicator(rank, size), nccl_(NcclLibrary::Get()), comm_(comm), ops_(ops), options_(options) {}

  ~NcclCommunicator() override {
    if (comm_ != nullptr) nccl_.CommDestroy(comm_);
    for (void* memory : scratch_) ops_.Free(memory);
  }

  void AllReduce(void* data, int64_t count, DType dtype, void* stream) override {
    const ncclDataType_t type = TypeOf(dtype, "AllReduce");
    const size_t bytes = static_cast<size_t>(count) * SizeOf(dtype);
    if (size() == 1 || count == 0) return;
    if (options_.fixed_sums) {
      void* parts = Scratch(bytes * static_cast<size_t>(size()), stream);
      Call(Collective::kAllReduce, stream,
           [&] { return nccl_.AllGather(data, parts, bytes, ncclUint8, comm_, Queue(stream)); });
      ops_.TreeSum({.data = parts, .parts = size(), .count = count, .dtype = dtype, .out = data}, stream);
      Count(Collective::kAllReduce, bytes * others());
      return;
    }
    Call(Collective::kAllReduce, stream,
         [&] { return nccl_.AllReduce(data, data, static_cast<size_t>(count), type, ncclSum, comm_, Queue(stream)); });
    Count(Collective::kAllReduce, 2 * bytes * others() / static_cast<uint64_t>(size()));
  }

  void AllGather(const void* in, void* out, size_t bytes, void* stream) override {
    Call(Collective::kAllGather, stream,
         [&] { return nccl_.AllGather(in, out, bytes, ncclUint8, comm_, Queue(stream)); });
    Count(Collective::kAllGather, bytes * others());
  }

  void ReduceScatter(const void* in, void* out, int64_t count, DType dtype, void* stream) override {
    const ncclDataType_t type = TypeOf(dtype, "ReduceScatter");
    const size_t bytes = static_cast<size_t>(count) * SizeOf(dtype);
    if (count == 0) return;
    // Two terms have one order only.
    if (options_.fixed_sums && size() > 2) {
      void* parts = Scratch(bytes * static_cast<size_t>(size()), stream);
      Call(Collective::kReduceScatter, stream, [&] { return ExchangeBlocks(in, parts, bytes, stream); });
      ops_.TreeSum({.data = parts, .parts = size(), .count = count, .dtype = dtype, .out = out}, stream);
      Count(Collective::kReduceScatter, bytes * others());
      return;
    }
    Call(Collective::kReduceScatter, stream,
         [&] { return nccl_.ReduceScatter(in, out, static_cast<size_t>(count), type, ncclSum, comm_, Queue(stream)); });
    Count(Collective::kReduceScatter, bytes * others());
  }

  void AllToAll(const void* in, void* out, size_t bytes, void* stream) override {
    Call(Collective::kAllToAll, stream, [&] { return ExchangeBlocks(in, out, bytes, stream); });
    Count(Collective::kAllToAll, bytes * others());
  }

  void AllToAllRows(const void* in, void* out, int64_t rows, size_t row_bytes, const int32_t* sent, int32_t* received,
                    void* stream) override {
    const size_t block = static_cast<size_t>(rows) * row_bytes;
    Call(Collective::kAllToAll, stream, [&] {
      const ncclResult_t result = ExchangeBlocks(in, out, block, stream);
      if (result != ncclSuccess || received == nullptr) return result;
      return ExchangeBlocks(sent, received, sizeof(int32_t), stream);
    });
    Count(Collective::kAllToAll, (block + (received != nullptr ? sizeof(int32_t) : 0)) * others());
  }

  void Broadcast(void* data, size_t bytes, int root, void* stream) override {
    Call(Collective::kBroadcast, stream,
         [&] { return nccl_.Broadcast(data, data, bytes, ncclUint8, root, comm_, Queue(stream)); });
    Count(Collective::kBroadcast, rank() == root ? bytes * others() : 0);
  }

  void BeginGroup() override {
    Call("GroupStart", [&] { return nccl_.GroupStart(); });
    in_group_ = true;
    group_kind_.reset();
  }
  // What was called since BeginGroup goes on the stream now: it is measured as one, under the kind of its first call.
  void EndGroup() override {
    in_group_ = false;
    const auto end = [this] { Call("GroupEnd", [&] { return nccl_.GroupEnd(); }); };
    group_kind_.has_value() ? ops_.Measure(Name(*group_kind_), group_stream_, end) : end();
  }

  std::unique_ptr<Communicator> Split(int color, int key) override {
    // The members' places follow from what all ranks ask for.
    struct Asked {
      int color, key;
    };
    std::vector<Asked> all(static_cast<size_t>(size()));
    all[static_cast<size_t>(rank())] = {color, key};
    void* device = Scratch(all.size() * sizeof(Asked), nullptr);
    char* own = static_cast<char*>(device) + static_cast<size_t>(rank()) * sizeof(Asked);
    ops_.CopyToDevice(own, &all[static_cast<size_t>(rank())], sizeof(Asked), ops_.stream());
    AllGather(own, device, sizeof(Asked), ops_.stream());
    ops_.CopyToHost(all.data(), device, all.size() * sizeof(Asked), ops_.stream());
    ops_.Synchronize(ops_.stream());
    int members = 0, place = 0;
    for (int r = 0; r < size(); ++r) {
      const Asked& other = all[static_cast<size_t>(r)];
      if (other.color != color) continue;
      ++members;
      place += other.key < key || (other.key == key && r < rank());
    }
    ncclComm_t split = nullptr;
    Call("CommSplit", [&] { return nccl_.CommSplit(comm_, color, key, &split, nullptr); });
    return std::make_unique<NcclCommunicator>(split, place, members, ops_, options_);
  }

  void Abort(const std::string& why) noexcept override {
    {
      std::lock_guard lock(reason_mutex_);
      if (aborted_) return;
      reason_ = why;
      aborted_ = true;
    }
    // A thread that waits for peers inside a call holds the lock; ending the communicator is what frees it.
    std::unique_lock lock(comm_mutex_, std::defer_lock);
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (!lock.try_lock() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (comm_ != nullptr) nccl_.CommAbort(comm_);
    comm_ = nullptr;
  }

  void Check() override {
    ThrowIfAborted();
    ncclResult_t state = ncclSuccess;
    {
      std::lock_guard lock(comm_mutex_);
      if (comm_ == nullptr) return;
      nccl_.CommGetAsyncError(comm_, &state);
    }
    if (state != ncclSuccess && state != ncclInProgress) Throw("a collective", state);
  }

 private:
  cudaStream_t Queue(void* stream) const {
    return static_cast<cudaStream_t>(stream != nullptr ? stream : ops_.stream());
  }

  uint64_t others() const { return static_cast<uint64_t>(size() - 1); }

  // out: block r is rank r's block `rank` of its in.
  ncclResult_t ExchangeBlocks(const void* in, void* out, size_t bytes, void* stream) {
    ncclResult_t result = nccl_.GroupStart();
    for (int peer = 0; peer < size() && result == ncclSuccess; ++peer) {
      const size_t offset = static_cast<size_t>(peer) * bytes;
      result = nccl_.Send(static_cast<const char*>(in) + offset, bytes, ncclUint8, peer, comm_, Queue(stream));
      if (result != ncclSuccess) break;
      result = nccl_.Recv(static_cast<char*>(out) + offset, bytes, ncclUint8, peer, comm_, Queue(stream));
    }
    const ncclResult_t ended = nccl_.GroupEnd();
    return result != ncclSuccess ? result : ended;
  }

  // A collective on the stream; its device time is taken where steps are profiled.
  template <typename Function>
  void Call(Collective kind, void* stream, const Function& call) {
    const char* what = Name(kind);
    if (in_group_) {
      if (!group_kind_.has_value()) group_kind_ = kind;
      group_stream_ = stream;
      return Call(what, call);
    }
    ops_.Measure(what, stream, [&] { Call(what, call); });
  }

  template <typename Function>
  void Call(const char* what, const Function& call) {
    ThrowIfAborted();
    ncclResult_t result;
    {
      std::lock_guard lock(comm_mutex_);
      if (comm_ == nullptr) ThrowIfAborted();
      result = call();
    }
    if (result != ncclSuccess) Throw(what, result);
  }

  [[noreturn]] void Throw(const char* what, ncclResult_t result) {
    ThrowIfAborted();
    const char* detail = nccl_.GetLastError(nullptr);
    throw DeviceError(std::string("NCCL ") + what + " on rank " + std::to_string(rank()) + " of " +
                      std::to_string(size()) + ": " + nccl_.GetErrorString(result) +
                      (detail != nullptr && *detail != '\0' ? std::string(" (") + detail + ")" : ""));
  }

  void ThrowIfAborted() {
    std::lock_guard lock(reason_mutex_);
    if (aborted_) throw DeviceError("communication ended: " + reason_);
  }

  // Grows, outside of capture only: what a captured step uses was there when it was first run. Earlier pieces stay,
  // because captured work may hold them.
  void* Scratch(size_t bytes, void* stream) {
    if (bytes > scratch_bytes_) {
      cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
      cudaStreamIsCapturing(Queue(stream), &capturing);
      if (capturing != cudaStreamCaptureStatusNone) {
        throw DeviceError("NCCL: a captured step needs " + std::to_string(bytes) + " bytes for sums, there are " +
                          std::to_string(scratch_bytes_));
      }
      scratch_.push_back(ops_.Allocate(bytes));
      scratch_bytes_ = bytes;
    }
    return scratch_.back();
  }

  const NcclLibrary& nccl_;
  std::mutex comm_mutex_;  // around every call with comm_
  ncclComm_t comm_;
  std::mutex reason_mutex_;
  bool aborted_ = false;
  std::string reason_;
  Ops& ops_;
  const NcclOptions options_;
  std::vector<void*> scratch_;
  size_t scratch_bytes_ = 0;
  bool in_group_ = false;
  std::optional<Collective> group_kind_;  // of the group under way
  void* group_stream_ = nullptr;
};

}  // namespace

NcclId MakeNcclId() {
  static_assert(sizeof(ncclUniqueId) == sizeof(NcclId::bytes));
  const NcclLibrary& nccl = NcclLibrary::Get();
  ncclUniqueId id;
  if (const ncclResult_t result = nccl.GetUniqueId(&id); result != ncclSuccess) {
    throw DeviceError(std::string("NCCL: no unique id: ") + nccl.GetErrorString(result));
  }
  NcclId out;
  std::memcpy(out.bytes.data(), &id, sizeof id);
  return out;
}

std::unique_ptr<Communicator> MakeNcclCommunicator(const NcclId& id, int rank, int size, Ops& ops,
                                                   const NcclOptions& options) {
  const NcclLibrary& nccl = NcclLibrary::Get();
  ops.BindThread();
  ncclUniqueId unique;
  std::memcpy(&unique, id.bytes.data(), sizeof unique);
  ncclComm_t comm = nullptr;
  if (const ncclResult_t result = nccl.CommInitRank(&comm, size, unique, rank); result != ncclSuccess) {
    const char* detail = nccl.GetLastError(nullptr);
    throw DeviceError("NCCL: rank " + std::to_string(rank) + " of " + std::to_string(size) +
                      " cannot join: " + nccl.GetErrorString(result) +
                      (detail != nullptr ? std::string(" (") + detail + ")" : "") + SharedMemoryText());
  }
  return std::make_unique<NcclCommunicator>(comm, rank, size, ops, options);
}

}  // namespace k3
