#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_fixed.cuh"

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

template <typename Out>
void Launch16(const GemmArgs& args, cudaStream_t queue) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(args.n, kFixedTile)),
                    static_cast<unsigned>(CeilDiv(args.m, kFixedTile)), static_cast<unsigned>(args.batch));
  shape.block = dim3(kFixedThreads);
  shape.shared = kFixedTile * (kFixedDepth + 8) * 2 * sizeof(bf16);
  void (*kernel)(FixedGemmArgs<bf16, Out>) =
      args.b_is_k_by_n ? &FixedGemmKernel<true, Out> : &FixedGemmKernel<false, Out>;
  Launch(kernel, shape, queue, "FixedGemm", Typed<bf16, Out>(args));
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
