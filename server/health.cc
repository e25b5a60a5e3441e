#include "server/health.h"

#include <spdlog/spdlog.h>

#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/error_details.h"

namespace k3 {

const char* ServingStateName(ServingState state) {
  switch (state) {
    case ServingState::kLoading:
      return "loading";
    case ServingState::kServing:
      return "serving";
    case ServingState::kDraining:
      return "draining";
    case ServingState::kStalled:
      return "stalled";
  }
  return "unknown";
}

ServingState ServerHealth::State() const {
  std::lock_guard lock(mutex_);
  return state_;
}

double ServerHealth::LoadPercent() const {
  std::lock_guard lock(mutex_);
  return load_percent_;
}

void ServerHealth::SetLoadPercent(double percent) {
  std::lock_guard lock(mutex_);
  load_percent_ = percent;
}

void ServerHealth::SetServing() {
  SetLoadPercent(100);
  Change(ServingState::kServing);
}

void ServerHealth::StartDrain(Clock::duration lag) {
  {
    std::lock_guard lock(mutex_);
    if (!refuse_from_.has_value()) refuse_from_ = Clock::now() + lag;
  }
  Change(ServingState::kDraining);
}

void ServerHealth::Observe(const EngineLoad& load) {
  const bool stalled = !load.healthy || load.seconds_since_step > std::chrono::duration<double>(stall_limit_).count();
  const ServingState now = State();
  if (now == ServingState::kServing && stalled) {
    spdlog::error("engine stalled: healthy={} seconds_since_step={:.1f} running={} waiting={}", load.healthy,
                  load.seconds_since_step, load.running, load.waiting);
    Change(ServingState::kStalled);
  } else if (now == ServingState::kStalled && !stalled) {
    spdlog::info("engine steps again");
    Change(ServingState::kServing);
  }
}

absl::Status ServerHealth::Admission() const {
  std::lock_guard lock(mutex_);
  switch (state_) {
    case ServingState::kServing:
      return absl::OkStatus();
    case ServingState::kLoading:
      return UnavailableFor("loading", absl::StrFormat("the model is loading (%.0f %%)", load_percent_),
                            absl::Seconds(2));
    case ServingState::kDraining:
      if (Clock::now() < *refuse_from_) return absl::OkStatus();
      return UnavailableFor("draining", "the server is shutting down", absl::Seconds(1));
    case ServingState::kStalled:
      return UnavailableFor("stalled", "the engine makes no progress", absl::Seconds(5));
  }
  return absl::OkStatus();
}

int ServerHealth::Subscribe(Listener listener) {
  std::lock_guard lock(mutex_);
  listeners_.emplace(next_listener_, std::move(listener));
  return next_listener_++;
}

void ServerHealth::Unsubscribe(int id) {
  std::lock_guard lock(mutex_);
  listeners_.erase(id);
}

void ServerHealth::Change(ServingState next) {
  std::vector<Listener> listeners;
  {
    std::lock_guard lock(mutex_);
    if (state_ == next || state_ == ServingState::kDraining) return;
    state_ = next;
    for (const auto& [id, listener] : listeners_) listeners.push_back(listener);
  }
  for (const Listener& listener : listeners) listener(next);
}

}  // namespace k3
