#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_sliced.cuh"

namespace k3::cuda {
namespace {

template <typename T, typename Out>
FixedGemmArgs<T, Out> Typed(const GemmArgs& args) {
  constexpr int64_t kElements = kPack<T>;
  FixedGemmArgs<T, Out> typed;
  typed.m = static_cast<int>(args.m);
  typed.n = static_cast<int>(args.n);
  typed.k = static_cast<int>(args.k);
  typed.a = static_cast<const T*>(args.a);
  typed.lda = args.lda;
  typed.b = static_cast<const T*>(args.b);
  typed.ldb = args.ldb;
  typed.c = static_cast<Out*>(args.c);
  typed.ldc = args.ldc;
  typed.stride_a = args.stride_a;
  typed.stride_b = args.stride_b;
  typed.stride_c = args.stride_c;
  typed.accumulate = args.accumulate;
  typed.aligned = Aligned(args.a, 16) && Aligned(args.b, 16) && args.lda % kElements == 0 &&
                  args.ldb % kElements == 0 && args.stride_a % kElements == 0 && args.stride_b % kElements == 0 &&
                  args.k % kElements == 0 && (!args.b_is_k_by_n || args.n % kElements == 0);
  return typed;
}

// Few rows of a, one kernel by how many, and by whether there are enough tiles of b to give a block several.
template <int kRows, typename Out>
void LaunchSlicedStream(const FixedGemmArgs<bf16, Out>& typed, int64_t batch, cudaStream_t queue) {
  constexpr int kMost = kRows <= 4 ? 4 : 2;
  constexpr int64_t kManyTiles = 132 * 8;
  const auto launch = [&](void (*kernel)(FixedGemmArgs<bf16, Out>), int tiles) {
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(CeilDiv(typed.n, 16 * tiles)), 1, static_cast<unsigned>(batch));
    shape.block = dim3(kSlicedThreads);
    shape.shared = static_cast<size_t>(kSlices) * tiles * kRows * 32 * sizeof(float4);
    Launch(kernel, shape, queue, "SlicedStream", typed);
  };
  if (CeilDiv(typed.n, 16) * batch >= kManyTiles) return launch(&SlicedStreamKernel<kRows, kMost, Out>, kMost);
  launch(&SlicedStreamKernel<kRows, 1, Out>, 1);
}

template <typename Out>
void LaunchSliced(const FixedGemmArgs<bf16, Out>& typed, int64_t batch, cudaStream_t queue) {
  if (typed.m <= 8) return LaunchSlicedStream<1>(typed, batch, queue);
  if (typed.m <= 16) return LaunchSlicedStream<2>(typed, batch, queue);
  if (typed.m <= 32) return LaunchSlicedStream<4>(typed, batch, queue);
  if (typed.m <= 64) return LaunchSlicedStream<8>(typed, batch, queue);
  // Tiles of 64 columns where those of 128 would leave part of the device idle.
  const int64_t row_tiles = CeilDiv(typed.m, kSlicedRows) * batch;
  const bool narrow = CeilDiv(typed.n, 128) * row_tiles < 132;
  LaunchShape shape;
  const int cols = narrow ? 64 : 128;
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(typed.n, cols)), static_cast<unsigned>(CeilDiv(typed.m, kSlicedRows)),
                    static_cast<unsigned>(batch));
  shape.block = dim3(kSlicedThreads);
  shape.shared = static_cast<size_t>(kSlicedStages) * (kSlicedRows + cols) * kSliceStep * sizeof(bf16);
  Launch(narrow ? &SlicedTileKernel<2, Out> : &SlicedTileKernel<4, Out>, shape, queue, "SlicedTile", typed);
}

template <typename Out>
void Launch16(const GemmArgs& args, cudaStream_t queue) {
  const FixedGemmArgs<bf16, Out> typed = Typed<bf16, Out>(args);
  // Not a function of m.
  if (typed.aligned && !args.b_is_k_by_n && args.k % kSliceStep == 0) return LaunchSliced(typed, args.batch, queue);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(args.n, kFixedTile)),
                    static_cast<unsigned>(CeilDiv(args.m, kFixedTile)), static_cast<unsigned>(args.batch));
  shape.block = dim3(kFixedThreads);
  shape.shared = kFixedTile * (kFixedDepth + 8) * 2 * sizeof(bf16);
  void (*kernel)(FixedGemmArgs<bf16, Out>) =
      args.b_is_k_by_n ? &FixedGemmKernel<true, Out> : &FixedGemmKernel<false, Out>;
  Launch(kernel, shape, queue, "FixedGemm", typed);
}

}  // namespace

void FixedGemm(const GemmArgs& args, cudaStream_t queue) {
  if (args.in == DType::kBF16)
    return args.out == DType::kBF16 ? Launch16<bf16>(args, queue) : Launch16<float>(args, queue);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(args.n, 16)), static_cast<unsigned>(CeilDiv(args.m, 8)),
                    static_cast<unsigned>(args.batch));
  shape.block = dim3(kFixedThreads);
  void (*kernel)(FixedGemmArgs<float, float>) =
      args.b_is_k_by_n ? &FixedGemmFloatKernel<true> : &FixedGemmFloatKernel<false>;
  Launch(kernel, shape, queue, "FixedGemm", Typed<float, float>(args));
}

void Gemm(const Device& device, const GemmArgs& args, cudaStream_t queue) {
  if (device.batch_invariant) return FixedGemm(args, queue);
  if (TakesVectorGemm(args)) return VectorGemm(args, queue);
  device.blas->Gemm(args, queue);
}

}  // namespace k3::cuda
