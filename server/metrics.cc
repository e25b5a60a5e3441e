#include "server/metrics.h"

#include <prometheus/text_serializer.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

using prometheus::BuildCounter;
using prometheus::BuildGauge;
using prometheus::BuildHistogram;
using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Labels;
using prometheus::Registry;

using Buckets = Histogram::BucketBoundaries;

// Seconds, from half a millisecond (a decode step of a small model) to an hour: the prefill of a million tokens.
const Buckets& LatencyBuckets() {
  static const Buckets buckets{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5,  0.75, 1,   2.5,
                               5,      7.5,   10,     20,    40,   60,    120,  300,   600, 1200, 1800, 2700, 3600};
  return buckets;
}

// Gaps between tokens: finer below 100 ms, where the service levels are; long ones are stalls.
const Buckets& GapBuckets() {
  static const Buckets buckets{0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025,
                               0.03,   0.04,  0.05,  0.075, 0.1,   0.15,  0.2,  0.3,   0.5,  0.75,
                               1,      2.5,   5,     10,    30,    60,    300,  900,   3600};
  return buckets;
}

// Tokens, to the model's 1,048,576.
const Buckets& TokenBuckets() {
  static const Buckets buckets{1,    2,    5,     10,    20,    50,     100,    200,    500,    1000,
                               2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1048576};
  return buckets;
}

const Buckets& BatchBuckets() {
  static const Buckets buckets{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};
  return buckets;
}

// Of a largest share over the mean: 1 is even.
const Buckets& ImbalanceBuckets() {
  static const Buckets buckets{1, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 2, 3, 4, 8, 16, 64};
  return buckets;
}

Family<Gauge>& GaugeFamily(Registry& registry, const std::string& name, const std::string& help) {
  return BuildGauge().Name(absl::StrCat("k3serve_", name)).Help(help).Register(registry);
}

Gauge& MakeGauge(Registry& registry, const std::string& name, const std::string& help) {
  return GaugeFamily(registry, name, help).Add({});
}

Family<Counter>& CounterFamily(Registry& registry, const std::string& name, const std::string& help) {
  return BuildCounter().Name(absl::StrCat("k3serve_", name)).Help(help).Register(registry);
}

Counter& MakeCounter(Registry& registry, const std::string& name, const std::string& help) {
  return CounterFamily(registry, name, help).Add({});
}

Histogram& MakeHistogram(Registry& registry, const std::string& name, const std::string& help, const Buckets& buckets) {
  return BuildHistogram().Name(absl::StrCat("k3serve_", name)).Help(help).Register(registry).Add({}, buckets);
}

// Prometheus' usual names of process figures carry no program prefix.
Gauge& ProcessGauge(Registry& registry, const std::string& name, const std::string& help) {
  return BuildGauge().Name(name).Help(help).Register(registry).Add({});
}

constexpr char kBindingHelp[] =
    "1 for the pool that limits the number of sequences now (the fuller one), 0 for the other; both 0 when empty";

Gauge& BindingGauge(Registry& registry, const std::string& pool) {
  return GaugeFamily(registry, "pool_binding", kBindingHelp).Add({{"pool", pool}});
}

std::string RejectReason(absl::StatusCode code) { return absl::AsciiStrToLower(absl::StatusCodeToString(code)); }

// The engine's totals never fall; a counter that did would read as a restart.
void Advance(Counter& counter, uint64_t before, uint64_t now) {
  if (now > before) counter.Increment(static_cast<double>(now - before));
}

double Ratio(double part, double whole) { return whole > 0 ? part / whole : 0; }

}  // namespace

