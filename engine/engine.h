#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/engine_config.h"
#include "engine/engine_interface.h"
#include "engine/engine_observer.h"
#include "engine/load_estimator.h"
#include "engine/scheduler.h"
#include "engine/step.h"

namespace k3 {

// The step loop: one thread that owns the Scheduler and drives a StepRunner. Everything else talks to it through the
// inbox. Submits, cancels and stops that arrive during a step take effect before the next one is planned.
class Engine final : public EngineInterface {
 public:
  // Resolves and validates `config`, starts the thread. `runner` and `observer` (may be null) must outlive the engine.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(EngineConfig config, StepRunner& runner,
                                                        EngineObserver* observer = nullptr);
  // Ends what still lives with UNAVAILABLE.
  ~Engine() override;

  absl::StatusOr<RequestId> Submit(std::unique_ptr<Request> request) override;
  void Cancel(RequestId id) override;
  void StopChoice(RequestId id, int32_t choice) override;
  EngineLimits Limits() const override { return config_.Limits(); }
  EngineLoad Load() const override;
  void FlushCache() override;
  void StopAdmission() override;

  // Refuses new requests and waits until the accepted ones have ended; after `timeout` ends the rest with UNAVAILABLE.
  // True when nothing had to be cut off.
  bool Drain(Clock::duration timeout);

  const EngineConfig& config() const { return config_; }

 private:
  struct Command {
    enum class Kind : uint8_t { kSubmit, kCancel, kStopChoice, kFlush } kind;
    RequestId id = 0;
    int32_t choice = 0;
    Clock::time_point arrival;
    std::unique_ptr<Request> request;
  };

  Engine(EngineConfig config, StepRunner& runner, EngineObserver* observer);

  void Loop();
  // Applies what is in the inbox, waiting for something to do first. False when the engine is to stop.
  bool ServeInbox(bool planned);
  void Apply(Command& command);
  // Plans and starts a step where that is possible, else waits for the oldest one and commits it. False when there was
  // nothing to do.
  bool Step();
  // Plans a step and hands it to the runner. False when there was nothing to run.
  bool StartStep();
  // Waits for the oldest step in flight and commits it.
  void FinishStep();
  // Waits for the steps in flight and forgets their results.
  void AbandonFlights();
  // What `call` returns, or why it threw.
  template <typename Call>
  static absl::Status Guarded(const char* what, Call&& call);
  void Fail(const absl::Status& status);
  void PublishLoad();
  absl::Status Refuse(absl::Status status, double retry_after_seconds) const;
  void Post(Command command);

  const EngineConfig config_;
  StepRunner& runner_;
  EngineObserver* observer_;
  std::atomic<RequestId> next_id_{1};

  mutable std::mutex mutex_;      // guards all below up to the engine thread's own
  std::condition_variable wake_;  // the engine thread: something to do
  std::condition_variable idle_;  // Drain: nothing lives
  std::vector<Command> inbox_;
  int32_t inbox_submits_ = 0;
  int32_t queued_ = 0;  // waiting in the scheduler for first admission
  bool admits_ = true;
  bool healthy_ = true;
  bool stopping_ = false;
  bool cut_off_ = false;           // end everything with UNAVAILABLE
  bool has_work_ = false;          // something lives in the scheduler or the inbox
  Clock::time_point progress_at_;  // last finished step, or since when there is work
  EngineLoad load_;
  LoadEstimator estimator_;

  // The engine thread's own.
  bool failed_ = false;  // the runner cannot run another step
  Scheduler scheduler_;
  // A step from planning to commit.
  struct Flight {
    StepPlan plan;
    StepStats stats;
    Clock::time_point start;  // of planning
    Clock::time_point run;    // it was handed to the runner
  };
  static constexpr uint64_t kFlights = 2;
  Flight flights_[kFlights];  // step n in place n % kFlights
  uint64_t started_ = 0;
  uint64_t finished_ = 0;
  Clock::time_point last_ran_;  // end of the newest step's run and of its commit
  Clock::time_point last_end_;
  StepResult result_;
  std::vector<Command> commands_;
  std::vector<Scheduler::Scrub> scrub_;
  uint64_t routing_alarms_ = 0;  // told so far
  std::thread thread_;
};

}  // namespace k3
