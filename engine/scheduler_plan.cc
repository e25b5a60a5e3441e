#include <algorithm>

#include "engine/scheduler.h"
#include "kernels/core/check.h"

// Scheduler::PlanStep: who computes how many tokens.
namespace k3 {
namespace {

// Entries of the page table for which room is reserved at once, at most: 16 MiB, touched only where used.
constexpr int64_t kReservedTableEntries = int64_t{4} << 20;

}  // namespace

bool Scheduler::PlanStep(Clock::time_point now, StepPlan* plan) {
  K3_CHECK(!step_open() || CanPlanAhead());
  // What an open step restores from may go: it is overwritten by this step or a later one. A deadline may be what lets
  // it go, and an eviction of this step what takes it.
  for (Rank& rank : ranks_) rank.cache.LetGoOfRestores();
  ExpireDeadlines(now);
  BuryDead();
  if (plan->ranks.size() != ranks_.size()) {
    plan->ranks.resize(ranks_.size());
    const int64_t entries = int64_t{most_running_} * config_.PagesFor(config_.max_model_len);
    for (RankPlan& rank : plan->ranks) {
      rank.page_table.reserve(static_cast<size_t>(std::min(entries, kReservedTableEntries)));
    }
  }
  for (size_t r = 0; r < ranks_.size(); ++r) {
    plan->ranks[r].Clear();
    ranks_[r].step = &ranks_[r].steps[planned_ % kMostOpen];
    ranks_[r].step->scheduled.clear();
    ranks_[r].step->rows.clear();
    ranks_[r].budget = config_.max_num_batched_tokens;
    ranks_[r].preempted = false;
    if (config_.bias_epochs) {
      EpochSlots& epochs = ranks_[r].epochs;
      epochs.Refresh();
      if (epochs.upload().has_value()) plan->ranks[r].epoch_uploads.push_back(*epochs.upload());
    }
  }
  held_back_ = false;
  if (!forking_.empty()) ForkChoices(plan);
  for (size_t r = 0; r < ranks_.size(); ++r) PlanDecodes(ranks_[r], &plan->ranks[r]);
  PlanPrefills(now, plan);
  bool any = false;
  ahead_ = true;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    Emit(ranks_[r], &plan->ranks[r]);
    any |= plan->ranks[r].num_tokens() > 0;
  }
  planned_ += any;
  if (any && config_.bias_epochs) {
    for (Rank& rank : ranks_) rank.epochs.Sent();
  }
  return any;
}

bool Scheduler::CanPlanAhead() const {
  // What was cancelled meanwhile shall not be planned again.
  return planned_ - committed_ < kMostOpen && ahead_ && deferred_.empty();
}

void Scheduler::ForkChoices(StepPlan* plan) {
  for (RequestId id : forking_) {
    LiveRequest* live = Find(id);
    if (live == nullptr) continue;
    Sequence* source = nullptr;
    for (Sequence& choice : live->choices) {
      if (choice.phase == SequencePhase::kRunning) source = &choice;
    }
    for (Sequence& choice : live->choices) {
      if (choice.phase != SequencePhase::kForking) continue;
      K3_CHECK(source != nullptr && source->computed == source->prompt_length);
      Rank& rank = ranks_[static_cast<size_t>(source->rank)];
      RankPlan& rank_plan = plan->ranks[static_cast<size_t>(source->rank)];
      choice.ReservePages(config_.page_size);
      if (running_ >= most_running_ || static_cast<int32_t>(rank.running.size()) >= rank.budget ||
          !rank.cache.Fork(source->lease, source->computed, &choice.lease, &rank_plan)) {
        Requeue(choice);
        continue;
      }
      choice.rank = source->rank;
      ++choice.leases;
      choice.computed = source->computed;
      choice.admission = next_admission_++;
      // Without a prefix cache nobody asked for the hashes.
      const size_t hashes =
          std::min(source->page_hashes.size(), static_cast<size_t>(choice.computed / config_.page_size));
      choice.page_hashes.assign(source->page_hashes.begin(), source->page_hashes.begin() + hashes);
      rank.running.push_back(&choice);
      SetPhase(choice, SequencePhase::kRunning);
    }
  }
  forking_.clear();
}

void Scheduler::Requeue(Sequence& sequence) {
  // Results that are still on their way will be dropped; the tokens are drawn again.
  sequence.tokens.resize(static_cast<size_t>(sequence.known()));
  sequence.unknown = 0;
  if (sequence.admission == 0) sequence.admission = next_admission_++;
  sequence.computed = 0;
  SetPhase(sequence, SequencePhase::kPreempted);
  const auto place = std::find_if(preempted_.begin(), preempted_.end(),
                                  [&](const Sequence* other) { return other->admission > sequence.admission; });
  preempted_.insert(place, &sequence);
}

void Scheduler::Preempt(Rank& rank, Sequence& victim, RankPlan* plan) {
  K3_CHECK(victim.planned == 0);
  rank.preempted = true;
  LiveRequest& live = *victim.request;
  // A copy of state or page that was to start this sequence is not needed any more; its target may get another owner.
  const StateSlot state = victim.lease.state;
  std::erase_if(plan->state_copies, [state](const StateCopy& copy) { return copy.to == state; });
  std::erase_if(plan->page_copies, [&victim](const PageCopy& copy) {
    return std::find(victim.lease.pages.begin(), victim.lease.pages.end(), copy.to) != victim.lease.pages.end();
  });
  rank.running.erase(std::find(rank.running.begin(), rank.running.end(), &victim));
  rank.cache.Release(&victim.lease);
  Requeue(victim);
  if (live.is_shadow) {
    FinishRequest(live, absl::CancelledError("preempted"), live.arrival);
    return;
  }
  ++live.usage.preemptions;
  ++counters_.preemptions;
  backlog_tokens_ += victim.remaining() - live.backlog;
  live.backlog = victim.remaining();
}

