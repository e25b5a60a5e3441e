#include "engine/scheduler.h"

#include <algorithm>
#include <functional>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"

namespace k3 {

Scheduler::Scheduler(const EngineConfig& config, EngineObserver* observer)
    : config_(config), observer_(observer), queue_(config.ageing_seconds) {
  ranks_.reserve(static_cast<size_t>(config.data_parallel));
  for (int32_t rank = 0; rank < config.data_parallel; ++rank) {
    ranks_.emplace_back(config_);
    ranks_.back().epochs.Offer(config_.first_epoch);
  }
  // Every admitted sequence decodes in every step, so a rank admits no more of them than its token budget.
  const int64_t per_rank = std::min(config.state_slots, config.max_num_batched_tokens);
  most_running_ = static_cast<int32_t>(std::min<int64_t>(config.max_num_seqs, per_rank * config.data_parallel));
}

Scheduler::~Scheduler() = default;

void Scheduler::Submit(RequestId id, std::unique_ptr<Request> request, Clock::time_point arrival) {
  auto live = std::make_unique<LiveRequest>();
  live->id = id;
  live->request = std::move(request);
  live->arrival = arrival;
  const Request& submitted = *live->request;
  live->open_choices = submitted.num_choices;
  live->choices = std::vector<Sequence>(static_cast<size_t>(submitted.num_choices));
  for (int32_t choice = 0; choice < submitted.num_choices; ++choice) {
    live->choices[static_cast<size_t>(choice)].request = live.get();
    live->choices[static_cast<size_t>(choice)].choice = choice;
  }
  const int64_t prompt = static_cast<int64_t>(submitted.prompt_tokens.size());
  live->usage.prompt_tokens = static_cast<int32_t>(prompt);
  live->backlog = prompt;
  backlog_tokens_ += prompt;
  counters_.prompt_tokens += static_cast<uint64_t>(prompt);
  if (submitted.deadline.has_value()) {
    if (deadlines_.size() > 2 * requests_.size() + 1024) {
      std::erase_if(deadlines_, [this](const DeadlineEntry& entry) { return Find(entry.second) == nullptr; });
      std::make_heap(deadlines_.begin(), deadlines_.end(), std::greater<>());
    }
    deadlines_.emplace_back(*submitted.deadline, id);
    std::push_heap(deadlines_.begin(), deadlines_.end(), std::greater<>());
  }
  queue_.Push(live.get(), prompt > config_.long_prompt_tokens);
  requests_.emplace(id, std::move(live));
}

LiveRequest* Scheduler::Find(RequestId id) {
  const auto found = requests_.find(id);
  return found == requests_.end() ? nullptr : found->second.get();
}

void Scheduler::Dequeue(LiveRequest& live, bool admitted) {
  queue_.Remove(&live, admitted);
  if (live.is_shadow) --queued_shadows_;
}

void Scheduler::Cancel(RequestId id, const absl::Status& why, Clock::time_point now) {
  if (step_open()) {
    deferred_.push_back({id, -1, why});
  } else {
    CancelNow(id, why, now);
  }
}

void Scheduler::CancelNow(RequestId id, const absl::Status& why, Clock::time_point now) {
  if (LiveRequest* live = Find(id); live != nullptr) FinishRequest(*live, why, now);
  BuryDead();
}

void Scheduler::StopChoice(RequestId id, int32_t choice, Clock::time_point now) {
  if (step_open()) {
    deferred_.push_back({id, choice, absl::OkStatus()});
  } else {
    StopChoiceNow(id, choice, now);
  }
}

void Scheduler::StopChoiceNow(RequestId id, int32_t choice, Clock::time_point now) {
  LiveRequest* live = Find(id);
  if (live == nullptr || choice < 0 || choice >= static_cast<int32_t>(live->choices.size())) return;
  Sequence& sequence = live->choices[static_cast<size_t>(choice)];
  if (sequence.phase != SequencePhase::kFinished) FinishChoice(sequence, FinishReason::kStop, -1, now);
  BuryDead();
}

void Scheduler::FailAll(const absl::Status& why, Clock::time_point now) {
  committed_ = planned_;
  deferred_.clear();
  for (Rank& rank : ranks_) rank.cache.LetGoOfRestores();
  std::vector<RequestId> ids;
  for (const auto& [id, live] : requests_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  // What an interrupted step left in pages and states is unknown: nothing of it may be met again.
  for (RequestId id : ids) FinishRequest(*Find(id), why, now, /*condemn=*/true);
  BuryDead();
}

void Scheduler::FlushCache() {
  for (Rank& rank : ranks_) rank.cache.Flush();
}

void Scheduler::ExpireDeadlines(Clock::time_point now) {
  while (!deadlines_.empty() && deadlines_.front().first <= now) {
    std::pop_heap(deadlines_.begin(), deadlines_.end(), std::greater<>());
    LiveRequest* live = Find(deadlines_.back().second);
    deadlines_.pop_back();
    if (live != nullptr) FinishRequest(*live, absl::DeadlineExceededError("the request's deadline has passed"), now);
  }
}

std::optional<Clock::time_point> Scheduler::NextDeadline() const {
  if (deadlines_.empty()) return std::nullopt;
  return deadlines_.front().first;
}

void Scheduler::SetPhase(Sequence& sequence, SequencePhase phase) {
  LiveRequest& live = *sequence.request;
  const int32_t change = (phase == SequencePhase::kRunning) - (sequence.phase == SequencePhase::kRunning);
  sequence.phase = phase;
  if (change == 0) return;
  const bool was_running = live.running > 0;
  live.running += change;
  running_ += change;
  if (!live.is_shadow) running_requests_ += (live.running > 0) - was_running;
}

void Scheduler::Detach(Sequence& sequence, bool condemn) {
  if (sequence.phase == SequencePhase::kRunning) {
    Rank& rank = ranks_[static_cast<size_t>(sequence.rank)];
    rank.running.erase(std::find(rank.running.begin(), rank.running.end(), &sequence));
    if (condemn) {
      rank.cache.Condemn(sequence.request->id, &sequence.lease, &rank.scrub.pages, &rank.scrub.slots);
    } else {
      rank.cache.Release(&sequence.lease);
    }
    sequence.computed = 0;
  } else if (sequence.phase == SequencePhase::kPreempted) {
    preempted_.erase(std::find(preempted_.begin(), preempted_.end(), &sequence));
  }
}

bool Scheduler::HandOver(Sequence& from) {
  LiveRequest& live = *from.request;
  const SequencePhase wanted = live.forked ? SequencePhase::kForking : SequencePhase::kQueued;
  // After the fork only the sequence that still stands at the prompt's end has anything to pass on.
  if (live.forked && from.phase != SequencePhase::kRunning) return false;
  if (!live.forked && from.choice != live.source) return false;
  Sequence* to = nullptr;
  for (Sequence& choice : live.choices) {
    if (&choice != &from && choice.phase == wanted) {
      to = &choice;
      break;
    }
  }
  if (to == nullptr) return false;
  if (!live.forked) live.source = to->choice;
  if (from.phase == SequencePhase::kQueued) return true;

  // A step in which `from` is planned would not find its way to `to`: NeedsToken keeps such steps from being open.
  K3_CHECK(from.unknown == 0);
  to->Begin(config_.eos_token_ids, config_.vocab_size, config_.pool_tokens());
  to->rank = from.rank;
  to->admission = from.admission;
  to->computed = from.computed;
  to->divergence = from.divergence;
  to->streams_prompt_scores = from.streams_prompt_scores;
  to->prompt_scores = from.prompt_scores;
  const size_t prompt_pages = static_cast<size_t>(to->prompt_length / config_.page_size);
  to->page_hashes.assign(
      from.page_hashes.begin(),
      from.page_hashes.begin() + static_cast<ptrdiff_t>(std::min(prompt_pages, from.page_hashes.size())));
  if (from.phase == SequencePhase::kRunning) {
    to->lease = std::move(from.lease);
    ++to->leases;
    from.lease = {};
    std::vector<Sequence*>& running = ranks_[static_cast<size_t>(from.rank)].running;
    *std::find(running.begin(), running.end(), &from) = to;
  } else {
    *std::find(preempted_.begin(), preempted_.end(), &from) = to;
  }
  SetPhase(*to, from.phase);
  return true;
}

void Scheduler::FinishChoice(Sequence& sequence, FinishReason reason, int32_t stop_token, Clock::time_point now) {
  LiveRequest& live = *sequence.request;
  blocked_ = nullptr;  // it may be this one
  if (!HandOver(sequence)) Detach(sequence, /*condemn=*/false);
  SetPhase(sequence, SequencePhase::kFinished);
  --live.open_choices;
  Notify(live, [&](TokenSink& sink) { sink.OnChoiceFinished(sequence.choice, reason, stop_token); });
  if (live.open_choices == 0) FinishRequest(live, absl::OkStatus(), now);
}

void Scheduler::FinishRequest(LiveRequest& live, const absl::Status& status, Clock::time_point now, bool condemn) {
  if (live.finished) return;
  live.finished = true;
  blocked_ = nullptr;
  if (live.ticket.queued) Dequeue(live, /*admitted=*/false);
  const bool abandoned = absl::IsCancelled(status) || absl::IsDeadlineExceeded(status);
  for (Sequence& choice : live.choices) {
    if (choice.phase == SequencePhase::kFinished) continue;
    Detach(choice, condemn);
    SetPhase(choice, SequencePhase::kFinished);
    const FinishReason reason = abandoned ? FinishReason::kCancelled : FinishReason::kError;
    Notify(live, [&](TokenSink& sink) { sink.OnChoiceFinished(choice.choice, reason, -1); });
  }
  UnpinEpoch(live);
  backlog_tokens_ -= live.backlog;
  live.backlog = 0;
  RequestUsage& usage = live.usage;
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  usage.queue_seconds = seconds((live.admitted ? live.admitted_at : now) - live.arrival);
  if (live.admitted)
    usage.prefill_seconds = seconds((live.has_first_token ? live.first_token_at : now) - live.admitted_at);
  if (live.has_first_token) usage.decode_seconds = seconds(now - live.first_token_at);
  if (live.is_shadow) {
    --shadows_;
  } else {
    ++finished_;
    // The final event comes whatever the sink did before.
    try {
      live.request->sink->OnFinished(status, usage);
    } catch (...) {
      // It had its chance; the request is over either way.
    }
    if (observer_ != nullptr) observer_->OnRequestFinished(status, usage);
  }
  const auto place = requests_.find(live.id);
  dead_.push_back({planned_, std::move(place->second)});
  requests_.erase(place);
}

void Scheduler::BuryDead() {
  if (committing_) return;
  std::erase_if(dead_, [this](const Dead& dead) { return dead.step <= committed_; });
}

bool Scheduler::TakeScrub(std::vector<Scrub>* scrub) {
  bool any = false;
  scrub->clear();
  for (Rank& rank : ranks_) {
    any |= !rank.scrub.empty();
    scrub->push_back(std::move(rank.scrub));
    rank.scrub = {};
  }
  return any;
}

Scheduler::Backlog Scheduler::backlog() const {
  Backlog backlog;
  backlog.prompt_tokens = backlog_tokens_;
  backlog.queued = static_cast<int32_t>(queue_.size()) - queued_shadows_;
  backlog.full = held_back_;
  backlog.finished = finished_;
  return backlog;
}

void Scheduler::FillLoad(EngineLoad* load) const {
  *load = counters_;
  FillRouting(&load->routing);
  load->running = running_requests_;
  load->fingerprint_mismatches = fingerprint_mismatches();
  load->waiting = static_cast<int32_t>(requests_.size()) - shadows_ - running_requests_;
  for (const Rank& rank : ranks_) {
    const CacheUsage usage = rank.cache.Usage();
    load->pages_used += usage.pages_used;
    load->pages_cached += usage.pages_cached;
    load->pages_total += rank.cache.pages().total();
    load->pages_peak += usage.pages_peak;
    load->state_slots_used += usage.state_slots_used;
    load->state_slots_total += rank.cache.states().live_total();
    load->state_slots_peak += usage.state_slots_peak;
    load->snapshots_used += usage.snapshots_used;
    load->snapshots_total += rank.cache.states().snapshot_total();
  }
}

uint64_t Scheduler::fingerprint_mismatches() const {
  uint64_t total = 0;
  for (const Rank& rank : ranks_) total += rank.cache.fingerprint_mismatches();
  return total;
}

void Scheduler::CheckInvariants() const {
  K3_CHECK(!committing_ && planned_ - committed_ <= kMostOpen);
  K3_CHECK(step_open() || (dead_.empty() && deferred_.empty()));
  std::vector<std::vector<const CacheLease*>> leases(ranks_.size());
  size_t running = 0, preempted = 0, queued = 0;
  int64_t backlog = 0;
  int32_t running_requests = 0, shadows = 0, queued_shadows = 0;
  for (const auto& [id, live] : requests_) {
    K3_CHECK(live->id == id && !live->finished && live->open_choices > 0);
    int32_t open = 0, with_lease = 0;
    for (const Sequence& sequence : live->choices) {
      K3_CHECK(sequence.request == live.get());
      open += sequence.phase != SequencePhase::kFinished;
      with_lease += sequence.phase == SequencePhase::kRunning;
      K3_CHECK(sequence.lease.held() == (sequence.phase == SequencePhase::kRunning));
      K3_CHECK(sequence.planned == 0);
      // What was drawn for an ended sequence is dropped.
      K3_CHECK(sequence.phase == SequencePhase::kFinished ||
               (sequence.unknown >= 0 && sequence.unknown <= static_cast<int32_t>(planned_ - committed_)));
      if (sequence.phase == SequencePhase::kRunning) {
        K3_CHECK(sequence.computed < static_cast<int32_t>(sequence.tokens.size()) || step_open());
        K3_CHECK(sequence.known() < sequence.length_limit || live->sampling().max_new_tokens == 0);
        K3_CHECK(static_cast<int64_t>(sequence.lease.pages.size()) >= config_.PagesFor(sequence.computed));
        leases[static_cast<size_t>(sequence.rank)].push_back(&sequence.lease);
        ++running;
      } else {
        K3_CHECK(sequence.computed == 0 || sequence.phase == SequencePhase::kFinished);
      }
      preempted += sequence.phase == SequencePhase::kPreempted;
      K3_CHECK(sequence.phase != SequencePhase::kForking || live->forked);
    }
    K3_CHECK(open == live->open_choices && with_lease == live->running);
    queued += live->ticket.queued;
    if (live->ticket.queued) K3_CHECK(!live->admitted && with_lease == 0);
    backlog += live->backlog;
    shadows += live->is_shadow;
    queued_shadows += live->is_shadow && live->ticket.queued;
    running_requests += with_lease > 0 && !live->is_shadow;
  }
  K3_CHECK(running == static_cast<size_t>(running_) && running_ <= most_running_);
  K3_CHECK(preempted == preempted_.size() && queued == queue_.size());
  K3_CHECK(queued_shadows == queued_shadows_);
  K3_CHECK(backlog == backlog_tokens_ && shadows == shadows_ && running_requests == running_requests_);
  for (size_t i = 1; i < preempted_.size(); ++i) K3_CHECK(preempted_[i - 1]->admission < preempted_[i]->admission);
  size_t listed = 0;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    const Rank& rank = ranks_[r];
    listed += rank.running.size();
    for (size_t i = 0; i < rank.running.size(); ++i) {
      K3_CHECK(rank.running[i]->rank == static_cast<int32_t>(r) && rank.running[i]->phase == SequencePhase::kRunning);
      if (i > 0) K3_CHECK(rank.running[i - 1]->admission < rank.running[i]->admission);
    }
    rank.cache.CheckInvariants(leases[r]);
  }
  K3_CHECK(listed == running);
  std::vector<std::array<int32_t, EpochSlots::kSlots>> pins(ranks_.size());
  for (const auto& [id, live] : requests_) {
    const LiveRequest::PinnedEpoch& epoch = live->epoch;
    K3_CHECK(epoch.rank >= 0 ? config_.bias_epochs : !config_.bias_epochs || !live->admitted);
    if (epoch.rank < 0) continue;
    const Rank& rank = ranks_[static_cast<size_t>(epoch.rank)];
    ++pins[static_cast<size_t>(epoch.rank)][static_cast<size_t>(epoch.slot)];
    K3_CHECK(rank.epochs.number(epoch.slot) == epoch.number);
    for (const Sequence& sequence : live->choices) {
      K3_CHECK(sequence.phase != SequencePhase::kRunning || sequence.rank == epoch.rank);
    }
  }
  for (size_t r = 0; r < ranks_.size(); ++r) {
    for (int32_t slot = 0; slot < EpochSlots::kSlots; ++slot) {
      K3_CHECK(ranks_[r].epochs.pins(slot) == pins[r][static_cast<size_t>(slot)]);
    }
  }
}

}  // namespace k3
