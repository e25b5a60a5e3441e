#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_vector.cuh"

namespace k3::cuda {
namespace {

constexpr int64_t kMostWeights = int64_t{64} << 20;  // larger ones take cuBLAS, whose launch does not show there

template <int kRows, int kSteps, typename Out>
void LaunchVector(const GemmArgs& args, cudaStream_t queue) {
  VectorGemmArgs<Out> typed;
  typed.a = {static_cast<const bf16*>(args.a), args.lda};
  typed.c = {static_cast<Out*>(args.c), args.ldc};
  typed.m = static_cast<int>(args.m);
  typed.accumulate = args.accumulate;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(args.n, kVectorWarps)));
  shape.block = dim3(kVectorThreads);
  Launch(&VectorGemmKernel<kRows, kSteps, Out>, shape, queue, "VectorGemm", typed, static_cast<const bf16*>(args.b),
         args.ldb, static_cast<int>(args.n), static_cast<int>(args.k));
}

template <int kRows, typename Out>
void ForWidth(const GemmArgs& args, cudaStream_t queue) {
  if (args.k <= kVectorStep) return LaunchVector<kRows, 1, Out>(args, queue);
  if (args.k <= 4 * kVectorStep) return LaunchVector<kRows, 4, Out>(args, queue);
  if (args.k % (9 * kVectorStep) == 0) return LaunchVector<kRows, 9, Out>(args, queue);
  LaunchVector<kRows, 8, Out>(args, queue);
}

template <typename Out>
void ForRows(const GemmArgs& args, cudaStream_t queue) {
  if (args.m == 1) return ForWidth<1, Out>(args, queue);
  if (args.m == 2) return ForWidth<2, Out>(args, queue);
  ForWidth<4, Out>(args, queue);
}

}  // namespace

bool TakesVectorGemm(const GemmArgs& args) {
  return args.in == DType::kBF16 && args.batch == 1 && !args.b_is_k_by_n && args.m <= kVectorMaxRows &&
         args.k % 8 == 0 && args.lda % 8 == 0 && args.ldb % 8 == 0 && Aligned(args.a, 16) && Aligned(args.b, 16) &&
         args.n * args.k <= kMostWeights;
}

void VectorGemm(const GemmArgs& args, cudaStream_t queue) {
  args.out == DType::kBF16 ? ForRows<bf16>(args, queue) : ForRows<float>(args, queue);
}

}  // namespace k3::cuda
