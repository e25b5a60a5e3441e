// Linked instead of kernels/cuda when no CUDA toolkit is used.
#include "kernels/ops.h"

namespace k3 {

std::unique_ptr<Ops> MakeCudaOps(const CudaOptions&) {
  throw DeviceError("this k3serve was built without CUDA: rebuild with K3_CUDA=ON, or use --device cpu");
}

int CudaDeviceCount() noexcept { return 0; }

}  // namespace k3