Metrics::Metrics(Options options)
    : options_(std::move(options)),
      requests_running_(MakeGauge(registry_, "requests_running", "Requests that hold a state slot")),
      requests_waiting_(MakeGauge(registry_, "requests_waiting", "Accepted requests without a state slot")),
      latent_pages_used_(MakeGauge(registry_, "latent_pages_used", "Latent pages held by live sequences")),
      latent_pages_cached_(MakeGauge(registry_, "latent_pages_cached",
                                     "Latent pages held by the prefix cache alone; free for whoever needs them")),
      latent_pages_total_(MakeGauge(registry_, "latent_pages_total", "Latent pages of the pool")),
      latent_pages_peak_(MakeGauge(registry_, "latent_pages_peak", "Most latent pages ever held by live sequences")),
      state_slots_used_(MakeGauge(registry_, "state_slots_used", "Recurrent-state slots held by live sequences")),
      state_slots_total_(MakeGauge(registry_, "state_slots_total", "Recurrent-state slots of the pool")),
      state_slots_peak_(MakeGauge(registry_, "state_slots_peak", "Most recurrent-state slots ever held")),
      snapshots_used_(MakeGauge(registry_, "snapshots_used", "Snapshot slots held by the prefix cache")),
      snapshots_total_(MakeGauge(registry_, "snapshots_total", "Snapshot slots of the pool")),
      pages_binding_(BindingGauge(registry_, "latent_pages")),
      slots_binding_(BindingGauge(registry_, "state_slots")),
      seconds_since_step_(
          MakeGauge(registry_, "seconds_since_step", "Seconds since the last finished step; 0 when there is no work")),
      engine_healthy_(MakeGauge(registry_, "engine_healthy", "0 while loading and after a device fault")),
      steps_(MakeCounter(registry_, "steps_total", "Finished engine steps")),
      prefix_query_tokens_(
          MakeCounter(registry_, "prefix_cache_query_tokens_total", "Prompt tokens looked up in the prefix cache")),
      prefix_page_hit_tokens_(
          MakeCounter(registry_, "prefix_cache_page_hit_tokens_total", "Prompt tokens whose latent pages were found")),
      prefix_hit_tokens_(MakeCounter(registry_, "prefix_cache_hit_tokens_total",
                                     "Prompt tokens resumed from pages and a state snapshot")),
      preemptions_(MakeCounter(registry_, "preemptions_total", "Sequences released and computed again")),
      nonfinite_rows_(MakeCounter(registry_, "nonfinite_rows_total", "Logit rows with a NaN or infinity")),
      verified_hits_(
          MakeCounter(registry_, "prefix_cache_verified_hits_total", "Prefix hits recomputed by --verify-hits")),
      hit_disagreements_(
          MakeCounter(registry_, "prefix_cache_hit_disagreements_total", "Verified prefix hits that did not agree")),
      process_start_time_(
          ProcessGauge(registry_, "process_start_time_seconds", "Start of the process, seconds since 1970")),
      resident_bytes_(ProcessGauge(registry_, "process_resident_memory_bytes", "Resident memory")),
      open_files_(ProcessGauge(registry_, "process_open_fds", "Open file descriptors")),
      spans_exported_(MakeCounter(registry_, "trace_spans_exported_total", "Spans that the collector took")),
      spans_dropped_(MakeCounter(registry_, "trace_spans_dropped_total",
                                 "Spans dropped because the collector was slow, away or refused them")),
      prefill_tokens_(
          MakeCounter(registry_, "prefill_tokens_total",
                      "Tokens computed in chunks of more than one: no cached ones, those computed again after "
                      "preemption twice")),
      requests_accepted_(MakeCounter(registry_, "requests_accepted_total", "Requests that the engine took")),
      rejected_(CounterFamily(registry_, "rejected_total", "Requests that the engine never got, by status code")),
      prompt_tokens_(MakeCounter(registry_, "prompt_tokens_total", "Prompt tokens of accepted requests")),
      generation_tokens_(MakeCounter(registry_, "generation_tokens_total", "Generated tokens, stop tokens included")),
      replies_without_content_(MakeCounter(registry_, "replies_without_content_total",
                                           "Replies cut by the token limit before any content: reasoning only")),
      time_to_first_token_(MakeHistogram(registry_, "time_to_first_token_seconds",
                                         "From arrival to the first generated token", LatencyBuckets())),
      inter_token_latency_(
          MakeHistogram(registry_, "inter_token_latency_seconds", "Between two tokens of one choice", GapBuckets())),
      e2e_request_latency_(
          MakeHistogram(registry_, "e2e_request_latency_seconds", "From arrival to the end", LatencyBuckets())),
      queue_time_(MakeHistogram(registry_, "queue_time_seconds", "Waiting for a slot and pages", LatencyBuckets())),
      prefill_time_(
          MakeHistogram(registry_, "prefill_time_seconds", "From the first slot to the first token", LatencyBuckets())),
      decode_time_(
          MakeHistogram(registry_, "decode_time_seconds", "From the first token to the last", LatencyBuckets())),
      request_prompt_tokens_(
          MakeHistogram(registry_, "request_prompt_tokens", "Prompt tokens of a request", TokenBuckets())),
      request_generation_tokens_(MakeHistogram(registry_, "request_generation_tokens",
                                               "Generated tokens of a request, over its choices", TokenBuckets())),
      step_duration_(MakeHistogram(registry_, "step_duration_seconds", "Wall time of an engine step", GapBuckets())),
      step_batch_tokens_(
          MakeHistogram(registry_, "step_batch_tokens", "Tokens in an engine step, over its ranks", BatchBuckets())),
      step_group_imbalance_(MakeHistogram(registry_, "step_group_tokens_max_over_mean",
                                          "Most tokens of a data-parallel group in a step over the mean of the groups",
                                          ImbalanceBuckets())),
      step_collectives_(MakeHistogram(registry_, "step_collective_seconds",
                                      "Time in collectives of a step, mean of this process's CPU ranks; on GPUs none",
                                      GapBuckets())),
      collective_calls_(CounterFamily(registry_, "collectives_total", "Collectives of this process's ranks, by kind")),
      collective_bytes_(CounterFamily(registry_, "collective_bytes_total",
                                      "Bytes that this process's ranks sent to others in collectives, by kind")),
      collective_seconds_(CounterFamily(registry_, "collective_seconds_total",
                                        "Time in collectives by kind, over this process's ranks; of GPUs the first's "
                                        "alone, and only of profiled steps")),
      routing_(registry_) {
  Family<Counter>& finished =
      CounterFamily(registry_, "requests_finished_total", "Accepted requests by how they ended");
  for (int i = 0; i < kNumOutcomes; ++i) {
    requests_finished_[static_cast<size_t>(i)] = &finished.Add({{"reason", OutcomeName(static_cast<Outcome>(i))}});
  }
  // A series that is there from the start lets rate() see the first event.
  for (const absl::StatusCode code :
       {absl::StatusCode::kInvalidArgument, absl::StatusCode::kNotFound, absl::StatusCode::kFailedPrecondition,
        absl::StatusCode::kResourceExhausted, absl::StatusCode::kUnavailable, absl::StatusCode::kUnimplemented}) {
    rejected_.Add({{"reason", RejectReason(code)}});
  }
  GaugeFamily(registry_, "build_info", "Always 1")
      .Add({{"version", options_.version}, {"commit", options_.commit}, {"model_name", options_.model_name}})
      .Set(1);
  process_start_time_.Set(std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count());
}

