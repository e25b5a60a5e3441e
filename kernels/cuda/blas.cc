#include "kernels/cuda/blas.h"

#include <algorithm>
#include <string>

namespace k3::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{64} << 20;
constexpr int64_t kExactRows = 256;  // up to here every row count gets an algorithm of its own

cudaDataType_t BlasType(DType type) { return type == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F; }

// Largest power of two up to 256 that divides the address.
uint32_t Alignment(const void* data) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(data) | 256;
  return static_cast<uint32_t>(address & (~address + 1));
}

// Row count for which an algorithm is chosen: above kExactRows in steps of an eighth to a quarter.
int64_t Bucket(int64_t rows) {
  if (rows <= kExactRows) return rows;
  int64_t step = kExactRows / 4;
  while (step * 8 < rows) step *= 2;
  return (rows + step - 1) / step * step;
}

}  // namespace

// cuBLASLt is column-major: it computes c^T [n, m] = b a^T, with b as its first operand.
struct Blas::Problem {
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t first, second, result;

  Problem(const GemmArgs& args, int64_t m) {
    Check(cublasLtMatmulDescInit(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit");
    const cublasOperation_t first_op = args.b_is_k_by_n ? CUBLAS_OP_N : CUBLAS_OP_T;
    Check(cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_TRANSA, &first_op, sizeof(first_op)),
          "cublasLtMatmulDescSetAttribute");
    const cudaDataType_t in = BlasType(args.in);
    Layout(first, in, args.b_is_k_by_n ? args.n : args.k, args.b_is_k_by_n ? args.k : args.n, args.ldb, args.batch,
           args.stride_b);
    Layout(second, in, args.k, m, args.lda, args.batch, args.stride_a);
    Layout(result, BlasType(args.out), args.n, m, args.ldc, args.batch, args.stride_c);
  }

  static void Layout(cublasLtMatrixLayoutOpaque_t& layout, cudaDataType_t type, int64_t rows, int64_t cols, int64_t ld,
                     int64_t batch, int64_t stride) {
    Check(cublasLtMatrixLayoutInit(&layout, type, rows, cols, ld), "cublasLtMatrixLayoutInit");
    if (batch == 1) return;
    const int32_t count = static_cast<int32_t>(batch);
    Check(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)),
          "cublasLtMatrixLayoutSetAttribute");
    Check(
        cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof(stride)),
        "cublasLtMatrixLayoutSetAttribute");
  }
};

Blas::Blas(int ordinal) : workspace_(ordinal, kWorkspaceBytes) {
  Check(cublasLtCreate(&handle_), "cublasLtCreate");
  Check(cublasLtMatmulPreferenceCreate(&preference_), "cublasLtMatmulPreferenceCreate");
  const size_t bytes = kWorkspaceBytes;
  Check(cublasLtMatmulPreferenceSetAttribute(preference_, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                             sizeof(bytes)),
        "cublasLtMatmulPreferenceSetAttribute");
  // Partial sums over a split of k only in fp32 and in a fixed order.
  const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  Check(cublasLtMatmulPreferenceSetAttribute(preference_, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction,
                                             sizeof(reduction)),
        "cublasLtMatmulPreferenceSetAttribute");
}

Blas::~Blas() {
  cublasLtMatmulPreferenceDestroy(preference_);
  cublasLtDestroy(handle_);
}

const cublasLtMatmulAlgo_t& Blas::Choose(const Key& key, Problem& problem, const GemmArgs& args) {
  if (const auto found = chosen_.find(key); found != chosen_.end()) return found->second;
  const auto align = [&](cublasLtMatmulPreferenceAttributes_t attribute, const void* data) {
    const uint32_t bytes = Alignment(data);
    Check(cublasLtMatmulPreferenceSetAttribute(preference_, attribute, &bytes, sizeof(bytes)),
          "cublasLtMatmulPreferenceSetAttribute");
  };
  align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, args.b);
  align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, args.a);
  align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, args.c);
  align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, args.c);
  cublasLtMatmulHeuristicResult_t result;
  int found = 0;
  Check(cublasLtMatmulAlgoGetHeuristic(handle_, &problem.product, &problem.first, &problem.second, &problem.result,
                                       &problem.result, preference_, 1, &result, &found),
        "cublasLtMatmulAlgoGetHeuristic");
  if (found == 0) {
    Refuse("cuBLASLt has no algorithm for m, n, k = " + std::to_string(args.m) + ", " + std::to_string(args.n) + ", " +
               std::to_string(args.k),
           std::source_location::current());
  }
  return chosen_.emplace(key, result.algo).first->second;
}

void Blas::Gemm(const GemmArgs& args, cudaStream_t queue) {
  const float one = 1.0f;
  const float beta = args.accumulate ? 1.0f : 0.0f;
  const int64_t kind =
      (args.in == DType::kBF16) | (args.out == DType::kBF16) << 1 | args.accumulate << 2 | args.b_is_k_by_n << 3;
  const int64_t alignment = Alignment(args.a) | int64_t{Alignment(args.b)} << 16 | int64_t{Alignment(args.c)} << 32;
  Problem problem(args, args.m);
  const auto run = [&](const cublasLtMatmulAlgo_t& algorithm) {
    return cublasLtMatmul(handle_, &problem.product, &one, args.b, &problem.first, args.a, &problem.second, &beta,
                          args.c, &problem.result, args.c, &problem.result, &algorithm, workspace_.data(),
                          kWorkspaceBytes, queue);
  };
  Key key = {Bucket(args.m), args.n, args.k, args.lda, args.ldb, args.ldc, kind, args.batch, alignment, 0};
  Problem typical(args, key[0]);
  const cublasStatus_t status = run(Choose(key, typical, args));
  if (status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE)
    return Check(status, "cublasLtMatmul");
  // The bucket's algorithm does not take this row count.
  key[0] = args.m;
  key[9] = 1;
  Check(run(Choose(key, problem, args)), "cublasLtMatmul");
}

}  // namespace k3::cuda
