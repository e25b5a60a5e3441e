#include "kernels/cuda/device.h"

namespace k3::cuda {
namespace {

std::string At(const std::source_location& place) {
  return std::string(" at ") + place.file_name() + ":" + std::to_string(place.line());
}

}  // namespace

void ThrowCuda(cudaError_t error, const char* call, const std::source_location& place) {
  throw DeviceError(std::string(call) + At(place) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

void ThrowBlas(cublasStatus_t status, const char* call, const std::source_location& place) {
  throw DeviceError(std::string(call) + At(place) + ": " + cublasLtGetStatusName(status) + ": " +
                    cublasLtGetStatusString(status));
}

void Refuse(const std::string& what, const std::source_location& place) {
  throw DeviceError(std::string(place.function_name()) + At(place) + ": " + what);
}

}  // namespace k3::cuda
