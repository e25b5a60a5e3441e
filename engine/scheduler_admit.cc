#include <algorithm>

#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "kernels/core/check.h"

// Scheduler::Admit: who starts, or goes on after preemption, and where.
namespace k3 {
namespace {

// A new prompt is not started for fewer tokens than this: the crumbs of a budget are not worth a state slot.
constexpr int32_t kSmallestFirstChunk = 16;

}  // namespace

void Scheduler::Admit(Clock::time_point now, StepPlan* plan) {
  uint64_t epoch = 0;  // changes with whatever a blocked candidate may be waiting for
  bool long_allowed = false;
  for (const Rank& rank : ranks_) {
    epoch += rank.cache.releases() + (static_cast<uint64_t>(rank.long_prefills) << 48);
    long_allowed |= rank.long_prefills < config_.max_long_prefills;
  }
  bool counted = false;
  if (running_ >= most_running_) NoteHeldBack();
  while (running_ < most_running_) {
    Sequence* candidate = nullptr;
    const bool resumes = !preempted_.empty();
    if (resumes) {
      candidate = preempted_.front();
    } else if (LiveRequest* live = queue_.Next(now, long_allowed); live != nullptr) {
      candidate = &live->choices[static_cast<size_t>(live->source)];
    }
    if (candidate == nullptr) return;
    if (candidate == blocked_ && epoch == blocked_epoch_) {
      NoteHeldBack();
      return;
    }
    if (!counted) {
      counted = true;
      for (Rank& rank : ranks_) {
        rank.outstanding = 0;
        for (const Sequence* sequence : rank.running) {
          const int64_t needs = config_.PagesFor(static_cast<int64_t>(sequence->tokens.size()));
          rank.outstanding += std::max<int64_t>(0, needs - static_cast<int64_t>(sequence->lease.pages.size()));
        }
      }
    }
    if (!TryAdmit(*candidate, !resumes, now, plan)) {
      // Remembered only when pages or slots were missing; a used-up budget is new in the next step.
      const bool budget_left = std::all_of(ranks_.begin(), ranks_.end(), [this](const Rank& rank) {
        return rank.budget >= std::max(kSmallestFirstChunk, 2 * config_.prefill_alignment) && !rank.preempted;
      });
      blocked_ = budget_left ? candidate : nullptr;
      blocked_epoch_ = epoch;
      if (budget_left) NoteHeldBack();
      return;
    }
    blocked_ = nullptr;
    long_allowed = std::any_of(ranks_.begin(), ranks_.end(),
                               [this](const Rank& rank) { return rank.long_prefills < config_.max_long_prefills; });
  }
}

void Scheduler::NoteHeldBack() {
  held_back_ = true;
  const bool slots =
      std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.cache.live_free() == 0; });
  if (slots) {
    ++counters_.steps_bound_by_state_slots;
  } else if (running_ >= most_running_) {
    ++counters_.steps_bound_by_max_seqs;
  } else {
    ++counters_.steps_bound_by_pages;
  }
}

bool Scheduler::MayMatch(const LiveRequest& live) const {
  return config_.enable_prefix_caching && live.caches() && !live.sampling().prompt_logprobs;
}

Scheduler::Placement Scheduler::Place(const Sequence& sequence, bool obey_long_limit) {
  const LiveRequest& live = *sequence.request;
  const int32_t length = static_cast<int32_t>(sequence.tokens.size());
  const bool is_long = length > config_.long_prompt_tokens;
  const int32_t smallest = config_.prefill_alignment > 1 ? 2 * config_.prefill_alignment : kSmallestFirstChunk;
  const int32_t first_chunk = std::min({smallest, config_.prefill_chunk, config_.max_num_batched_tokens, length});

  Placement best;
  best.needed_pages = config_.PagesFor(length);
  int64_t best_load = 0;
  for (Rank& rank : ranks_) {
    if (rank.preempted || rank.budget == 0 || rank.cache.live_free() == 0) continue;
    if (static_cast<int32_t>(rank.running.size()) >= config_.max_num_batched_tokens) continue;
    if (obey_long_limit && is_long && rank.long_prefills >= config_.max_long_prefills) continue;
    // What it has computed and drawn so far came from one rank's epoch: there it goes on.
    if (live.epoch.rank >= 0 && &rank != &ranks_[static_cast<size_t>(live.epoch.rank)]) continue;
    PrefixMatch match;
    if (MayMatch(live)) {
      PrefixKey key = sequence.Key();
      if (live.epoch.rank < 0) key.epoch = rank.epochs.number(rank.epochs.current());
      // Something must be left to compute, because the logits of the last token are needed.
      match = rank.cache.Match(key, length - 1);
    }
    const int32_t left = length - match.resume_pages * config_.page_size;
    if (rank.budget < std::min(first_chunk, left)) continue;
    // Room for its whole text beside what the others still need, and a page for each of them to go on with.
    const int64_t fresh = best.needed_pages - match.resume_pages + match.idle_pages;
    const int64_t margin = static_cast<int64_t>(rank.running.size());
    if (rank.cache.available_pages() < fresh + rank.outstanding + margin) continue;
    const int64_t load = static_cast<int64_t>(rank.running.size()) + (config_.max_num_batched_tokens - rank.budget);
    if (best.rank != nullptr && (match.resume_pages < best.match.resume_pages ||
                                 (match.resume_pages == best.match.resume_pages && load >= best_load))) {
      continue;
    }
    best.rank = &rank;
    best.match = std::move(match);
    best_load = load;
  }
  return best;
}

