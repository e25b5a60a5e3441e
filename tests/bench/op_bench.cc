#include "tests/bench/op_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <thread>
#include <utility>

#include "kernels/cuda/device.h"
#include "tests/bench/device_ceilings.h"

namespace k3 {
namespace {

constexpr double kL2Bytes = 200e6;      // inputs in rotation exceed the cache by this much
constexpr double kGraphSeconds = 2e-3;  // a graph's start takes 3 to 6 us, which are not the kernel's
constexpr int kGraphCalls = 64;

}  // namespace

Bench::Bench(Ops& ops, std::string filter)
    : ops_(ops), filter_(std::move(filter)), queue_(static_cast<cudaStream_t>(ops.stream())) {
  K3_CUDA(cudaEventCreate(&begin_));
  K3_CUDA(cudaEventCreate(&end_));
}

Bench::~Bench() {
  cudaEventDestroy(begin_);
  cudaEventDestroy(end_);
}

double Bench::Time(int sets, const std::function<void(int)>& run, const Timing& timing) {
  run(0);  // loads modules and chooses algorithms
  K3_CUDA(cudaStreamSynchronize(queue_));
  int calls = sets;
  cudaGraphExec_t graph = Capture(calls, sets, run);
  Replay(graph);
  double first = Replay(graph);
  const int rounds = std::min(static_cast<int>(kGraphSeconds / first), kGraphCalls / sets);
  if (rounds > 1) {
    K3_CUDA(cudaGraphExecDestroy(graph));
    calls = sets * rounds;
    graph = Capture(calls, sets, run);
    first = Replay(graph);
  }
  if (timing.rested) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    for (int i = 0; i < 5; ++i) Replay(graph);
  }
  for (double warm = 0; warm < timing.warm;) warm += Replay(graph);
  std::vector<double> times;
  const int repeats = std::clamp(static_cast<int>(timing.budget / first), 5, 60);
  for (int i = 0; i < repeats; ++i) times.push_back(Replay(graph));
  std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
  K3_CUDA(cudaGraphExecDestroy(graph));
  if (timing.warm > 0) std::this_thread::sleep_for(std::chrono::seconds(5));  // for the next row's clocks
  return times[static_cast<size_t>(repeats / 2)] / calls;
}

void Bench::Ceilings() {
  const bench::Ceilings ceilings =
      bench::MeasureCeilings(ops_, [&](const std::function<void()>& run) { return Time(1, [&](int) { run(); }); });
  copy_ = ceilings.copy;
  gemm_ = ceilings.gemm;
  std::printf("copy %.2f TB/s, bf16 product 8192^3 %.0f TFLOP/s\n", copy_ * 1e-12, gemm_ * 1e-12);
  std::printf("%-36s %12s %-8s %10s\n", "name", "value", "unit", "of floor");
}

void Bench::Report(const std::string& name, double value, const char* unit, double seconds, double bytes) {
  bench::Result result;
  result.name = name;
  result.value = value;
  result.unit = unit;
  if (bytes > 0) result.floor_ratio = seconds / (bytes / copy_);
  result.copy_TBps = copy_ * 1e-12;
  result.gemm_TFLOPs = gemm_ * 1e-12;
  results_.push_back(result);
  std::printf("%-36s %12.3f %-8s %10.2f\n", name.c_str(), value, unit, result.floor_ratio.value_or(0));
  std::fflush(stdout);
}

cudaGraphExec_t Bench::Capture(int calls, int sets, const std::function<void(int)>& run) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  K3_CUDA(cudaStreamBeginCapture(queue_, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) run(i % sets);
  K3_CUDA(cudaStreamEndCapture(queue_, &graph));
  K3_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  K3_CUDA(cudaGraphDestroy(graph));
  return executable;
}

double Bench::Replay(cudaGraphExec_t graph) {
  K3_CUDA(cudaEventRecord(begin_, queue_));
  K3_CUDA(cudaGraphLaunch(graph, queue_));
  K3_CUDA(cudaEventRecord(end_, queue_));
  K3_CUDA(cudaEventSynchronize(end_));
  float ms = 0;
  K3_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
  return ms * 1e-3;
}

Batch::Batch(Arena& arena, const std::vector<int32_t>& tokens, const std::vector<int32_t>& contexts, int32_t first_slot,
             int32_t page_size, int32_t first_page)
    : context(contexts) {
  std::vector<int32_t> slots, sequence_of_token, position, pages;
  const int32_t pages_each = (*std::max_element(contexts.begin(), contexts.end()) +
                              *std::max_element(tokens.begin(), tokens.end()) + page_size - 1) /
                             page_size;
  for (size_t s = 0; s < tokens.size(); ++s) {
    const int32_t context_tokens = contexts[s], own_pages = (context_tokens + tokens[s] + page_size - 1) / page_size;
    begin.push_back(begin.back() + tokens[s]);
    slots.push_back(first_slot + static_cast<int32_t>(s));
    for (int32_t t = 0; t < tokens[s]; ++t) {
      sequence_of_token.push_back(static_cast<int32_t>(s));
      position.push_back(context_tokens + t);
    }
    for (int32_t p = 0; p < pages_each; ++p) pages.push_back(p < own_pages ? first_page + p : -1);
    first_page += own_pages;
  }
  view.num_tokens = begin.back();
  view.num_sequences = static_cast<int32_t>(tokens.size());
  view.token_begin = arena.Array(begin);
  view.context = arena.Array(context);
  view.state_slot = arena.Array(slots);
  view.page_table = arena.Array(pages);
  view.page_table_stride = pages_each;
  view.sequence_of_token = arena.Array(sequence_of_token);
  view.position = arena.Array(position);
  view.host_token_begin = begin.data();
  view.host_context = context.data();
}

int Sets(double bytes_each) { return std::clamp(static_cast<int>(std::ceil(kL2Bytes / bytes_each)), 1, 64); }

}  // namespace k3
