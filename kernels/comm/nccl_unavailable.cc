#include "kernels/comm/nccl.h"
#include "kernels/core/error.h"

// Linked when this build has no CUDA backend.
namespace k3 {

std::string NcclVersion() noexcept { return ""; }

NcclId MakeNcclId() { throw DeviceError("NCCL: this build has no CUDA backend"); }

std::unique_ptr<Communicator> MakeNcclCommunicator(const NcclId&, int, int, Ops&, const NcclOptions&) {
  throw DeviceError("NCCL: this build has no CUDA backend");
}

}  // namespace k3
