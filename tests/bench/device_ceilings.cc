#include "tests/bench/device_ceilings.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/cuda/convert.h"
#include "tests/bench/device_copy.h"

namespace k3::bench {
namespace {

double MedianByEvents(Ops& ops, const std::function<void()>& run) {
  const Event begin = ops.MakeEvent(), end = ops.MakeEvent();
  std::vector<double> seconds;
  for (int i = 0; i < 12; ++i) {
    ops.RecordEvent(begin, ops.stream());
    run();
    ops.RecordEvent(end, ops.stream());
    ops.WaitEvent(end);
    if (i > 0) seconds.push_back(ops.Milliseconds(begin, end) * 1e-3);
  }
  ops.FreeEvent(begin);
  ops.FreeEvent(end);
  std::nth_element(seconds.begin(), seconds.begin() + 5, seconds.end());
  return seconds[5];
}

}  // namespace

Ceilings MeasureCeilings(Ops& ops, const SecondsOf& seconds_of) {
  Ceilings ceilings;
  const auto queue = static_cast<cudaStream_t>(ops.stream());
  const int64_t bytes = int64_t{2} << 30;
  void *from = ops.Allocate(static_cast<size_t>(bytes)), *to = ops.Allocate(static_cast<size_t>(bytes));
  cuda::FillNormal(from, DType::kBF16, bytes / 2, 1, 1, queue);
  ceilings.copy = 2.0 * static_cast<double>(bytes) / seconds_of([&] { CopyByKernel(to, from, bytes, queue); });

  const int64_t n = 8192;
  HostTensor weight;
  weight.dtype = DType::kBF16;
  weight.shape = {n, n};
  weight.random_stddev = 1;
  const auto linear = ops.MakeLinear({&weight, 1});
  const MatrixView x{from, DType::kBF16, n, n, n}, y{to, DType::kBF16, n, n, n};
  const double flops = 2.0 * static_cast<double>(n) * n * n;
  ceilings.gemm = flops / seconds_of([&] { ops.Linear({x, linear.get(), y}, ops.stream()); });
  ops.Free(from);
  ops.Free(to);
  return ceilings;
}

Ceilings MeasureCeilings(Ops& ops) {
  return MeasureCeilings(ops, [&](const std::function<void()>& run) { return MedianByEvents(ops, run); });
}

}  // namespace k3::bench
