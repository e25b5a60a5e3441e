#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/request.h"

namespace k3 {

// Key of the status payload with the milliseconds after which a refused request may come again, in decimal.
inline constexpr char kRetryAfterPayload[] = "k3.retry_after_ms";

// What a request may ask for; fixed after start-up.
struct EngineLimits {
  int32_t vocab_size = 0;
  int32_t max_model_len = 0;  // prompt plus generated tokens of one sequence
  int64_t latent_pages = 0;   // totals over one rank
  int32_t page_size = 0;
  int32_t state_slots = 0;
  int32_t snapshot_slots = 0;
  int32_t max_num_seqs = 0;
  int32_t max_queue = 0;
};

// Balance of the experts over their ranks, where it is measured: of each rank's last update, together.
struct RoutingLoad {
  static constexpr int32_t kLayerGroups = 8;
  uint64_t updates = 0;  // since the start, of all ranks; 0: not measured
  int32_t layer_groups = 0;
  // Busiest rank's choices over the mean rank's, the mean over a group of MoE layers [first, last], counted from 0.
  float max_over_mean[kLayerGroups] = {};
  int32_t first_layer[kLayerGroups] = {};
  int32_t last_layer[kLayerGroups] = {};
  double worst_max_over_mean = 0;   // of all layers
  double override_share = 0;        // of all choices; the mean over ranks
  double worst_override_share = 0;  // of a layer
  double mean_delta = 0;            // absolute
  uint64_t epoch = 0;               // newest that requests are pinned to; 0: no bias
  int32_t live_epochs = 0;          // most of a rank
  uint64_t sign_changes = 0;        // totals since the start
  uint64_t halvings = 0;
  uint64_t alarms = 0;
  uint64_t dampings = 0;
  uint64_t swaps = 0;
};

// A consistent picture of the last step's end; gauges, so it also moves while the engine is idle.
struct EngineLoad {
  int32_t running = 0;
  int32_t waiting = 0;
  int64_t pages_used = 0;    // held by live sequences
  int64_t pages_cached = 0;  // held by the prefix cache alone, evictable
  int64_t pages_total = 0;
  int64_t pages_peak = 0;
  int32_t state_slots_used = 0;
  int32_t state_slots_total = 0;
  int32_t state_slots_peak = 0;
  int32_t snapshots_used = 0;
  int32_t snapshots_total = 0;
  uint64_t steps = 0;
  double seconds_since_step = 0;  // since the last finished step, 0 when there is no work
  uint64_t prompt_tokens = 0;     // totals since start
  uint64_t generated_tokens = 0;
  uint64_t preemptions = 0;
  uint64_t nonfinite_rows = 0;
  uint64_t prefix_query_tokens = 0;
  uint64_t prefix_page_hit_tokens = 0;  // pages found
  uint64_t prefix_hit_tokens = 0;       // resumed from
  uint64_t verified_hits = 0;           // --verify-hits: recomputed and compared
  uint64_t hit_disagreements = 0;
  uint64_t fingerprint_mismatches = 0;  // snapshots dropped because they were not what they were filed as
  // Steps at whose planning a waiting request was held back, by what held it: which pool or limit binds.
  uint64_t steps_bound_by_pages = 0;
  uint64_t steps_bound_by_state_slots = 0;
  uint64_t steps_bound_by_max_seqs = 0;
  RoutingLoad routing;
  bool healthy = true;  // false after a device fault
};

// The engine as the front ends see it; implemented by Engine, and by mocks in load tests of the front ends. All calls
// are thread-safe and return at once.
class EngineInterface {
 public:
  virtual ~EngineInterface() = default;
  // Takes over an already valid request. RESOURCE_EXHAUSTED when the queue is full or the deadline cannot be met,
  // FAILED_PRECONDITION (with both numbers) when the pools could never hold it, INVALID_ARGUMENT when prompt plus
  // max_new_tokens exceeds max_model_len or an id is outside the vocabulary, UNAVAILABLE when draining or failed.
  // After an error the sink is never called.
  virtual absl::StatusOr<RequestId> Submit(std::unique_ptr<Request> request) = 0;
  // Ends the request within one step; its sink still gets OnFinished(CANCELLED). Unknown or ended ids are ignored.
  virtual void Cancel(RequestId id) = 0;
  // Ends one choice with kStop: the front end found a stop string in its text.
  virtual void StopChoice(RequestId id, int32_t choice) = 0;
  virtual EngineLimits Limits() const = 0;
  virtual EngineLoad Load() const = 0;
  // Drops every prefix-cache entry that no live sequence uses.
  virtual void FlushCache() = 0;
  // Refuses new requests from now on.
  virtual void StopAdmission() = 0;
};

}  // namespace k3
