#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/engine_interface.h"
#include "engine/engine_observer.h"
#include "engine/request.h"
#include "kernels/comm/collective.h"
#include "server/routing_metrics.h"

namespace k3 {

class Metrics;

// How an accepted request ended: the label of requests_finished_total.
enum class Outcome : uint8_t { kStop, kLength, kToolCalls, kRepetition, kAbort, kDeadline, kError };
inline constexpr int kNumOutcomes = 7;
const char* OutcomeName(Outcome outcome);
// The outcome of a request from its final status and the reason of its last choice.
Outcome OutcomeOf(const absl::Status& status, FinishReason last_reason);

// The figures of one accepted request. Lives in its stream; told by the stream's sink, from one thread at a time.
// Counts exactly one outcome: a request dropped without OnFinished counts as an error when this object goes.
class RequestMetrics {
 public:
  ~RequestMetrics();
  RequestMetrics(const RequestMetrics&) = delete;
  RequestMetrics& operator=(const RequestMetrics&) = delete;

  // A generated token, stop tokens included. The first one ends the time to first token; later ones of the same choice
  // are inter-token latencies.
  void OnToken(int32_t choice, Clock::time_point now = Clock::now());
  // The reply held reasoning only: the token limit came before any content.
  void OnNoContent();
  // Later calls than the first are ignored. The engine's token counts replace the ones seen here.
  void OnFinished(Outcome outcome, const RequestUsage& usage, Clock::time_point now = Clock::now());

 private:
  friend class Metrics;
  RequestMetrics(Metrics* metrics, int32_t prompt_tokens, int32_t num_choices, Clock::time_point arrival);

  Metrics* const metrics_;
  const int32_t prompt_tokens_;
  const Clock::time_point arrival_;
  std::vector<Clock::time_point> last_token_;  // [choices], arrival until the choice's first token
  int32_t tokens_ = 0;
  bool finished_ = false;
};

// Every metric of the process, prefix k3serve_. Counters and histograms are fed by the hooks; gauges and engine totals
// are read from the engine at each Render, so they are right while it idles too. Thread-safe. Must outlive every
// RequestMetrics made from it, and the engine that it observes: of the engine's events it takes the steps only, since
// requests are counted by the service, which also sees those that the engine never gets.
class Metrics : public EngineObserver {
 public:
  struct Options {
    std::string version;
    std::string commit;
    std::string model_name;     // the first served name
    bool vllm_aliases = false;  // --metrics-compat vllm
  };
  explicit Metrics(Options options);

  // From now on Render reports this engine. `load` is called from Render's caller; pass an empty function before the
  // engine goes.
  void WatchEngine(std::function<EngineLoad()> load, const EngineLimits& limits);

  // The ranks' collectives, read at each Render and after each step. Call it before clients come; pass an empty
  // function before the ranks go.
  void WatchCollectives(std::function<CollectiveTotals()> totals);

  // The engine took the request.
  std::unique_ptr<RequestMetrics> OnAccepted(int32_t prompt_tokens, int32_t num_choices,
                                             Clock::time_point arrival = Clock::now());
  // A request that the engine never got, by the status code that the client saw.
  void OnRejected(absl::StatusCode code);
  using EngineObserver::OnRejected;
  void OnStep(const StepStats& stats) override;
  // Prompt tokens that steps have computed so far, for rates: the engine's own total counts them on arrival.
  uint64_t prefill_tokens() const { return static_cast<uint64_t>(prefill_tokens_.Value()); }

  // Totals of the trace export.
  void SetSpans(uint64_t exported, uint64_t dropped);

  // Prometheus text format 0.0.4.
  std::string Render();

  // What the HTTP front end sends with it.
  static constexpr char kContentType[] = "text/plain; version=0.0.4; charset=utf-8";

 private:
  friend class RequestMetrics;
  void ReadEngine();
  void ReadProcess();
  void ReadCollectives();
  void AddVllmAliases(std::vector<prometheus::MetricFamily>& families) const;

  const Options options_;
  prometheus::Registry registry_;

  // Read at Render.
  prometheus::Gauge& requests_running_;
  prometheus::Gauge& requests_waiting_;
  prometheus::Gauge& latent_pages_used_;
  prometheus::Gauge& latent_pages_cached_;
  prometheus::Gauge& latent_pages_total_;
  prometheus::Gauge& latent_pages_peak_;
  prometheus::Gauge& state_slots_used_;
  prometheus::Gauge& state_slots_total_;
  prometheus::Gauge& state_slots_peak_;
  prometheus::Gauge& snapshots_used_;
  prometheus::Gauge& snapshots_total_;
  prometheus::Gauge& pages_binding_;  // 1 for the pool that is fuller, 0 for the other
  prometheus::Gauge& slots_binding_;
  prometheus::Gauge& seconds_since_step_;
  prometheus::Gauge& engine_healthy_;
  prometheus::Counter& steps_;
  prometheus::Counter& prefix_query_tokens_;
  prometheus::Counter& prefix_page_hit_tokens_;
  prometheus::Counter& prefix_hit_tokens_;
  prometheus::Counter& preemptions_;
  prometheus::Counter& nonfinite_rows_;
  prometheus::Counter& verified_hits_;
  prometheus::Counter& hit_disagreements_;
  prometheus::Gauge& process_start_time_;
  prometheus::Gauge& resident_bytes_;
  prometheus::Gauge& open_files_;

  // Fed by the hooks.
  prometheus::Counter& spans_exported_;
  prometheus::Counter& spans_dropped_;
  prometheus::Counter& prefill_tokens_;
  prometheus::Counter& requests_accepted_;
  std::array<prometheus::Counter*, kNumOutcomes> requests_finished_;
  prometheus::Family<prometheus::Counter>& rejected_;
  prometheus::Counter& prompt_tokens_;
  prometheus::Counter& generation_tokens_;
  prometheus::Counter& replies_without_content_;
  prometheus::Histogram& time_to_first_token_;
  prometheus::Histogram& inter_token_latency_;
  prometheus::Histogram& e2e_request_latency_;
  prometheus::Histogram& queue_time_;
  prometheus::Histogram& prefill_time_;
  prometheus::Histogram& decode_time_;
  prometheus::Histogram& request_prompt_tokens_;
  prometheus::Histogram& request_generation_tokens_;
  prometheus::Histogram& step_duration_;
  prometheus::Histogram& step_batch_tokens_;
  prometheus::Histogram& step_group_imbalance_;
  prometheus::Histogram& step_collectives_;
  prometheus::Family<prometheus::Counter>& collective_calls_;
  prometheus::Family<prometheus::Counter>& collective_bytes_;
  prometheus::Family<prometheus::Counter>& collective_seconds_;
  RoutingMetrics routing_;

  std::mutex mutex_;  // guards the members below and makes a Render one picture
  std::function<EngineLoad()> load_;
  EngineLimits limits_;
  EngineLoad last_load_;  // what the engine counters already hold

  std::mutex collectives_mutex_;  // guards the next two; taken after mutex_
  std::function<CollectiveTotals()> collectives_;
  double last_step_seconds_ = 0;  // in collectives up to the last step, over all ranks
};

}  // namespace k3