void Metrics::WatchEngine(std::function<EngineLoad()> load, const EngineLimits& limits) {
  const std::lock_guard<std::mutex> lock(mutex_);
  load_ = std::move(load);
  limits_ = limits;
  last_load_ = EngineLoad();
}

std::unique_ptr<RequestMetrics> Metrics::OnAccepted(int32_t prompt_tokens, int32_t num_choices,
                                                    Clock::time_point arrival) {
  requests_accepted_.Increment();
  prompt_tokens_.Increment(prompt_tokens);
  return std::unique_ptr<RequestMetrics>(new RequestMetrics(this, prompt_tokens, num_choices, arrival));
}

void Metrics::OnRejected(absl::StatusCode code) { rejected_.Add({{"reason", RejectReason(code)}}).Increment(); }

void Metrics::OnStep(const StepStats& stats) {
  step_duration_.Observe(stats.seconds);
  step_batch_tokens_.Observe(stats.tokens);
  prefill_tokens_.Increment(stats.prefill_tokens);
  if (stats.groups > 1 && stats.tokens > 0) {
    step_group_imbalance_.Observe(static_cast<double>(stats.most_tokens) * stats.groups / stats.tokens);
  }
  const std::lock_guard<std::mutex> lock(collectives_mutex_);
  if (!collectives_) return;
  const CollectiveTotals totals = collectives_();
  const double seconds = totals.seconds();
  if (seconds > last_step_seconds_) step_collectives_.Observe((seconds - last_step_seconds_) / totals.ranks);
  last_step_seconds_ = seconds;
}

