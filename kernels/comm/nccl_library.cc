#include "kernels/comm/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "kernels/comm/nccl.h"
#include "kernels/core/error.h"

namespace k3 {
namespace {

NcclLibrary Load() {
  // Multicast over NVLink gains little at these sizes, and a container that may not use it fails at the first
  // communicator. Whoever has set the variable knows better.
  setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/0);
  void* handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    throw DeviceError(
        std::string("several GPUs need the NCCL library, version 2.18 or later: cannot load libnccl.so.2 (") +
        (why != nullptr ? why : "unknown error") + ")");
  }
  NcclLibrary library;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) throw DeviceError(std::string("libnccl.so.2 is too old: it has no ") + name);
  };
  find(library.GetVersion, "ncclGetVersion");
  find(library.GetUniqueId, "ncclGetUniqueId");
  find(library.CommInitRank, "ncclCommInitRank");
  find(library.CommSplit, "ncclCommSplit");
  find(library.CommDestroy, "ncclCommDestroy");
  find(library.CommAbort, "ncclCommAbort");
  find(library.CommGetAsyncError, "ncclCommGetAsyncError");
  find(library.GetErrorString, "ncclGetErrorString");
  find(library.GetLastError, "ncclGetLastError");
  find(library.AllReduce, "ncclAllReduce");
  find(library.AllGather, "ncclAllGather");
  find(library.ReduceScatter, "ncclReduceScatter");
  find(library.Broadcast, "ncclBroadcast");
  find(library.Send, "ncclSend");
  find(library.Recv, "ncclRecv");
  find(library.GroupStart, "ncclGroupStart");
  find(library.GroupEnd, "ncclGroupEnd");
  return library;
}

}  // namespace

const NcclLibrary& NcclLibrary::Get() {
  static const NcclLibrary library = Load();
  return library;
}

std::string NcclVersion() noexcept {
  try {
    int version = 0;
    if (NcclLibrary::Get().GetVersion(&version) != ncclSuccess) return "";
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100);
  } catch (const DeviceError&) {
    return "";
  }
}

}  // namespace k3
