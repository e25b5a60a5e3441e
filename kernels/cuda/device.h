#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <source_location>
#include <string>

#include "kernels/core/dtype.h"
#include "kernels/core/error.h"
#include "kernels/core/shape_check.h"
#include "kernels/core/tensor.h"

namespace k3::cuda {

class Blas;

// What the launchers need to know about the rank's device. Owned by CudaOps, constant after construction.
struct Device {
  int ordinal = 0;
  int multiprocessors = 0;
  size_t shared_per_block = 0;  // largest dynamic shared memory of one block, after opting in
  DType act = DType::kBF16;     // Ops::activation_dtype()
  bool batch_invariant = false;
  bool on_side_stream = false;  // Ops::Fork
  Blas* blas = nullptr;         // for the compute thread only
};

// Throws DeviceError with the call, the place and the library's text.
[[noreturn]] void ThrowCuda(cudaError_t error, const char* call, const std::source_location& place);
[[noreturn]] void ThrowBlas(cublasStatus_t status, const char* call, const std::source_location& place);
// A launch that the host-side checks refuse: `what` names the field, the expected and the actual value.
[[noreturn]] void Refuse(const std::string& what, const std::source_location& place);

inline void Check(cudaError_t error, const char* call,
                  const std::source_location& place = std::source_location::current()) {
  if (error != cudaSuccess) [[unlikely]]
    ThrowCuda(error, call, place);
}
inline void Check(cublasStatus_t status, const char* call,
                  const std::source_location& place = std::source_location::current()) {
  if (status != CUBLAS_STATUS_SUCCESS) [[unlikely]]
    ThrowBlas(status, call, place);
}

}  // namespace k3::cuda

#define K3_CUDA(call) ::k3::cuda::Check((call), #call)

// Host-side check of a launch's arguments; `what` is evaluated only on failure.
#define K3_REQUIRE(condition, what)                                \
  do {                                                             \
    if (!(condition)) [[unlikely]]                                 \
      ::k3::cuda::Refuse((what), std::source_location::current()); \
  } while (0)

#define K3_REQUIRE_MATRIX(view, want_dtype, want_rows, want_cols) \
  ::k3::CheckMatrix(__func__, #view, (view), (want_rows), (want_cols), (want_dtype))