void Metrics::WatchCollectives(std::function<CollectiveTotals()> totals) {
  const std::lock_guard<std::mutex> lock(collectives_mutex_);
  collectives_ = std::move(totals);
  if (!collectives_) return;
  last_step_seconds_ = collectives_().seconds();  // loading and the self-check are no steps
  for (int i = 0; i < kCollectives; ++i) {
    const Labels labels{{"kind", Name(static_cast<Collective>(i))}};
    for (Family<Counter>* family : {&collective_calls_, &collective_bytes_, &collective_seconds_}) family->Add(labels);
  }
}

void Metrics::ReadCollectives() {
  const std::lock_guard<std::mutex> lock(collectives_mutex_);
  if (!collectives_) return;
  const CollectiveTotals totals = collectives_();
  const auto raise = [](Counter& counter, double now) {
    if (now > counter.Value()) counter.Increment(now - counter.Value());
  };
  for (int i = 0; i < kCollectives; ++i) {
    const CollectiveTotals::Kind& kind = totals[static_cast<Collective>(i)];
    const Labels labels{{"kind", Name(static_cast<Collective>(i))}};
    raise(collective_calls_.Add(labels), static_cast<double>(kind.calls));
    raise(collective_bytes_.Add(labels), static_cast<double>(kind.bytes));
    raise(collective_seconds_.Add(labels), kind.seconds);
  }
}

void Metrics::SetSpans(uint64_t exported, uint64_t dropped) {
  Advance(spans_exported_, static_cast<uint64_t>(spans_exported_.Value()), exported);
  Advance(spans_dropped_, static_cast<uint64_t>(spans_dropped_.Value()), dropped);
}

void Metrics::ReadEngine() {
  if (!load_) {
    engine_healthy_.Set(0);
    return;
  }
  const EngineLoad load = load_();
  requests_running_.Set(load.running);
  requests_waiting_.Set(load.waiting);
  latent_pages_used_.Set(static_cast<double>(load.pages_used));
  latent_pages_cached_.Set(static_cast<double>(load.pages_cached));
  latent_pages_total_.Set(static_cast<double>(load.pages_total));
  latent_pages_peak_.Set(static_cast<double>(load.pages_peak));
  state_slots_used_.Set(load.state_slots_used);
  state_slots_total_.Set(load.state_slots_total);
  state_slots_peak_.Set(load.state_slots_peak);
  snapshots_used_.Set(load.snapshots_used);
  snapshots_total_.Set(load.snapshots_total);
  const double pages = Ratio(static_cast<double>(load.pages_used), static_cast<double>(load.pages_total));
  const double slots = Ratio(load.state_slots_used, load.state_slots_total);
  pages_binding_.Set(pages > slots ? 1 : 0);
  slots_binding_.Set(slots > 0 && slots >= pages ? 1 : 0);
  seconds_since_step_.Set(load.seconds_since_step);
  engine_healthy_.Set(load.healthy ? 1 : 0);
  Advance(steps_, last_load_.steps, load.steps);
  Advance(prefix_query_tokens_, last_load_.prefix_query_tokens, load.prefix_query_tokens);
  Advance(prefix_page_hit_tokens_, last_load_.prefix_page_hit_tokens, load.prefix_page_hit_tokens);
  Advance(prefix_hit_tokens_, last_load_.prefix_hit_tokens, load.prefix_hit_tokens);
  Advance(preemptions_, last_load_.preemptions, load.preemptions);
  Advance(nonfinite_rows_, last_load_.nonfinite_rows, load.nonfinite_rows);
  Advance(verified_hits_, last_load_.verified_hits, load.verified_hits);
  Advance(hit_disagreements_, last_load_.hit_disagreements, load.hit_disagreements);
  routing_.Set(load.routing);
  last_load_ = load;
}

void Metrics::ReadProcess() {
  int64_t size_pages = 0;
  int64_t resident_pages = 0;
  if (std::ifstream statm("/proc/self/statm"); statm >> size_pages >> resident_pages) {
    resident_bytes_.Set(static_cast<double>(resident_pages) * static_cast<double>(sysconf(_SC_PAGESIZE)));
  }
  std::error_code error;
  const std::filesystem::directory_iterator files("/proc/self/fd", error);
  if (!error) open_files_.Set(static_cast<double>(std::distance(begin(files), end(files))));
}

std::string Metrics::Render() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ReadEngine();
  ReadProcess();
  ReadCollectives();
  std::vector<prometheus::MetricFamily> families = registry_.Collect();
  if (options_.vllm_aliases) AddVllmAliases(families);
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families);
  return out.str();
}

}  // namespace k3
