#include "kernels/cuda/op_table.h"
#include "kernels/cuda/slots.cuh"

namespace k3::cuda {
namespace {

template <typename T>
void Fill(const PackSlotsParams& p, cudaStream_t queue) {
  const bool wide = p.x.cols % kPack<T> == 0 && RowsAligned16(p.x) && RowsAligned16(p.out);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(p.rows), static_cast<unsigned>(p.peers));
  shape.block =
      dim3(static_cast<unsigned>(std::min<int64_t>(256, RoundUp(CeilDiv(p.x.cols, wide ? kPack<T> : 1), 32))));
  auto* kernel = wide ? &FillSlotsKernel<T, kPack<T>> : &FillSlotsKernel<T, 1>;
  Launch(kernel, shape, queue, "PackSlots", p, AsMatrix<const T>(p.x), AsMatrix<T>(p.out), p.x.rows);
}

// Zeros fill the tree up to the next size: x + 0 = x, and the first addition with one does not change the order.
template <typename T>
void Sum(const SumSlotsParams& p, cudaStream_t queue) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(p.out.rows));
  shape.block = dim3(static_cast<unsigned>(std::clamp<int64_t>(RoundUp(p.out.cols, 32), 64, 512)));
  shape.shared = static_cast<size_t>(p.peers) * sizeof(int);
  auto* kernel = p.peers <= 2    ? &SumSlotsKernel<T, 2>
                 : p.peers <= 4  ? &SumSlotsKernel<T, 4>
                 : p.peers <= 8  ? &SumSlotsKernel<T, 8>
                 : p.peers <= 16 ? &SumSlotsKernel<T, 16>
                                 : &SumSlotsKernel<T, kMostPeers>;
  Launch(kernel, shape, queue, "SumSlots", p, AsMatrix<T>(p.out));
}

}  // namespace

void PackSlots(const Device&, const PackSlotsParams& params, cudaStream_t queue) {
  const MatrixView& x = params.x;
  const MatrixView& out = params.out;
  K3_REQUIRE(x && (x.dtype == DType::kBF16 || x.dtype == DType::kF32), "x must be BF16 or F32, is " + Describe(x));
  K3_REQUIRE(out && out.dtype == x.dtype && out.cols == x.cols && out.rows == params.peers * params.rows,
             "out must have " + std::to_string(params.peers * params.rows) + " rows like x, " + Describe(x) + ", is " +
                 Describe(out));
  K3_REQUIRE(params.peers > 0 && params.peers <= kMostPeers && params.first_part >= 0 &&
                 params.first_part + params.peers <= params.parts,
             "peers " + std::to_string(params.first_part) + " to " +
                 std::to_string(params.first_part + params.peers - 1) + " must be at most " +
                 std::to_string(kMostPeers) + " of " + std::to_string(params.parts) + " parts");
  K3_REQUIRE(params.top_k > 0, "top_k must be positive, is " + std::to_string(params.top_k));
  K3_REQUIRE(x.rows <= params.rows,
             std::to_string(x.rows) + " rows do not fit " + std::to_string(params.rows) + " slots");
  K3_REQUIRE(x.rows == 0 || (params.ids != nullptr && params.weights != nullptr), "ids or weights is null");
  K3_REQUIRE(params.out_ids != nullptr && params.out_weights != nullptr, "out_ids or out_weights is null");
  K3_REQUIRE(params.counts != nullptr && params.slots != nullptr, "counts or slots is null");
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(params.peers));
  shape.block = dim3(kAssignThreads);
  shape.shared = kAssignThreads / 32 * sizeof(int);
  Launch(&AssignSlotsKernel, shape, queue, "PackSlots", params, x.rows);
  if (params.rows == 0) return;
  x.dtype == DType::kBF16 ? Fill<bf16>(params, queue) : Fill<float>(params, queue);
}

void SumSlots(const Device&, const SumSlotsParams& params, cudaStream_t queue) {
  const MatrixView& out = params.out;
  K3_REQUIRE(out && (out.dtype == DType::kBF16 || out.dtype == DType::kF32),
             "out must be BF16 or F32, is " + Describe(out));
  K3_REQUIRE(params.peers > 0 && params.peers <= kMostPeers,
             "peers must be in [1, " + std::to_string(kMostPeers) + "], is " + std::to_string(params.peers));
  K3_REQUIRE(out.rows <= params.rows,
             std::to_string(out.rows) + " rows do not fit " + std::to_string(params.rows) + " slots");
  if (out.rows == 0) return;
  K3_REQUIRE(params.data != nullptr && params.slots != nullptr, "data or slots is null");
  out.dtype == DType::kBF16 ? Sum<bf16>(params, queue) : Sum<float>(params, queue);
}

}  // namespace k3::cuda
