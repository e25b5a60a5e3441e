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

// One rank's share of a step. Every id in it is reserved. Arrays named as in SequenceBatch have its meaning.
// Order of execution: zero_slots, state_copies, page_copies, forward (snapshots in passing), sampling.
struct RankPlan {
  std::vector<StateSlot> zero_slots;
  std::vector<StateCopy> state_copies;  // restores from snapshots, forks of choices
  std::vector<PageCopy> page_copies;    // forks of choices: the partly filled last page

  std::vector<int32_t> tokens;       // [T]
  std::vector<int32_t> token_begin;  // [S + 1]; empty when S = 0
  std::vector<int32_t> context;      // [S]
  std::vector<int32_t> state_slot;   // [S]
  std::vector<int32_t> page_table;   // [S, page_table_stride]
  int32_t page_table_stride = 0;
  std::vector<int32_t> sequence_of_token;  // [T]
  std::vector<int32_t> position;           // [T]
  std::vector<SnapshotPoint> snapshots;    // ascending rows

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

struct RankResult {
  std::vector<int32_t> token;        // [R], -1 where none
  std::vector<SampleStatus> status;  // [R]
  std::vector<float> logprob;        // [R]
  std::vector<int32_t> top_ids;      // [R, max_top_logprobs]
  std::vector<float> top_logprobs;   // [R, max_top_logprobs]
};

struct StepPlan {
  std::vector<RankPlan> ranks;  // one per data-parallel rank, idle ones included
};

struct StepResult {
  std::vector<RankResult> ranks;
};

// Runs steps: the Executor over a model, or a fake in tests. One step at a time, from the engine thread.
class StepRunner {
 public:
  virtual ~StepRunner() = default;
  // Not OK means the device is lost: no later step can run.
  virtual absl::Status Run(const StepPlan& plan, StepResult* result) = 0;
  // Overwrites pages and slots of one rank whose contents must not be read again (after a non-finite row). Between
  // steps only.
  virtual void Scrub(int32_t rank, const std::vector<PageId>& pages, const std::vector<StateSlot>& slots) = 0;
  virtual int32_t vocab_size() const = 0;
};

}  // namespace k3
