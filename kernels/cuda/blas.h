#pragma once

#include <cublasLt.h>

#include <array>
#include <cstdint>
#include <map>

#include "kernels/core/dtype.h"
#include "kernels/cuda/memory.h"

namespace k3::cuda {

// c = a b^T, or c += a b^T, for row-major matrices: a [m, k], b [n, k], c [m, n]. `batch` of them, the strides in
// elements between one and the next. Sums are fp32; fp32 operands are multiplied as fp32, not tf32.
struct GemmArgs {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const void* a = nullptr;
  int64_t lda = 0;
  const void* b = nullptr;
  int64_t ldb = 0;
  bool b_is_k_by_n = false;  // b is stored as [k, n]
  void* c = nullptr;
  int64_t ldc = 0;
  DType in = DType::kBF16;   // of a and b
  DType out = DType::kBF16;  // of c: `in` or F32
  bool accumulate = false;
  bool early = false;  // LaunchShape::early, where a kernel of our own runs
  int64_t batch = 1;
  int64_t stride_a = 0;
  int64_t stride_b = 0;
  int64_t stride_c = 0;
};

// cuBLASLt with one fixed workspace and the chosen algorithms kept by shape, so that a product costs the host little
// more than its launch and can be captured. For one thread and one stream at a time.
class Blas {
 public:
  explicit Blas(int ordinal);
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;

  void Gemm(const GemmArgs& args, cudaStream_t queue);

 private:
  using Key = std::array<int64_t, 10>;
  struct Problem;
  const cublasLtMatmulAlgo_t& Choose(const Key& key, Problem& problem, const GemmArgs& args);

  DeviceMemory workspace_;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulPreference_t preference_ = nullptr;
  std::map<Key, cublasLtMatmulAlgo_t> chosen_;
};

}  // namespace k3::cuda
