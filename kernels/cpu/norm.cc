#include "kernels/core/shape_check.h"
#include "kernels/cpu/cpu_ops.h"

namespace k3 {

void CpuOps::RmsNorm(const RmsNormParams& p, Stream) {
  CheckMatrix("RmsNorm", "x", p.x, p.x.rows, p.x.cols, DType::kF32);
  CheckMatrix("RmsNorm", "out", p.out, p.x.rows, p.x.cols, DType::kF32);
  CheckPointer("RmsNorm", "weight", p.weight);
  ForRows(p.x.rows, 2 * p.x.cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      kernels_.rms_norm(p.x.as<float>() + t * p.x.ld, p.weight, p.eps, p.x.cols, p.out.as<float>() + t * p.out.ld);
    }
  });
}

void CpuOps::AddRmsNorm(const AddRmsNormParams& p, Stream) {
  const int64_t rows = p.stream.rows, cols = p.stream.cols;
  CheckMatrix("AddRmsNorm", "stream", p.stream, rows, cols, DType::kF32);
  if (p.delta) CheckMatrix("AddRmsNorm", "delta", p.delta, rows, cols, DType::kF32);
  CheckMatrix("AddRmsNorm", "out", p.out, rows, cols, DType::kF32);
  CheckPointer("AddRmsNorm", "weight", p.weight);
  ForRows(rows, 3 * cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* stream = p.stream.as<float>() + t * p.stream.ld;
      if (p.delta) kernels_.add(stream, p.delta.as<float>() + t * p.delta.ld, cols);
      kernels_.rms_norm(stream, p.weight, p.eps, cols, p.out.as<float>() + t * p.out.ld);
    }
  });
}

}  // namespace k3
