#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/expert_balance.h"
#include "engine/model/model.h"
#include "engine/step.h"
#include "engine/step_inputs.h"
#include "kernels/profiled_ops.h"

namespace k3 {

struct ExecutorOptions {
  // Decode steps are padded to the next of these sizes (ascending), and captured where the device can. Empty: none.
  std::vector<int32_t> decode_sizes;
  bool capture = true;  // false: padded, but launched op by op
  // The model's Ops where its ops are to be measured: while it is active, steps are launched op by op, one at a time.
  ProfiledOps* profile = nullptr;
  // Of experts over ranks. Without it experts are chosen exactly and not counted.
  std::optional<BalanceOptions> balance;
  std::function<void(const ProfiledOps&)> on_profile;  // it has seen its last step, or was stopped behind one
};

// What Executor::WarmUp did, for the start report.
struct WarmUpReport {
  double seconds = 0;
  int64_t bytes = 0;  // device memory that it took
  int32_t graphs = 0;
  int32_t smallest = 0;  // sizes of the first and the last
  int32_t largest = 0;
  int64_t nodes = 0;  // of all graphs
};

// Device time of the steps that were waited for.
struct StepTimes {
  uint64_t steps = 0;
  double busy_ms = 0;  // from a step's first operation to its last
  double idle_ms = 0;  // between the last operation of a step and the first of the next
};

// Runs one rank's share of each step on its device (with several ranks: the part of its data-parallel group, together
// with the executors of all other ranks, see rank_group.h): one upload, zeroing and copies of slots and pages, forward
// pass with snapshots in passing, sampling, one download. Submit puts all that on the stream and returns; Wait waits
// for that step alone. Owns the rank's workspace and cache memory. Called from the engine thread; knows nothing of
// requests.
class Executor : public StepRunner {
 public:
  // RESOURCE_EXHAUSTED with the sizes when workspace or pools do not fit. `model` and `ops` must outlive it.
  static absl::StatusOr<std::unique_ptr<Executor>> Create(const Model& model, Ops& ops, const StepBounds& bounds,
                                                          const CacheGeometry& geometry, ExecutorOptions options = {});
  ~Executor() override;

  // Batch sizes worth a graph of their own, up to the most sequences of a step.
  static std::vector<int32_t> DecodeSizes(int64_t most_sequences);

  // Device memory for the inputs and results of steps, beside workspace and pools.
  static size_t StagingBytes(int64_t vocab_size, const StepBounds& bounds, int32_t page_size,
                             const std::vector<int32_t>& decode_sizes);

  // Runs a largest step and a step of every decode size, all padding, and captures the latter. Touches no page and no
  // slot. Before the first step.
  absl::StatusOr<WarmUpReport> WarmUp();

  int max_in_flight() const override {
    const bool one_by_one = ops_.is_cpu() || (options_.profile != nullptr && options_.profile->one_by_one());
    return one_by_one ? 1 : kFlights;
  }
  absl::Status Submit(const StepPlan& plan) override;
  absl::Status Wait(StepResult* result) override;
  absl::Status Run(const StepPlan& plan, StepResult* result) override;
  void Scrub(int32_t rank, const std::vector<PageId>& pages, const std::vector<StateSlot>& slots) override;
  int32_t vocab_size() const override { return static_cast<int32_t>(model_.config().vocab_size); }

  CacheStorage& cache() { return cache_; }
  Workspace& workspace() { return workspace_; }
  const StepTimes& times() const { return times_; }
  const ExpertBalance* balance() const { return balance_.get(); }

 private:
  static constexpr int kFlights = 2;
  static constexpr int kMarks = kFlights + 1;  // the end of the step before the oldest flight is still of use

  // A device buffer, with a host twin for each step in flight.
  struct Staging {
    void* host[kFlights] = {};
    void* device = nullptr;
    size_t capacity = 0;
  };
  struct StagingSizes {
    size_t input = 0;
    size_t output = 0;
    size_t decode_input = 0;
    size_t decode_table = 0;
    int32_t largest_decode = 0;  // 0: no decode steps of fixed size
  };
  struct Flight {
    size_t rows = 0;  // of sampling
    size_t top = 0;   // log-probabilities wanted a row
    // Layout of the output block: arrays for so many rows, with so many best log-probabilities a row.
    size_t out_rows = 0;
    size_t out_top = 0;
    bool balance_update = false;  // what the routers counted comes with it
  };
  struct DecodeSize {
    PaddedInputs inputs;
    std::unique_ptr<CapturedWork> work;
  };

  Executor(const Model& model, Ops& ops, const StepBounds& bounds, const CacheGeometry& geometry,
           ExecutorOptions options);
  static StagingSizes Sizes(int64_t vocab_size, const StepBounds& bounds, int32_t page_size,
                            const std::vector<int32_t>& decode_sizes);
  bool profiling() const { return options_.profile != nullptr && options_.profile->active(); }
  void Reserve(Staging& staging, size_t bytes);
  void Free(Staging& staging);
  void SubmitRank(const StepPlan& step, int place, Flight* flight);
  // Has what the step's routers counted fetched when an update is due.
  void CountStep(const StepPlan& step, int place, Flight* flight);
  // The padded form that all groups' parts of a step have; null when one of them has none. Every rank decides alike.
  const DecodeSize* CommonSize(const StepPlan& step) const;
  void SubmitDecode(const RankPlan& plan, const DecodeSize& size, int place, Flight* flight);
  void RunDecode(const DecodeSize& size);
  // Draws rows [first, end) of `rows`.
  void Sample(const DeviceInputs& in, const MatrixView& hidden, size_t first, size_t end, size_t rows, size_t top);
  // Draws all rows of a plan whose edits and masks did not fit behind its other `used` bytes: they are uploaded in
  // several passes, each of which waits for the one before.
  void SampleInPasses(const RankPlan& plan, DeviceInputs in, const MatrixView& hidden, int place, size_t used);
  void Unpack(const Flight& flight, const char* host, RankResult* result) const;
  void DoWarmUp(WarmUpReport* report);

  const Model& model_;
  Ops& ops_;
  const ExecutorOptions options_;
  Workspace workspace_;
  CacheStorage cache_;
  Staging input_;
  Staging output_;  // tokens first, where the next step finds them
  // Decode steps have blocks of their own that never move.
  Staging decode_input_;
  int32_t* decode_table_ = nullptr;  // [largest size, pages of the longest sequence]
  int64_t table_stride_ = 0;
  std::vector<DecodeSize> decode_sizes_;  // ascending
  std::unique_ptr<ExpertBalance> balance_;

  Flight flights_[kFlights];
  Event begun_[kMarks] = {};
  Event ended_[kMarks] = {};
  uint64_t submitted_ = 0;
  uint64_t waited_ = 0;
  StepTimes times_;
};

}  // namespace k3
