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

}  // namespace

void BeginStep(const Device&, const BeginStepParams& params, cudaStream_t queue) {
  K3_REQUIRE(params.num_tokens == 0 || params.tokens != nullptr, "tokens is null");
  K3_REQUIRE(params.packed_table == nullptr || (params.packed_stride != nullptr && params.table != nullptr),
             "packed_stride or table is null");
  // The stride is not known here: enough blocks for a long context, few enough to cost nothing.
  const int64_t work = std::max(params.num_tokens, params.packed_table != nullptr ? params.sequences * 128 : 0);
  if (work == 0) return;
  LaunchShape shape;
  shape.block = dim3(256);
  shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(CeilDiv(work, 256), 128)));
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
  if (device.act == DType::kBF16) return CopyRows<bf16, bf16>(table, params.tokens, out, "Embed", queue);
  table.dtype == DType::kBF16 ? CopyRows<bf16, float>(table, params.tokens, out, "Embed", queue)
                              : CopyRows<float, float>(table, params.tokens, out, "Embed", queue);
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
