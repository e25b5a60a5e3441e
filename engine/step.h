#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "engine/cache/ids.h"
#include "kernels/op_params.h"

// What one step does, as plain data: made by Scheduler::PlanStep, run by a StepRunner, read by Scheduler::CommitStep.
namespace k3 {

struct StateCopy {
  StateSlot from;
  StateSlot to;
};

struct PageCopy {
  PageId from;
  PageId to;
};

struct SnapshotPoint {
  int32_t row = 0;  // packed row: the state after this token
  StateSlot slot;
};

// Bias epochs that are alive on a rank at once (see quantile_control.h); slot 0 is epoch 0.
constexpr int32_t kEpochSlots = 8;

// An epoch that the rank has made goes into a slot of its table before the step runs.
struct EpochUpload {
  uint64_t number = 0;
  int64_t slot = 0;
};

// A token id of a plan that stands for the token drawn by row `row` of the step submitted just before.
constexpr int32_t TokenOfRow(int32_t row) { return -1 - row; }
// The same function takes it back.
constexpr int32_t RowOfToken(int32_t token) { return -1 - token; }

// One rank's share of a step. Every id in it is reserved. Arrays named as in SequenceBatch have its meaning.
// Order of execution: zero_slots, state_copies, page_copies, forward (snapshots in passing), sampling.
struct RankPlan {
  std::vector<StateSlot> zero_slots;
  std::vector<StateCopy> state_copies;  // restores from snapshots, forks of choices
  std::vector<PageCopy> page_copies;    // forks of choices: the partly filled last page

  // [T]. Where the id is not known yet because the step before has not been committed: TokenOfRow(r), which stands for
  // what row r of that step's sample_rows (of the same rank) has drawn.
  std::vector<int32_t> tokens;
  std::vector<int32_t> token_begin;  // [S + 1]; empty when S = 0
  std::vector<int32_t> context;      // [S]
  std::vector<int32_t> state_slot;   // [S]
  std::vector<int32_t> page_table;   // [S, page_table_stride]
  int32_t page_table_stride = 0;
  std::vector<int32_t> sequence_of_token;  // [T]
  std::vector<int32_t> position;           // [T]
  std::vector<SnapshotPoint> snapshots;    // ascending rows
  std::vector<EpochUpload> epoch_uploads;
  std::vector<int32_t> epoch_slot;  // [S] the bias that a sequence's experts are chosen under; empty: none

  std::vector<int32_t> logits_row;     // [R] packed rows whose logits are needed
  std::vector<SampleRow> sample_rows;  // [R]
  std::vector<LogitEdit> logit_edits;
  std::vector<uint32_t> allowed_mask;  // [mask rows, ceil(V/32)]
  int32_t max_top_logprobs = 0;

  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  int32_t num_sequences() const { return static_cast<int32_t>(context.size()); }
  bool empty() const { return tokens.empty() && state_copies.empty() && page_copies.empty() && zero_slots.empty(); }
  void Clear();  // keeps capacity; page_table also keeps its size, the planner sets it
};

// What has come of an update of the rank's balance of experts, where the step ended with one.
struct RankRouting {
  uint8_t updated = 0;
  int32_t groups = 0;
  std::vector<uint32_t> load;  // [MoE layers, groups] choices since the last update
  uint64_t swaps = 0;          // of the soft cap since then
  uint64_t newest_epoch = 0;
  double override_share = 0;  // over all layers, in the control's window
  double worst_override_share = 0;
  double mean_delta = 0;
  uint64_t sign_changes = 0;  // these four since the start
  uint64_t halvings = 0;
  uint64_t alarms = 0;
  uint64_t dampings = 0;
};

struct RankResult {
  std::vector<int32_t> token;        // [R], -1 where none
  std::vector<SampleStatus> status;  // [R]
  std::vector<float> logprob;        // [R]
  std::vector<int32_t> top_ids;      // [R, max_top_logprobs]
  std::vector<float> top_logprobs;   // [R, max_top_logprobs]
  RankRouting routing;
};

struct StepPlan {
  std::vector<RankPlan> ranks;  // one per data-parallel rank, idle ones included
};

struct StepResult {
  std::vector<RankResult> ranks;
};

// Runs steps: the Executor over a model, or a fake in tests. Called from the engine thread only.
//
// Steps are submitted and then waited for, in order. What is submitted later happens later on the device, so ids that
// were released after a step was submitted may be given away again at once. A runner that can hold two steps works on
// one while the next is planned; others do everything in Wait. Not OK, from any call, means that the device is lost: no
// later step can run.
class StepRunner {
 public:
  virtual ~StepRunner() = default;
  // How many submitted steps may be waiting for their Wait: 1 or 2.
  virtual int max_in_flight() const { return 1; }
  // Starts a step. `plan` stays as it is until the step was waited for or a call has failed. Its tokens may be
  // TokenOfRow only when another step was submitted before.
  virtual absl::Status Submit(const StepPlan& plan) {
    submitted_ = &plan;
    return absl::OkStatus();
  }
  // The results of the oldest step that was not yet waited for.
  virtual absl::Status Wait(StepResult* result) { return Run(*submitted_, result); }
  // Both at once, with no other step in flight.
  virtual absl::Status Run(const StepPlan& plan, StepResult* result) = 0;
  // Overwrites pages and slots of one rank whose contents must not be read again (after a non-finite row), behind all
  // steps submitted so far.
  virtual void Scrub(int32_t rank, const std::vector<PageId>& pages, const std::vector<StateSlot>& slots) = 0;
  virtual int32_t vocab_size() const = 0;

 private:
  const StepPlan* submitted_ = nullptr;
};

}  // namespace k3
