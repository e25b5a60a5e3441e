#pragma once

#include <cstdint>

#include "engine/engine_observer.h"
#include "engine/request.h"
#include "engine/scheduler.h"

namespace k3 {

// Predicts, from measured steps and the queue, how long a new request would take: for refusing at once what cannot meet
// its deadline, and for telling clients when to come back. Every estimate leans to the optimistic side (best recent
// rates, cached prompts assumed as often as seen), so only the clearly impossible is refused. Guarded by its owner.
class LoadEstimator {
 public:
  void OnStep(const StepStats& stats, const Scheduler::Backlog& backlog, const EngineLoad& load, Clock::time_point now);

  // Seconds until the requests ahead are out of the way. 0 while nothing was measured.
  double QueueSeconds() const;
  // Seconds until `request`, submitted now, has what it cannot do without: its first token, its minimum, or everything
  // when it ignores the end of text.
  double SecondsNeeded(const Request& request) const;

 private:
  double prefill_rate_ = 0;     // prompt tokens a second, best of late
  double decode_seconds_ = 0;   // a step without prefill, best of late
  double finish_interval_ = 0;  // seconds between ends of requests while no sequence can be admitted
  double hit_share_ = 0;        // of prompt tokens
  Scheduler::Backlog backlog_;
  uint64_t finished_ = 0;
  Clock::time_point finished_at_;
};

}  // namespace k3
