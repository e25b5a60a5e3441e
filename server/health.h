#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "engine/engine_interface.h"
#include "engine/request.h"

namespace k3 {

enum class ServingState { kLoading, kServing, kDraining, kStalled };

const char* ServingStateName(ServingState state);

// The one truth about whether this process serves. Both front ends answer health questions from it and ask it before
// they take work; listeners hear of every change. Thread-safe.
//
// loading -> serving <-> stalled; any of them -> draining, which is final. Stalled means work exists but no engine step
// ended for `stall_limit`, or the device failed (which does not heal).
class ServerHealth {
 public:
  using Listener = std::function<void(ServingState)>;

  explicit ServerHealth(Clock::duration stall_limit = std::chrono::seconds(30)) : stall_limit_(stall_limit) {}

  ServingState State() const;
  bool IsServing() const { return State() == ServingState::kServing; }
  double LoadPercent() const;

  // While loading: 0 to 100.
  void SetLoadPercent(double percent);
  // The model is loaded and has answered a first request of its own.
  void SetServing();
  // New work is refused once `lag` has passed; the state changes at once.
  void StartDrain(Clock::duration lag);
  // Called a few times a second with the engine's load.
  void Observe(const EngineLoad& load);

  // OK, or UNAVAILABLE with the reason and a retry delay.
  absl::Status Admission() const;

  // Called after each change of state, on the thread that caused it, with no lock held. The listener may be called once
  // more while Unsubscribe runs.
  int Subscribe(Listener listener);
  void Unsubscribe(int id);

 private:
  void Change(ServingState next);

  const Clock::duration stall_limit_;
  mutable std::mutex mutex_;
  ServingState state_ = ServingState::kLoading;   // guarded by mutex_
  double load_percent_ = 0;                       // guarded by mutex_
  std::optional<Clock::time_point> refuse_from_;  // guarded by mutex_; set by StartDrain
  std::map<int, Listener> listeners_;             // guarded by mutex_
  int next_listener_ = 0;                         // guarded by mutex_
};

}  // namespace k3
