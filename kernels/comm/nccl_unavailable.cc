#include "kernels/comm/nccl.h"
#include "kernels/core/error.h"

// Linked when there is no CUDA backend, or no nccl.h to build against.
namespace k3 {

std::string NcclVersion() noexcept { return ""; }

NcclId MakeNcclId() { throw DeviceError("several GPUs: this build has no NCCL"); }

std::unique_ptr<Communicator> MakeNcclCommunicator(const NcclId&, int, int, Ops&, const NcclOptions&) {
  throw DeviceError("several GPUs: this build has no NCCL");
}

}  // namespace k3
