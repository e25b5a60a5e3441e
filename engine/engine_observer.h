#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "engine/request.h"

namespace k3 {

struct StepStats {
  double seconds = 0;          // plan, run and commit
  double run_seconds = 0;      // the runner alone
  int32_t tokens = 0;          // over all ranks
  int32_t prefill_tokens = 0;  // of them in chunks of more than one
  int32_t sequences = 0;
  int32_t groups = 1;       // data-parallel
  int32_t most_tokens = 0;  // of one group: the others wait for it
};

// Told about every step and every ended request, for histograms. Calls come from the engine thread (OnRejected from the
// thread that submitted) and must return at once.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  virtual void OnStep(const StepStats& stats) { (void)stats; }
  // Once per accepted request. `status` and `usage` are those of TokenSink::OnFinished.
  virtual void OnRequestFinished(const absl::Status& status, const RequestUsage& usage) { (void)status, (void)usage; }
  virtual void OnRejected(const absl::Status& status) { (void)status; }
};

}  // namespace k3
