#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/op_table.h"

namespace k3::cuda {
namespace {

constexpr int kMaxThreads = 1024;

template <typename T, int N, bool kAdd>
void LaunchNorm(const MatrixView& stream, const MatrixView& delta, const float* weight, float eps,
                const MatrixView& out, cudaStream_t queue) {
  const int64_t packs = stream.cols / N;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(stream.rows));
  shape.block = dim3(static_cast<unsigned>(std::min<int64_t>(kMaxThreads, RoundUp(packs, 32))));
  shape.shared = 32 * sizeof(float);
  shape.early = true;
  auto* kernel = packs <= shape.block.x ? &AddRmsNormKernel<T, N, kAdd, true> : &AddRmsNormKernel<T, N, kAdd, false>;
  Launch(kernel, shape, queue, "RmsNorm", AsMatrix<T>(stream), AsMatrix<const T>(delta), weight, eps,
         static_cast<int>(stream.cols), AsMatrix<T>(out));
}

template <typename T>
void Norm(const MatrixView& stream, const MatrixView& delta, const float* weight, float eps, const MatrixView& out,
          cudaStream_t queue) {
  constexpr int kWide = kPack<T>;
  const bool wide = stream.cols % kWide == 0 && RowsAligned16(stream) && RowsAligned16(out) && Aligned(weight, 16) &&
                    (!delta || RowsAligned16(delta));
  if (wide) {
    delta ? LaunchNorm<T, kWide, true>(stream, delta, weight, eps, out, queue)
          : LaunchNorm<T, kWide, false>(stream, delta, weight, eps, out, queue);
  } else {
    delta ? LaunchNorm<T, 1, true>(stream, delta, weight, eps, out, queue)
          : LaunchNorm<T, 1, false>(stream, delta, weight, eps, out, queue);
  }
}

void CheckedNorm(const Device& device, const MatrixView& stream, const MatrixView& delta, const float* weight,
                 float eps, const MatrixView& out, cudaStream_t queue) {
  K3_REQUIRE(stream && stream.dtype == device.act && stream.ld >= stream.cols,
             "input must be " + std::string(Name(device.act)) + ", is " + Describe(stream));
  K3_REQUIRE_MATRIX(out, device.act, stream.rows, stream.cols);
  if (delta) K3_REQUIRE_MATRIX(delta, device.act, stream.rows, stream.cols);
  K3_REQUIRE(weight != nullptr, "weight is null");
  if (stream.rows == 0) return;
  device.act == DType::kBF16 ? Norm<bf16>(stream, delta, weight, eps, out, queue)
                             : Norm<float>(stream, delta, weight, eps, out, queue);
}

}  // namespace

void RmsNorm(const Device& device, const RmsNormParams& params, cudaStream_t queue) {
  CheckedNorm(device, params.x, {}, params.weight, params.eps, params.out, queue);
}

void AddRmsNorm(const Device& device, const AddRmsNormParams& params, cudaStream_t queue) {
  CheckedNorm(device, params.stream, params.delta, params.weight, params.eps, params.out, queue);
}

}  // namespace k3::cuda