bool Scheduler::TryAdmit(Sequence& sequence, bool obey_long_limit, Clock::time_point now, StepPlan* plan) {
  LiveRequest& live = *sequence.request;
  sequence.Begin(config_.eos_token_ids, config_.vocab_size, config_.pool_tokens());
  if (config_.enable_prefix_caching && live.caches()) sequence.ExtendHashes(config_.page_size);
  const Placement placement = Place(sequence, obey_long_limit);
  if (placement.rank == nullptr) return false;

  Rank& rank = *placement.rank;
  TakeLease(placement, sequence, plan);
  const int32_t matched = static_cast<int32_t>(placement.match.pages.size()) * config_.page_size;
  sequence.divergence = matched > sequence.computed ? matched : 0;
  EnterRunning(rank, sequence);
  if (!live.admitted) NoteAdmitted(live, sequence, matched, now);

  const size_t scheduled = rank.step->scheduled.size();
  PlanChunk(rank, sequence, rank.budget, &plan->ranks[static_cast<size_t>(sequence.rank)]);
  K3_CHECK(rank.step->scheduled.size() == scheduled + 1);
  // After the chunk: the pages that it took are no longer available to the next candidate and must not count twice.
  rank.outstanding += placement.needed_pages - static_cast<int64_t>(sequence.lease.pages.size());
  return true;
}

void Scheduler::TakeLease(const Placement& placement, Sequence& sequence, StepPlan* plan) {
  Rank& rank = *placement.rank;
  sequence.rank = static_cast<int32_t>(&rank - ranks_.data());
  RankPlan& rank_plan = plan->ranks[static_cast<size_t>(sequence.rank)];
  sequence.ReservePages(config_.page_size);
  rank.cache.Acquire(placement.match, &sequence.lease);
  if (placement.match.resume_pages > 0) {
    rank_plan.state_copies.push_back({placement.match.snapshot, sequence.lease.state});
  } else {
    rank_plan.zero_slots.push_back(sequence.lease.state);
  }
  ++sequence.leases;
  LiveRequest& live = *sequence.request;
  if (config_.bias_epochs && live.epoch.rank < 0) PinEpoch(live, sequence.rank, rank.epochs.current());
  sequence.computed = placement.match.resume_pages * config_.page_size;
}

void Scheduler::EnterRunning(Rank& rank, Sequence& sequence) {
  LiveRequest& live = *sequence.request;
  if (sequence.phase == SequencePhase::kPreempted) {
    preempted_.erase(std::find(preempted_.begin(), preempted_.end(), &sequence));
  } else {
    Dequeue(live, /*admitted=*/true);
  }
  if (sequence.admission == 0) sequence.admission = next_admission_++;
  const auto place = std::find_if(rank.running.begin(), rank.running.end(),
                                  [&](const Sequence* other) { return other->admission > sequence.admission; });
  rank.running.insert(place, &sequence);
  SetPhase(sequence, SequencePhase::kRunning);
  rank.long_prefills += IsLong(sequence);
  backlog_tokens_ += sequence.remaining() - live.backlog;
  live.backlog = sequence.remaining();
}

void Scheduler::NoteAdmitted(LiveRequest& live, const Sequence& sequence, int32_t matched_tokens,
                             Clock::time_point now) {
  live.admitted = true;
  live.admitted_at = now;
  live.usage.cached_tokens = sequence.computed;
  if (MayMatch(live)) {
    counters_.prefix_query_tokens += sequence.tokens.size();
    counters_.prefix_page_hit_tokens += static_cast<uint64_t>(matched_tokens);
    counters_.prefix_hit_tokens += static_cast<uint64_t>(sequence.computed);
    live.check_hit =
        sequence.computed > 0 && UniformAt(kHitCheckSeed, 0, static_cast<int64_t>(live.id)) < config_.verify_hits;
  }
  Notify(live, [&](TokenSink& sink) { sink.OnAdmitted(sequence.computed); });
}

}  // namespace k3
