#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "engine/admission_queue.h"
#include "engine/cache/cache_manager.h"
#include "engine/engine_config.h"
#include "engine/engine_interface.h"
#include "engine/engine_observer.h"
#include "engine/epoch_slots.h"
#include "engine/sequence.h"
#include "engine/step.h"

namespace k3 {

// Decides what runs: PlanStep proposes the next step, CommitStep takes its results over. Cancels that arrive between
// the two are applied when the step is committed. Host only; time comes in as an argument. Not thread-safe: the engine
// thread's.
//
// While one step is open the next may be planned (CanPlanAhead). It sees every sequence as the open step will leave it:
// further computed, and one token longer where it draws, whose id is still unknown. What the commit then finds out may
// end a sequence that is already planned again: the results of that row are dropped, and what the sequence held is free
// at once, because whoever gets it writes it in a step that runs later.
//
// A step holds at most max_num_batched_tokens tokens per rank. Order of claims: every running decode (one token each);
// the oldest prefill, up to half of what is left while others wait; running short prefills, fewest tokens first;
// preempted sequences, oldest first, then the admission queue; the other long prefills; and what is then left goes to
// the oldest prefill. No sequence gets more than prefill_chunk.
//
// A sequence is admitted when its whole prompt fits beside what the admitted ones still need, so prompts do not push
// each other out. Decodes may outgrow the pool: then the newest sequence gives up its pages and is recomputed later.
// The oldest is never the victim of another, and alone it fits (CheckRequest), so somebody always advances.
class Scheduler {
 public:
  // `config` is resolved. `observer` may be null and must outlive the scheduler.
  explicit Scheduler(const EngineConfig& config, EngineObserver* observer = nullptr);
  ~Scheduler();

  // Takes over a request that CheckRequest accepts.
  void Submit(RequestId id, std::unique_ptr<Request> request, Clock::time_point arrival);
  // Ends a request with `why`; unknown and ended ids are ignored.
  void Cancel(RequestId id, const absl::Status& why, Clock::time_point now);
  // Ends one choice with kStop.
  void StopChoice(RequestId id, int32_t choice, Clock::time_point now);
  // Ends everything, after a fault.
  void FailAll(const absl::Status& why, Clock::time_point now);
  void FlushCache();

  // Fills `plan`. False when there is nothing to run. Ends requests whose deadline has passed. At most two steps may be
  // open; they are committed in the order in which they were planned.
  bool PlanStep(Clock::time_point now, StepPlan* plan);
  // Whether PlanStep may be called although a step is open: nothing in that step decides what can be planned next. A
  // grammar or a penalty needs the token, and a prompt of several choices is about to fork.
  bool CanPlanAhead() const;
  void CommitStep(const StepPlan& plan, const StepResult& result, Clock::time_point now);

  // What CommitStep found to be poisoned, per rank: to be overwritten before the next plan.
  struct Scrub {
    std::vector<PageId> pages;
    std::vector<StateSlot> slots;
    bool empty() const { return pages.empty() && slots.empty(); }
  };
  // Moves it out; `scrub` is one entry per rank.
  bool TakeScrub(std::vector<Scrub>* scrub);

  bool HasWork() const { return !requests_.empty(); }
  // The next deadline of a live request, if there is one.
  std::optional<Clock::time_point> NextDeadline() const;

  struct Backlog {
    int64_t prompt_tokens = 0;  // not yet computed, of all accepted requests
    int32_t queued = 0;         // requests waiting for their first admission
    bool full = false;          // the last plan held a waiting request back for want of pages, slots or sequences
    uint64_t finished = 0;      // requests ended since start
  };
  Backlog backlog() const;
  // Everything but time and health.
  void FillLoad(EngineLoad* load) const;
  uint64_t fingerprint_mismatches() const;

  const EngineConfig& config() const { return config_; }
  int32_t ranks() const { return static_cast<int32_t>(ranks_.size()); }
  CacheManager& cache(int32_t rank) { return ranks_[static_cast<size_t>(rank)].cache; }
  // Aborts on a broken invariant. Between steps only; slow.
  void CheckInvariants() const;