bool Scheduler::EnsurePages(Rank& rank, Sequence& sequence, int64_t tokens, RankPlan* plan) {
  while (rank.cache.Extend(&sequence.lease, tokens) < tokens) {
    // The newest sequence that this step has not promised anything yet.
    Sequence* victim = nullptr;
    for (auto it = rank.running.rbegin(); it != rank.running.rend() && victim == nullptr; ++it) {
      if ((*it)->planned == 0) victim = *it;
    }
    K3_CHECK(victim != nullptr);
    Preempt(rank, *victim, plan);
    if (victim == &sequence) return false;
  }
  return true;
}

void Scheduler::PlanDecodes(Rank& rank, RankPlan* plan) {
  // Oldest first: whoever is preempted on the way is newer, hence further back and not planned yet.
  for (size_t i = 0; i < rank.running.size(); ++i) {
    Sequence& sequence = *rank.running[i];
    if (!sequence.decoding() || sequence.ending() || !EnsurePages(rank, sequence, sequence.computed + 1, plan))
      continue;
    K3_CHECK(rank.budget > 0);
    sequence.planned = 1;
    --rank.budget;
    rank.step->scheduled.push_back({&sequence});
  }
}

int32_t Scheduler::CutPrefill(const Sequence& sequence, int64_t from, int64_t more) const {
  const int64_t length = static_cast<int64_t>(sequence.tokens.size()), align = config_.prefill_alignment;
  if (align == 1 || from + more == length) return static_cast<int32_t>(more);
  int64_t end = (from + more) / align * align;
  if (length - end <= config_.short_tail) end -= align;
  return static_cast<int32_t>(std::max<int64_t>(0, end - from));
}

void Scheduler::PlanChunk(Rank& rank, Sequence& sequence, int32_t most, RankPlan* plan) {
  const int32_t had = sequence.planned;
  int32_t more = std::min({most, sequence.remaining() - had, config_.prefill_chunk - had, rank.budget});
  if (more <= 0) return;
  const int64_t from = int64_t{sequence.computed} + had;
  more = CutPrefill(sequence, from, more);
  if (more == 0) return;
  int64_t covered = rank.cache.Extend(&sequence.lease, from + more);
  while (covered <= from) {
    // Not one token fits. Only what is newer and not promised in this step may be pushed out; else wait for a step.
    if (had > 0) return;
    Sequence* victim = nullptr;
    for (auto it = rank.running.rbegin(); *it != &sequence && victim == nullptr; ++it) {
      if ((*it)->planned == 0) victim = *it;
    }
    if (victim == nullptr) return;
    Preempt(rank, *victim, plan);
    covered = rank.cache.Extend(&sequence.lease, from + more);
  }
  more = CutPrefill(sequence, from, std::min<int64_t>(more, covered - from));
  if (more == 0) return;
  sequence.planned += more;
  rank.budget -= more;
  if (had == 0) rank.step->scheduled.push_back({&sequence});
}

void Scheduler::PlanPrefills(Clock::time_point now, StepPlan* plan) {
  const bool somebody_waits = !queue_.empty() || !preempted_.empty();
  std::vector<Sequence*>& prefills = prefills_;
  std::vector<std::pair<Rank*, Sequence*>>& oldest = oldest_prefills_;
  std::vector<Sequence*>& longs = long_prefills_;
  oldest.clear();
  longs.clear();
  for (size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    rank.long_prefills = 0;
    prefills.clear();
    for (Sequence* sequence : rank.running) {
      if (sequence->decoding() || sequence->ending()) continue;
      prefills.push_back(sequence);
      rank.long_prefills += IsLong(*sequence);
    }
    if (prefills.empty()) continue;
    Sequence* first = prefills.front();
    const bool alone = prefills.size() == 1 && !somebody_waits;
    PlanChunk(rank, *first, alone ? rank.budget : (rank.budget + 1) / 2, &plan->ranks[r]);
    if (first->phase == SequencePhase::kRunning) oldest.emplace_back(&rank, first);
    std::sort(prefills.begin() + 1, prefills.end(), [](const Sequence* a, const Sequence* b) {
      return a->remaining() != b->remaining() ? a->remaining() < b->remaining() : a->admission < b->admission;
    });
    for (size_t i = 1; i < prefills.size(); ++i) {
      if (prefills[i]->phase != SequencePhase::kRunning) continue;  // preempted by one before it
      if (IsLong(*prefills[i])) {
        longs.push_back(prefills[i]);
      } else {
        PlanChunk(rank, *prefills[i], rank.budget, &plan->ranks[r]);
      }
    }
  }
  if (somebody_waits) Admit(now, plan);
  for (Sequence* sequence : longs) {
    if (sequence->phase != SequencePhase::kRunning) continue;
    Rank& rank = ranks_[static_cast<size_t>(sequence->rank)];
    PlanChunk(rank, *sequence, rank.budget, &plan->ranks[static_cast<size_t>(sequence->rank)]);
  }
  for (const auto& [rank, sequence] : oldest) {
    PlanChunk(*rank, *sequence, rank->budget, &plan->ranks[static_cast<size_t>(sequence->rank)]);
  }
}

}  // namespace k3
