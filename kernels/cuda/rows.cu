#include "kernels/cuda/op_table.h"
#include "kernels/cuda/rows.cuh"

namespace k3::cuda {
namespace {

template <typename From, typename To>
void CopyRows(const MatrixView& from, const int32_t* index, const MatrixView& out, const char* name,
              cudaStream_t queue) {
  constexpr int kWide = kPack<To> < kPack<From> ? kPack<To> : kPack<From>;
  const bool wide = out.cols % kWide == 0 && RowsAligned16(from) && RowsAligned16(out);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(out.rows));
  shape.block = dim3(static_cast<unsigned>(std::min<int64_t>(512, RoundUp(CeilDiv(out.cols, wide ? kWide : 1), 32))));
  auto* kernel = wide ? &CopyRowsKernel<From, To, kWide> : &CopyRowsKernel<From, To, 1>;
  Launch(kernel, shape, queue, name, AsMatrix<const From>(from), index, static_cast<int>(out.cols), AsMatrix<To>(out));
}

template <typename From, typename To>
void EmbedShare(const EmbedParams& p, cudaStream_t queue) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(p.out.rows));
  shape.block = dim3(static_cast<unsigned>(std::min<int64_t>(512, RoundUp(p.out.cols, 32))));
  Launch(&EmbedShareKernel<From, To>, shape, queue, "Embed", AsMatrix<const From>(p.table), p.first_id, p.table.rows,
         p.tokens, static_cast<int>(p.out.cols), AsMatrix<To>(p.out));
}

template <typename T>
void SumParts(const Device& device, const TreeSumParams& p, cudaStream_t queue) {
  LaunchShape shape;
  shape.block = dim3(256);
  shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(CeilDiv(p.count, 256), 8 * device.multiprocessors)));
  const T* data = static_cast<const T*>(p.data);
  T* out = static_cast<T*>(p.out);
  const auto fixed = [&](auto* kernel) { Launch(kernel, shape, queue, "TreeSum", data, p.count, out); };
  switch (p.parts) {
    case 2:
      return fixed(&TreeSumKernel<T, 2>);
    case 4:
      return fixed(&TreeSumKernel<T, 4>);
    case 8:
      return fixed(&TreeSumKernel<T, 8>);
    case 16:
      return fixed(&TreeSumKernel<T, 16>);
    default:
      Launch(&TreeSumAnyKernel<T>, shape, queue, "TreeSum", data, static_cast<int>(p.parts), p.count, out);
  }
}

}  // namespace

void BeginStep(const Device&, const BeginStepParams& params, cudaStream_t queue) {
  K3_REQUIRE(params.num_tokens == 0 || params.tokens != nullptr, "tokens is null");
  K3_REQUIRE(params.packed_table == nullptr || (params.packed_stride != nullptr && params.table != nullptr),
             "packed_stride or table is null");
  const int64_t rows = params.packed_table != nullptr ? params.sequences : 0;
  const int64_t longest = std::max(params.num_tokens, rows > 0 ? params.table_stride : 0);
  if (longest == 0) return;
  K3_REQUIRE(rows <= 65535, "at most 65535 sequences, are " + std::to_string(rows));
  // The packed stride is not known here: enough blocks for a long context, few enough to cost nothing.
  LaunchShape shape;
  shape.block = dim3(256);
  shape.grid = dim3(static_cast<unsigned>(std::min(CeilDiv(longest, 256), CeilDiv(1024, std::max<int64_t>(rows, 1)))),
                    static_cast<unsigned>(std::max<int64_t>(rows, 1)));
  Launch(&BeginStepKernel, shape, queue, "BeginStep", params);
}

void Embed(const Device& device, const EmbedParams& params, cudaStream_t queue) {
  const MatrixView& table = params.table;
  const MatrixView& out = params.out;
  K3_REQUIRE(table && (table.dtype == DType::kBF16 || table.dtype == device.act),
             "table must be BF16 or " + std::string(Name(device.act)) + ", is " + Describe(table));
  K3_REQUIRE(out && out.dtype == device.act && out.cols == table.cols && out.ld >= out.cols,
             "out must be " + std::string(Name(device.act)) + " of " + std::to_string(table.cols) + " columns, is " +
                 Describe(out));
  if (out.rows == 0) return;
  K3_REQUIRE(params.tokens != nullptr, "tokens is null");
  if (params.is_share) {
    if (device.act == DType::kBF16) return EmbedShare<bf16, bf16>(params, queue);
    return table.dtype == DType::kBF16 ? EmbedShare<bf16, float>(params, queue)
                                       : EmbedShare<float, float>(params, queue);
  }
  if (device.act == DType::kBF16) return CopyRows<bf16, bf16>(table, params.tokens, out, "Embed", queue);
  table.dtype == DType::kBF16 ? CopyRows<bf16, float>(table, params.tokens, out, "Embed", queue)
                              : CopyRows<float, float>(table, params.tokens, out, "Embed", queue);
}

void CopyMatrix(const Device&, const CopyMatrixParams& params, cudaStream_t queue) {
  const MatrixView& from = params.from;
  const MatrixView& to = params.to;
  K3_REQUIRE(from && to && from.rows == to.rows && from.cols == to.cols && from.dtype == to.dtype,
             "to must be like from, " + Describe(from) + ", is " + Describe(to));
  if (from.rows == 0) return;
  const size_t element = SizeOf(from.dtype);
  K3_CUDA(cudaMemcpy2DAsync(to.data, static_cast<size_t>(to.ld) * element, from.data,
                            static_cast<size_t>(from.ld) * element, static_cast<size_t>(from.cols) * element,
                            static_cast<size_t>(from.rows), cudaMemcpyDeviceToDevice, queue));
}

void TreeSum(const Device& device, const TreeSumParams& params, cudaStream_t queue) {
  K3_REQUIRE(params.parts >= 1 && params.parts <= kMostTreeParts,
             "parts must be in [1, " + std::to_string(kMostTreeParts) + "], is " + std::to_string(params.parts));
  K3_REQUIRE(params.dtype == DType::kF32 || params.dtype == DType::kBF16,
             "dtype must be F32 or BF16, is " + std::string(Name(params.dtype)));
  if (params.count == 0) return;
  K3_REQUIRE(params.data != nullptr && params.out != nullptr, "data or out is null");
  params.dtype == DType::kF32 ? SumParts<float>(device, params, queue) : SumParts<bf16>(device, params, queue);
}

void GatherRows(const Device&, const GatherRowsParams& params, cudaStream_t queue) {
  const MatrixView& x = params.x;
  const MatrixView& out = params.out;
  K3_REQUIRE(x && (x.dtype == DType::kBF16 || x.dtype == DType::kF32), "x must be BF16 or F32, is " + Describe(x));
  K3_REQUIRE(out && out.dtype == x.dtype && out.cols == x.cols && out.ld >= out.cols,
             "out must be like x, " + Describe(x) + ", is " + Describe(out));
  if (out.rows == 0) return;
  K3_REQUIRE(params.row != nullptr, "row is null");
  x.dtype == DType::kBF16 ? CopyRows<bf16, bf16>(x, params.row, out, "GatherRows", queue)
                          : CopyRows<float, float>(x, params.row, out, "GatherRows", queue);
}

}  // namespace k3::cuda