 private:
  enum class RowKind : uint8_t { kDraw, kPromptScore };
  struct Row {
    Sequence* sequence;
    RowKind kind;
    int32_t index;  // kPromptScore: the prompt token that is scored; kDraw: where the token goes
  };
  struct Scheduled {
    Sequence* sequence;
    uint32_t lease = 0;  // Sequence::leases when it was planned
    int32_t begin = 0;   // the step computes its tokens [begin, end)
    int32_t end = 0;
    int32_t row_begin = 0;  // its slice of the rank's rows
    int32_t row_end = 0;
  };
  // One rank's part of a step that is open or being planned.
  struct RankStep {
    std::vector<Scheduled> scheduled;
    std::vector<Row> rows;  // as RankPlan::sample_rows
  };
  static constexpr size_t kMostOpen = 2;
  struct Rank {
    explicit Rank(const EngineConfig& config) : cache(config) {}
    CacheManager cache;
    EpochSlots epochs;
    RankRouting routing;             // of its last update
    std::vector<Sequence*> running;  // by admission, oldest first
    RankStep steps[kMostOpen];       // by step number
    // Of the step being planned.
    RankStep* step = nullptr;
    int32_t budget = 0;
    bool preempted = false;   // nobody is admitted in a step that took pages away from somebody
    int64_t outstanding = 0;  // pages that admitted sequences still need for the tokens they have
    int32_t long_prefills = 0;
    Scrub scrub;
  };
  struct Deferred {
    RequestId id;
    int32_t choice;  // -1: cancel the request with `why`
    absl::Status why;
  };
  static constexpr RequestId kFirstShadowId = RequestId{1} << 63;  // beyond all that Submit is given
  // Seed of the draw that picks the hits to verify.
  static constexpr uint64_t kHitCheckSeed = 0x6b335f68697473;

  using DeadlineEntry = std::pair<Clock::time_point, RequestId>;

  // --- scheduler.cc: requests come and go ---
  bool step_open() const { return planned_ > committed_; }
  void CancelNow(RequestId id, const absl::Status& why, Clock::time_point now);
  void StopChoiceNow(RequestId id, int32_t choice, Clock::time_point now);
  LiveRequest* Find(RequestId id);
  // Leaves the admission queue, one way or the other.
  void Dequeue(LiveRequest& live, bool admitted);
  void ExpireDeadlines(Clock::time_point now);
  void FinishChoice(Sequence& sequence, FinishReason reason, int32_t stop_token, Clock::time_point now);
  // `condemn`: what it computed is not to be trusted.
  void FinishRequest(LiveRequest& live, const absl::Status& status, Clock::time_point now, bool condemn = false);
  // Takes a sequence out of whatever list its phase keeps it in and gives up its lease.
  void Detach(Sequence& sequence, bool condemn);
  // Passes the prompt's lease, or the duty to compute it, to another open choice. False when nobody needs it.
  bool HandOver(Sequence& from);
  void SetPhase(Sequence& sequence, SequencePhase phase);
  void BuryDead();

  // --- scheduler_plan.cc ---
  void ForkChoices(StepPlan* plan);
  void PlanDecodes(Rank& rank, RankPlan* plan);
  void PlanPrefills(Clock::time_point now, StepPlan* plan);
  void Admit(Clock::time_point now, StepPlan* plan);
  // Counts what keeps the next candidate waiting.
  void NoteHeldBack();
  // Where a sequence would go on: the rank with the longest resume point, and what that one has cached of the prefix.
  struct Placement {
    Rank* rank = nullptr;  // null: none has room
    PrefixMatch match;
    int64_t needed_pages = 0;  // for the whole text
  };
  // Whether its prefix may be looked up in the cache.
  bool MayMatch(const LiveRequest& live) const;
  Placement Place(const Sequence& sequence, bool obey_long_limit);
  bool TryAdmit(Sequence& sequence, bool obey_long_limit, Clock::time_point now, StepPlan* plan);
  // Takes what the placement found for the sequence, zeroed or restored by the step that is planned.
  void TakeLease(const Placement& placement, Sequence& sequence, StepPlan* plan);
  // From queue or preempted to running.
  void EnterRunning(Rank& rank, Sequence& sequence);
  // The first admission of a request: its figures and its sink.
  void NoteAdmitted(LiveRequest& live, const Sequence& sequence, int32_t matched_tokens, Clock::time_point now);
  void Requeue(Sequence& sequence);
  void Preempt(Rank& rank, Sequence& victim, RankPlan* plan);
  bool EnsurePages(Rank& rank, Sequence& sequence, int64_t tokens, RankPlan* plan);
  bool IsLong(const Sequence& sequence) const { return sequence.remaining() > config_.long_prompt_tokens; }
  // How many of `more` tokens behind `from` a prompt may get: all that is left, or a cut where cuts are allowed.
  int32_t CutPrefill(const Sequence& sequence, int64_t from, int64_t more) const;
  // Gives a prefill up to `most` tokens of the budget, as far as pages can be had.
  void PlanChunk(Rank& rank, Sequence& sequence, int32_t most, RankPlan* plan);

