#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/engine_interface.h"

namespace k3::testing {

// An engine without a model, for tests and load runs of the front ends: it keeps the contract of EngineInterface and
// TokenSink, with queue, pools, deadlines and cancels, but its tokens come from a script.
class MockEngine : public EngineInterface {
 public:
  // The next token of a choice; `position` counts generated tokens from 0.
  using Script = std::function<int32_t(const Request& request, int32_t choice, int32_t position)>;

  struct Options {
    EngineLimits limits{.vocab_size = 4096,
                        .max_model_len = 1 << 20,
                        .latent_pages = 1 << 20,
                        .page_size = 64,
                        .state_slots = 1024,
                        .snapshot_slots = 64,
                        .max_num_seqs = 256,
                        .max_queue = 256};
    int32_t prefill_chunk = 1 << 20;  // prompt tokens of one request in a step
    std::vector<int32_t> eos_token_ids;
    Clock::duration step_time{0};  // pause after each step
    bool manual = false;           // steps happen in Step() only
    Script script;                 // null: 100 + (position mod 1000)
  };

  explicit MockEngine(Options options);
  ~MockEngine() override;

  absl::StatusOr<RequestId> Submit(std::unique_ptr<Request> request) override;
  void Cancel(RequestId id) override;
  void StopChoice(RequestId id, int32_t choice) override;
  EngineLimits Limits() const override { return options_.limits; }
  EngineLoad Load() const override;
  void FlushCache() override;
  void StopAdmission() override;

  // Runs one step on the caller's thread (manual mode).
  void Step();
  // The engine thread stands still between Pause and Resume.
  void Pause();
  void Resume();
  // All requests end with INTERNAL and the engine turns unhealthy.
  void Fail();
  int flushes() const;
  int cancels() const;  // calls of Cancel
  // A copy of what the last accepted request asked for (tokens and parameters, without sink and constraints).
  Request LastRequest() const;

 private:
  struct Live;

  void Run();
  void StepLocked();
  int64_t PagesOf(const Live& live) const;
  void Finish(Live& live, const absl::Status& status);

  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::map<RequestId, std::unique_ptr<Live>> live_;  // guarded by mutex_, as all below
  RequestId next_id_ = 1;
  EngineLoad load_;
  Clock::time_point last_step_ = Clock::now();
  Request last_request_;
  int flushes_ = 0;
  int cancels_ = 0;
  bool admitting_ = true;
  bool paused_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace k3::testing
