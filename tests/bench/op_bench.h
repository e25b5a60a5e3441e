#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/convert.h"
#include "kernels/ops.h"
#include "tests/bench/result_file.h"

// How an op of the CUDA backend is timed: inputs on the device, several sets of them in rotation, graphs of many calls.
namespace k3 {

// Device memory of one case, freed with it. Values come from the device's own generator.
class Arena {
 public:
  explicit Arena(Ops& ops) : ops_(ops), queue_(static_cast<cudaStream_t>(ops.stream())) {}
  ~Arena() {
    ops_.Synchronize(ops_.stream());
    for (void* block : blocks_) ops_.Free(block);
  }
  void* Bytes(int64_t bytes) {
    blocks_.push_back(ops_.Allocate(static_cast<size_t>(bytes)));
    return blocks_.back();
  }
  MatrixView Matrix(int64_t rows, int64_t cols, float deviation = 1, DType type = DType::kBF16) {
    void* data = Bytes(rows * cols * static_cast<int64_t>(SizeOf(type)));
    cuda::FillNormal(data, type, rows * cols, deviation, ++seed_, queue_);
    return {data, type, rows, cols, cols};
  }
  const float* Vector(int64_t count, float deviation = 1) {
    return Matrix(1, count, deviation, DType::kF32).as<const float>();
  }
  template <typename T>
  T* Array(const std::vector<T>& values) {
    auto* data = static_cast<T*>(Bytes(static_cast<int64_t>(values.size() * sizeof(T)) + 16));
    ops_.CopyToDevice(data, values.data(), values.size() * sizeof(T), ops_.stream());
    ops_.Synchronize(ops_.stream());
    return data;
  }

 private:
  Ops& ops_;
  cudaStream_t queue_;
  uint64_t seed_ = 0;
  std::vector<void*> blocks_;
};

// A large product that starts from a rested card runs at full clocks for some 50 ms, then the power limit lowers them
// by a quarter, and they stay low for seconds. So a row, like the ceilings, starts from a rested card and ends before
// that, unless it is one of hundreds or shows what is left after a second of work: medians over longer times were those
// of one state or the other, as it fell out.
struct Timing {
  double budget = 0.03;  // seconds, about; five replays of what is longer
  bool rested = true;
  double warm = 0;  // seconds of replays before
};
constexpr Timing kOfHundreds = {.budget = 0.015, .rested = false};
constexpr Timing kSustained = {.budget = 0.15, .rested = false, .warm = 1};

// Times ops, prints and keeps the figures.
class Bench {
 public:
  // `filter`: of a figure's name, any part of it.
  Bench(Ops& ops, std::string filter);
  ~Bench();

  Ops& ops() { return ops_; }
  bool Wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }
  const std::vector<bench::Result>& results() const { return results_; }

  // Seconds of one call of `run`, median of the replays of a graph of many calls. The calls are run(0 .. sets - 1) in
  // turn, for 2 ms or 64 calls, all sets once at least.
  double Time(int sets, const std::function<void(int)>& run, const Timing& timing = {});

  // The device's copy and matrix product speeds of this run, which every figure is reported beside.
  void Ceilings();

  // A figure whose value is `value`; its floor from `bytes` at the copy speed, 0 when there is none.
  void Report(const std::string& name, double value, const char* unit, double seconds, double bytes);

 private:
  cudaGraphExec_t Capture(int calls, int sets, const std::function<void(int)>& run);
  double Replay(cudaGraphExec_t graph);  // seconds

  Ops& ops_;
  std::string filter_;
  cudaStream_t queue_;
  cudaEvent_t begin_, end_;
  double copy_ = 1, gemm_ = 1;
  std::vector<bench::Result> results_;
};

// The sequences of a step on the device, with identity pages and slots.
struct Batch {
  std::vector<int32_t> begin{0}, context;
  SequenceBatch view;

  Batch(Arena& arena, const std::vector<int32_t>& tokens, int32_t context_tokens, int32_t first_slot, int32_t page_size,
        int32_t first_page)
      : Batch(arena, tokens, std::vector<int32_t>(tokens.size(), context_tokens), first_slot, page_size, first_page) {}
  Batch(Arena& arena, const std::vector<int32_t>& tokens, const std::vector<int32_t>& contexts, int32_t first_slot,
        int32_t page_size, int32_t first_page);
};

// Sets of inputs of so many bytes that together exceed the cache, 64 at most.
int Sets(double bytes_each);

}  // namespace k3
