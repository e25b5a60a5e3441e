#include <span>

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

template <typename Out>
using VectorKernel = void(VectorProducts<Out>, int, int, int);

// `columns`: of a block.
template <typename Out>
void LaunchVector(VectorKernel<Out>* kernel, int columns, std::span<const GemmArgs> products, cudaStream_t queue) {
  const GemmArgs& args = products[0];
  VectorProducts<Out> all;
  LaunchShape shape;
  shape.early = true;
  for (size_t i = 0; i < products.size(); ++i) {
    const GemmArgs& from = products[i];
    VectorProduct<Out>& to = all.product[i];
    to.a = {static_cast<const bf16*>(from.a), from.lda};
    to.weights = {static_cast<const bf16*>(from.b), from.ldb};
    to.c = {static_cast<Out*>(from.c), from.ldc};
    to.accumulate = from.accumulate;
    shape.early = shape.early && from.early;
  }
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(args.n, columns)), static_cast<unsigned>(products.size()));
  shape.block = dim3(kVectorThreads);
  Launch(kernel, shape, queue, "VectorGemm", all, static_cast<int>(args.m), static_cast<int>(args.n),
         static_cast<int>(args.k));
}

template <int kRows, int kSteps, bool kWhole, typename Out>
void LaunchLong(std::span<const GemmArgs> products, cudaStream_t queue) {
  LaunchVector<Out>(&VectorGemmKernel<kRows, kSteps, kWhole, Out>, kVectorWarps, products, queue);
}

template <int kRows, int kLanes, typename Out>
void LaunchShort(std::span<const GemmArgs> products, cudaStream_t queue) {
  LaunchVector<Out>(&VectorGemmShortKernel<kRows, kLanes, Out>, kVectorThreads / kLanes * kShortColumns, products,
                    queue);
}

template <int kRows, typename Out>
void ForWidth(std::span<const GemmArgs> products, cudaStream_t queue) {
  const int64_t k = products[0].k;
  if (k <= kVectorStep / 2) return LaunchShort<kRows, 16, Out>(products, queue);
  if (k <= kVectorStep) return LaunchShort<kRows, 32, Out>(products, queue);
  if (k % (16 * kVectorStep) == 0) return LaunchLong<kRows, 16, true, Out>(products, queue);
  if (k % (14 * kVectorStep) == 0) return LaunchLong<kRows, 14, true, Out>(products, queue);
  if (k % (9 * kVectorStep) == 0) return LaunchLong<kRows, 9, true, Out>(products, queue);
  if (k % (4 * kVectorStep) == 0) return LaunchLong<kRows, 4, true, Out>(products, queue);
  LaunchLong<kRows, 8, false, Out>(products, queue);
}

template <typename Out>
void ForRows(std::span<const GemmArgs> products, cudaStream_t queue) {
  if (products[0].m == 1) return ForWidth<1, Out>(products, queue);
  if (products[0].m == 2) return ForWidth<2, Out>(products, queue);
  ForWidth<4, Out>(products, queue);
}

void ForOutput(std::span<const GemmArgs> products, cudaStream_t queue) {
  products[0].out == DType::kBF16 ? ForRows<bf16>(products, queue) : ForRows<float>(products, queue);
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

void VectorGemm(const GemmArgs& args, cudaStream_t queue) { ForOutput({&args, 1}, queue); }

void VectorGemmPair(const GemmArgs& first, const GemmArgs& second, cudaStream_t queue) {
  const GemmArgs both[2] = {first, second};
  ForOutput(both, queue);
}

}  // namespace k3::cuda
