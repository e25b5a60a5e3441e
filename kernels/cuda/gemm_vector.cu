#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_vector.cuh"

namespace k3::cuda {
namespace {

constexpr int64_t kMostWeights = int64_t{64} << 20;  // larger ones take cuBLAS, whose launch does not show there
constexpr int64_t kLongestRow = 4096;                // a warp reads a row of weights alone
// Outputs that the device holds at once, and those from which a last wave that is not full costs little.
constexpr int64_t kOneWave = 4752;
constexpr int64_t kTwoWaves = 7000;
// More rows of a share the weights of a warp, at the price of its registers.
constexpr int64_t kSmallOutputs = 4096;
constexpr int64_t kSmallWeights = int64_t{5} << 19;

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

// Where it is at least as fast as cuBLAS, as measured on one H200 over the projections of the two published models.
bool TakesVectorGemm(const GemmArgs& args) {
  if (args.in != DType::kBF16 || args.batch != 1 || args.b_is_k_by_n || args.k % 8 != 0 || args.lda % 8 != 0 ||
      args.ldb % 8 != 0 || !Aligned(args.a, 16) || !Aligned(args.b, 16)) {
    return false;
  }
  const int64_t weights = args.n * args.k;
  if (args.m > 1) return args.m <= kVectorMaxRows && args.n <= kSmallOutputs && weights <= kSmallWeights;
  return args.k <= kLongestRow && weights <= kMostWeights && (args.n <= kOneWave || args.n > kTwoWaves);
}

void VectorGemm(const GemmArgs& args, cudaStream_t queue) {
  args.out == DType::kBF16 ? ForRows<bf16>(args, queue) : ForRows<float>(args, queue);
}

}  // namespace k3::cuda
