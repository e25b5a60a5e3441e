// Times of the CUDA backend's ops at the shapes of the performance goals, under their names, beside the copy and matrix
// product ceilings of the same run. Every figure is the median of many replays of a CUDA graph that runs the op over
// several sets of random inputs, together larger than the L2 cache where the op's own data is not.
//   cuda_bench [--filter TEXT] [--json FILE]
#include <cstring>
#include <memory>
#include <string>

#include "kernels/ops.h"
#include "tests/bench/op_bench.h"
#include "tests/bench/op_cases.h"
#include "tests/bench/result_file.h"

namespace k3 {
namespace {

int Main(int argc, char** argv) {
  std::string filter, json;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--filter") == 0) filter = argv[i + 1];
    if (std::strcmp(argv[i], "--json") == 0) json = argv[i + 1];
  }
  const std::unique_ptr<Ops> ops = MakeCudaOps();
  Bench bench(*ops, filter);
  bench.Ceilings();
  KdaCases(bench);
  MlaCases(bench);
  MoeCases(bench);
  AttnResCases(bench);
  NormCases(bench);
  SampleCases(bench);
  LinearCases(bench);
  bench::WriteResults(json, bench.results(), ops->device_name(), argc, argv);
  return 0;
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) { return k3::Main(argc, argv); }
