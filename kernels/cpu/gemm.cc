#include <algorithm>

#include "kernels/core/shape_check.h"
#include "kernels/cpu/cpu_ops.h"

namespace k3 {
namespace {

// Rows that one task multiplies by its panels while these stay in the first-level cache.
constexpr int64_t kRowBlock = 48;

}  // namespace

void CpuOps::Multiply(const PanelMatrix& w, const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows,
                      bool accumulate) {
  const int64_t row_blocks = (rows + kRowBlock - 1) / kRowBlock;
  // About three tasks per thread, in multiples of four panels: what the widest tile of a single row covers.
  const int64_t wanted = std::max<int64_t>(1, 3 * pool_.threads() / std::max<int64_t>(row_blocks, 1));
  const int64_t panels_per_task = std::max<int64_t>(4, ((w.panels() + wanted - 1) / wanted + 3) / 4 * 4);
  const int64_t column_tasks = (w.panels() + panels_per_task - 1) / panels_per_task;
  const int64_t work = std::min(rows, kRowBlock) * w.k * panels_per_task * PanelMatrix::kWidth;
  ForTasks(row_blocks * column_tasks, work, [&](int64_t task, int) {
    const int64_t row_begin = task / column_tasks * kRowBlock;
    const int64_t count = std::min(rows - row_begin, kRowBlock);
    const int64_t panel_begin = task % column_tasks * panels_per_task;
    const int64_t panel_end = std::min(w.panels(), panel_begin + panels_per_task);
    const float* x_rows[kRowBlock];
    float* y_rows[kRowBlock];
    for (int64_t r = 0; r < count; ++r) {
      x_rows[r] = x + (row_begin + r) * x_stride;
      y_rows[r] = y + (row_begin + r) * y_stride + panel_begin * PanelMatrix::kWidth;
    }
    kernels_.gemm(w, panel_begin, panel_end, x_rows, y_rows, count, accumulate);
  });
}

void CpuOps::Linear(const LinearParams& p, Stream) {
  CheckPointer("Linear", "weight", p.weight);
  const auto& weight = static_cast<const CpuLinearWeight&>(*p.weight);
  CheckMatrix("Linear", "x", p.x, p.x.rows, weight.in, DType::kF32);
  CheckMatrix("Linear", "y", p.y, p.x.rows, weight.out, DType::kF32);
  Multiply(weight.matrix, p.x.as<float>(), p.x.ld, p.y.as<float>(), p.y.ld, p.x.rows, p.accumulate);
}

}  // namespace k3