  // --- scheduler_routing.cc ---
  void PinEpoch(LiveRequest& live, int32_t rank, int32_t slot);
  void UnpinEpoch(LiveRequest& live);
  // Takes over what an update of a rank's balance of experts has given.
  void NoteRouting(Rank& rank, const RankRouting& routing);
  void FillRouting(RoutingLoad* load) const;

  // --- scheduler_emit.cc ---
  void Emit(Rank& rank, RankPlan* plan);
  void EmitRows(Rank& rank, Sequence& sequence, int32_t begin, RankPlan* plan);
  void EmitSnapshots(Rank& rank, Sequence& sequence, int32_t begin, RankPlan* plan);
  // Whether what this sequence draws must be known before the next step can be planned.
  static bool NeedsToken(const Sequence& sequence);

  // --- scheduler_commit.cc ---
  void CommitSequence(Rank& rank, const Scheduled& entry, const RankPlan& plan, const RankResult& result,
                      Clock::time_point now);
  void AcceptToken(const Row& row, size_t index, const RankPlan& plan, const RankResult& result, Clock::time_point now);
  // Queues a recomputation of `live`'s prompt from scratch, to be compared with what its prefix hit gave.
  void VerifyHit(const LiveRequest& live, const HitCheck& expected);
  // Valid until the next call.
  TokenLogprob LogprobOf(size_t row, const RankPlan& plan, const RankResult& result);

  EngineConfig config_;
  EngineObserver* observer_;
  std::vector<Rank> ranks_;
  AdmissionQueue queue_;
  std::vector<Sequence*> preempted_;  // by admission, oldest first
  std::vector<RequestId> forking_;    // requests with choices in kForking
  absl::flat_hash_map<RequestId, std::unique_ptr<LiveRequest>> requests_;
  struct Dead {
    uint64_t step;  // the newest step that may point to it
    std::unique_ptr<LiveRequest> live;
  };
  std::vector<Dead> dead_;                // ended, but an open step may still point to them
  std::vector<DeadlineEntry> deadlines_;  // min-heap; entries of ended requests leave when they come up or are too many
  std::vector<Deferred> deferred_;
  uint64_t planned_ = 0;  // steps so far; planned_ - committed_ are open
  uint64_t committed_ = 0;
  bool ahead_ = false;  // the newest step allows the next to be planned before its commit
  bool committing_ = false;

  int32_t most_running_ = 0;  // sequences with a lease, over all ranks
  int32_t running_ = 0;
  int32_t running_requests_ = 0;
  int32_t shadows_ = 0;  // live recomputations of verified hits
  int32_t queued_shadows_ = 0;
  bool held_back_ = false;
  uint64_t next_shadow_ = 0;
  uint64_t next_admission_ = 1;
  int64_t backlog_tokens_ = 0;
  uint64_t finished_ = 0;
  // A candidate for which pages or slots were missing is not tried again before something changed in its favour.
  const Sequence* blocked_ = nullptr;
  uint64_t blocked_epoch_ = 0;

  EngineLoad counters_;
  // Scratch of PlanPrefills and others, kept for their capacity.
  std::vector<Sequence*> prefills_;
  std::vector<Sequence*> long_prefills_;
  std::vector<std::pair<Rank*, Sequence*>> oldest_prefills_;
  std::vector<TopLogprob> top_scratch_;
  std::vector<int32_t> snapshot_scratch_;
  std::vector<uint64_t> choices_scratch_;
};

}  // namespace k3
