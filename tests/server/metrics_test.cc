#include "server/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#include "tests/testing/prometheus_text.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing::PrometheusText;

// What 1.5 of the serving contract promises, with the types that dashboards rely on.
struct Promised {
  const char* name;
  const char* type;
};
constexpr Promised kPromised[] = {
    {"requests_running", "gauge"},
    {"requests_waiting", "gauge"},
    {"latent_pages_used", "gauge"},
    {"latent_pages_total", "gauge"},
    {"state_slots_used", "gauge"},
    {"state_slots_total", "gauge"},
    {"snapshots_used", "gauge"},
    {"snapshots_total", "gauge"},
    {"prefix_cache_query_tokens_total", "counter"},
    {"prefix_cache_page_hit_tokens_total", "counter"},
    {"prefix_cache_hit_tokens_total", "counter"},
    {"prompt_tokens_total", "counter"},
    {"generation_tokens_total", "counter"},
    {"requests_finished_total", "counter"},
    {"preemptions_total", "counter"},
    {"nonfinite_rows_total", "counter"},
    {"rejected_total", "counter"},
    {"time_to_first_token_seconds", "histogram"},
    {"inter_token_latency_seconds", "histogram"},
    {"e2e_request_latency_seconds", "histogram"},
    {"queue_time_seconds", "histogram"},
    {"prefill_time_seconds", "histogram"},
    {"decode_time_seconds", "histogram"},
    {"request_prompt_tokens", "histogram"},
    {"request_generation_tokens", "histogram"},
    {"step_duration_seconds", "histogram"},
    {"step_batch_tokens", "histogram"},
};

PrometheusText Page(Metrics& metrics) {
  const std::string text = metrics.Render();
  absl::StatusOr<PrometheusText> page = PrometheusText::Parse(text);
  EXPECT_TRUE(page.ok()) << page.status() << "\n" << text;
  return page.ok() ? *std::move(page) : PrometheusText();
}

Metrics::Options Named(bool aliases = false) { return {"0.1.0", "abc", "kimi \"k3\"\\x", aliases}; }

RequestUsage Usage(int32_t prompt, int32_t completion) {
  RequestUsage usage;
  usage.prompt_tokens = prompt;
  usage.completion_tokens = completion;
  usage.queue_seconds = 0.5;
  usage.prefill_seconds = 2;
  usage.decode_seconds = 3;
  return usage;
}

TEST(MetricsTest, EveryPromisedMetricIsThereBeforeAnyRequest) {
  Metrics metrics(Named());
  const PrometheusText page = Page(metrics);
  for (const Promised& promised : kPromised) {
    const auto it = page.families().find(std::string("k3serve_") + promised.name);
    ASSERT_NE(it, page.families().end()) << promised.name;
    EXPECT_EQ(it->second.type, promised.type) << promised.name;
    EXPECT_FALSE(it->second.help.empty()) << promised.name;
  }
  EXPECT_EQ(
      page.Value("k3serve_build_info", {{"version", "0.1.0"}, {"commit", "abc"}, {"model_name", "kimi \"k3\"\\x"}}), 1);
  EXPECT_GT(page.Value("process_resident_memory_bytes"), 1e6);
  EXPECT_GE(page.Value("process_open_fds"), 3);
}

TEST(MetricsTest, BucketsReachAnHour) {
  Metrics metrics(Named());
  const PrometheusText page = Page(metrics);
  for (const char* name : {"time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
                           "queue_time_seconds", "prefill_time_seconds", "decode_time_seconds"}) {
    EXPECT_EQ(page.Value(std::string("k3serve_") + name + "_bucket", {{"le", "3600"}}), 0) << name;
  }
}

TEST(MetricsTest, GaugesFollowTheEngineWithoutSteps) {
  Metrics metrics(Named());
  EXPECT_EQ(Page(metrics).Value("k3serve_engine_healthy"), 0);

  EngineLoad load;
  load.running = 20;
  load.waiting = 20;
  load.pages_used = 90;
  load.pages_cached = 5;
  load.pages_total = 100;
  load.state_slots_used = 2;
  load.state_slots_total = 8;
  load.snapshots_used = 3;
  load.snapshots_total = 4;
  load.preemptions = 7;
  metrics.WatchEngine([&load] { return load; }, EngineLimits());
  PrometheusText page = Page(metrics);
  EXPECT_EQ(page.Value("k3serve_requests_running"), 20);
  EXPECT_EQ(page.Value("k3serve_requests_waiting"), 20);
  EXPECT_EQ(page.Value("k3serve_latent_pages_used"), 90);
  EXPECT_EQ(page.Value("k3serve_latent_pages_cached"), 5);
  EXPECT_EQ(page.Value("k3serve_snapshots_used"), 3);
  EXPECT_EQ(page.Value("k3serve_preemptions_total"), 7);
  EXPECT_EQ(page.Value("k3serve_engine_healthy"), 1);
  EXPECT_EQ(page.Value("k3serve_pool_binding", {{"pool", "latent_pages"}}), 1);
  EXPECT_EQ(page.Value("k3serve_pool_binding", {{"pool", "state_slots"}}), 0);

  // All cancelled: no step runs, yet the next scrape shows it.
  load.running = load.waiting = 0;
  load.pages_used = 0;
  load.state_slots_used = 0;
  page = Page(metrics);
  EXPECT_EQ(page.Value("k3serve_requests_running"), 0);
  EXPECT_EQ(page.Value("k3serve_requests_waiting"), 0);
  EXPECT_EQ(page.Value("k3serve_latent_pages_used"), 0);
  EXPECT_EQ(page.Value("k3serve_pool_binding", {{"pool", "state_slots"}}), 0);
  EXPECT_EQ(page.Value("k3serve_preemptions_total"), 7) << "a second scrape must not count the total again";
}

TEST(MetricsTest, TotalsEqualTheSumsOfTheRequests) {
  Metrics metrics(Named());
  const Clock::time_point start = Clock::now();
  const auto at = [start](double seconds) {
    return start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  };
  for (int i = 0; i < 5; ++i) {  // five that end, five cancelled in prefill, five in decode, five refused
    auto normal = metrics.OnAccepted(100, 1, start);
    normal->OnToken(0, at(2.5));
    normal->OnToken(0, at(2.6));
    normal->OnToken(0, at(2.9));
    normal->OnFinished(i < 2 ? Outcome::kStop : Outcome::kLength, Usage(100, 3), at(3));
    auto early = metrics.OnAccepted(200, 1, start);
    early->OnFinished(Outcome::kAbort, RequestUsage{.prompt_tokens = 200}, at(1));
    auto late = metrics.OnAccepted(50, 1, start);
    late->OnToken(0, at(2.5));
    late->OnFinished(Outcome::kAbort, Usage(50, 2), at(3));  // one token was never told to the sink
    metrics.OnRejected(absl::StatusCode::kInvalidArgument);
  }
  const PrometheusText page = Page(metrics);
  EXPECT_EQ(page.Value("k3serve_requests_accepted_total"), 15);
  EXPECT_EQ(page.Sum("k3serve_requests_finished_total"), 15);
  EXPECT_EQ(page.Value("k3serve_requests_finished_total", {{"reason", "stop"}}), 2);
  EXPECT_EQ(page.Value("k3serve_requests_finished_total", {{"reason", "length"}}), 3);
  EXPECT_EQ(page.Value("k3serve_requests_finished_total", {{"reason", "abort"}}), 10);
  EXPECT_EQ(page.Value("k3serve_rejected_total", {{"reason", "invalid_argument"}}), 5);
  EXPECT_EQ(page.Value("k3serve_prompt_tokens_total"), 5 * 350);
  EXPECT_EQ(page.Value("k3serve_request_prompt_tokens_sum"), 5 * 350);
  EXPECT_EQ(page.Value("k3serve_generation_tokens_total"), 5 * (3 + 2));
  EXPECT_EQ(page.Value("k3serve_request_generation_tokens_sum"), 5 * (3 + 2));

  EXPECT_EQ(page.Value("k3serve_time_to_first_token_seconds_count"), 10);
  EXPECT_NEAR(page.Value("k3serve_time_to_first_token_seconds_sum"), 25, 1e-6);
  EXPECT_EQ(page.Value("k3serve_inter_token_latency_seconds_count"), 10);
  EXPECT_NEAR(page.Value("k3serve_inter_token_latency_seconds_sum"), 5 * 0.4, 1e-6);
  EXPECT_EQ(page.Value("k3serve_e2e_request_latency_seconds_count"), 15);
  EXPECT_EQ(page.Value("k3serve_prefill_time_seconds_count"), 10) << "no sample for a phase that was not reached";
  EXPECT_EQ(page.Value("k3serve_decode_time_seconds_count"), 10);
}

TEST(MetricsTest, EveryRequestEndsInOneOutcome) {
  Metrics metrics(Named());
  {
    auto dropped = metrics.OnAccepted(1, 1);
    dropped->OnToken(0);
    auto twice = metrics.OnAccepted(1, 1);
    twice->OnFinished(Outcome::kStop, Usage(1, 0));
    twice->OnFinished(Outcome::kError, Usage(1, 9));
  }
  const PrometheusText page = Page(metrics);
  EXPECT_EQ(page.Sum("k3serve_requests_finished_total"), 2);
  EXPECT_EQ(page.Value("k3serve_requests_finished_total", {{"reason", "error"}}), 1);
  EXPECT_EQ(page.Value("k3serve_request_generation_tokens_sum"), 1);
}

TEST(MetricsTest, GapsAreTakenPerChoice) {
  Metrics metrics(Named());
  const Clock::time_point start = Clock::now();
  auto request = metrics.OnAccepted(8, 2, start);
  request->OnToken(0, start + std::chrono::seconds(1));
  request->OnToken(1, start + std::chrono::seconds(2));
  request->OnToken(0, start + std::chrono::seconds(4));
  request->OnToken(7, start + std::chrono::seconds(5));  // no such choice
  request->OnFinished(Outcome::kLength, Usage(8, 3));
  const PrometheusText page = Page(metrics);
  EXPECT_EQ(page.Value("k3serve_time_to_first_token_seconds_sum"), 1);
  EXPECT_EQ(page.Value("k3serve_inter_token_latency_seconds_count"), 1);
  EXPECT_EQ(page.Value("k3serve_inter_token_latency_seconds_sum"), 3);
}

TEST(MetricsTest, OutcomesComeFromStatusFirst) {
  EXPECT_EQ(OutcomeOf(absl::OkStatus(), FinishReason::kStop), Outcome::kStop);
  EXPECT_EQ(OutcomeOf(absl::OkStatus(), FinishReason::kLength), Outcome::kLength);
  EXPECT_EQ(OutcomeOf(absl::OkStatus(), FinishReason::kRepetition), Outcome::kRepetition);
  EXPECT_EQ(OutcomeOf(absl::CancelledError(), FinishReason::kStop), Outcome::kAbort);
  EXPECT_EQ(OutcomeOf(absl::DeadlineExceededError(""), FinishReason::kCancelled), Outcome::kDeadline);
  EXPECT_EQ(OutcomeOf(absl::InternalError(""), FinishReason::kError), Outcome::kError);
  EXPECT_EQ(OutcomeOf(absl::UnavailableError(""), FinishReason::kCancelled), Outcome::kError);
}

TEST(MetricsTest, VllmAliasesAreAddedOnDemand) {
  Metrics plain(Named());
  EXPECT_THAT(plain.Render(), Not(HasSubstr("vllm:")));

  Metrics metrics(Named(/*aliases=*/true));
  EngineLoad load;
  load.running = 3;
  load.pages_used = 25;
  load.pages_total = 100;
  load.state_slots_used = 8;  // full, and must not show in the page gauge
  load.state_slots_total = 8;
  EngineLimits limits;
  limits.page_size = 64;
  limits.latent_pages = 100;
  metrics.WatchEngine([&load] { return load; }, limits);
  metrics.OnAccepted(5, 1)->OnFinished(Outcome::kStop, Usage(5, 0));
  const PrometheusText page = Page(metrics);
  testing::PrometheusLabels labels = {{"model_name", "kimi \"k3\"\\x"}, {"engine", "0"}};
  EXPECT_EQ(page.Value("vllm:num_requests_running", labels), 3);
  EXPECT_EQ(page.Value("vllm:num_requests_waiting", labels), 0);
  EXPECT_EQ(page.Value("vllm:kv_cache_usage_perc", labels), 0.25);
  EXPECT_EQ(page.Value("vllm:prompt_tokens_total", labels), 5);
  EXPECT_EQ(page.Value("vllm:e2e_request_latency_seconds_count", labels), 1);
  for (const char* name :
       {"vllm:generation_tokens_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
        "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
        "vllm:request_prompt_tokens", "vllm:request_generation_tokens"}) {
    EXPECT_EQ(page.families().count(name), 1u) << name;
  }
  testing::PrometheusLabels stop = labels;
  stop["finished_reason"] = "stop";
  EXPECT_EQ(page.Value("vllm:request_success_total", stop), 1);
  testing::PrometheusLabels cache = labels;
  cache["block_size"] = "64";
  cache["num_gpu_blocks"] = "100";
  EXPECT_EQ(page.Value("vllm:cache_config_info", cache), 1);
}

TEST(MetricsTest, ExpertBalanceAppearsOnceTold) {
  Metrics metrics(Named());
  EXPECT_EQ(Page(metrics).families().count("k3serve_expert_load_max_over_mean"), 0u);
  EngineLoad load;
  metrics.WatchEngine([&load] { return load; }, EngineLimits());
  EXPECT_EQ(Page(metrics).families().count("k3serve_expert_load_max_over_mean"), 0u);
  load.routing.updates = 3;
  load.routing.layer_groups = 2;
  load.routing.last_layer[0] = 15;
  load.routing.first_layer[1] = 16;
  load.routing.last_layer[1] = 30;
  load.routing.max_over_mean[0] = 1.5f;
  load.routing.max_over_mean[1] = 1.0f;
  load.routing.alarms = 2;
  Page(metrics);
  load.routing.max_over_mean[0] = 1.25f;
  load.routing.override_share = 0.125;
  load.routing.epoch = 17;
  load.routing.alarms = 5;
  const PrometheusText page = Page(metrics);
  EXPECT_EQ(page.Value("k3serve_expert_load_max_over_mean", {{"layer_group", "0-15"}}), 1.25);
  EXPECT_EQ(page.Value("k3serve_expert_load_max_over_mean", {{"layer_group", "16-30"}}), 1.0);
  EXPECT_EQ(page.Value("k3serve_routing_override_ratio"), 0.125);
  EXPECT_EQ(page.Value("k3serve_routing_epoch"), 17);
  EXPECT_EQ(page.Value("k3serve_routing_alarms_total"), 5);
  EXPECT_EQ(page.Value("k3serve_routing_updates_total"), 3);
}

TEST(MetricsTest, CollectivesByKindAndByStep) {
  Metrics metrics(Named());
  metrics.OnStep({.seconds = 0.01, .tokens = 3, .groups = 1, .most_tokens = 3});
  EXPECT_EQ(Page(metrics).families().count("k3serve_collective_bytes_total"), 0u);  // one rank has none
  CollectiveTotals totals;
  totals.ranks = 4;
  const auto kind = [&](Collective which) -> CollectiveTotals::Kind& {
    return totals.kinds[static_cast<size_t>(which)];
  };
  kind(Collective::kAllGather) = {10, 1000, 2.0};  // the self-check's: in the totals, in no step
  metrics.WatchCollectives([&] { return totals; });
  kind(Collective::kAllGather) = {12, 1500, 2.25};
  kind(Collective::kAllReduce) = {3, 300, 0.75};
  metrics.OnStep({.seconds = 0.5, .tokens = 8, .groups = 2, .most_tokens = 6});
  metrics.OnStep({.seconds = 0.5, .tokens = 8, .groups = 2, .most_tokens = 4});  // whose time nobody measured
  const PrometheusText page = Page(metrics);
  EXPECT_EQ(page.Value("k3serve_collectives_total", {{"kind", "all_gather"}}), 12);
  EXPECT_EQ(page.Value("k3serve_collective_bytes_total", {{"kind", "all_gather"}}), 1500);
  EXPECT_EQ(page.Value("k3serve_collective_seconds_total", {{"kind", "all_gather"}}), 2.25);
  EXPECT_EQ(page.Value("k3serve_collective_bytes_total", {{"kind", "all_reduce"}}), 300);
  EXPECT_EQ(page.Value("k3serve_collective_bytes_total", {{"kind", "all_to_all"}}), 0);
  EXPECT_EQ(page.Value("k3serve_step_collective_seconds_count"), 1);
  EXPECT_EQ(page.Value("k3serve_step_collective_seconds_sum"), 0.25);  // a second over four ranks
  EXPECT_EQ(page.Value("k3serve_step_group_tokens_max_over_mean_count"), 2);
  EXPECT_EQ(page.Value("k3serve_step_group_tokens_max_over_mean_sum"), 1.5 + 1.0);
  // The ranks go; the counters stay as they are.
  metrics.WatchCollectives({});
  EXPECT_EQ(Page(metrics).Value("k3serve_collectives_total", {{"kind", "all_gather"}}), 12);
}

TEST(MetricsTest, CountsFromManyThreadsWhileScraped) {
  Metrics metrics(Named(true));
  EngineLoad load;
  metrics.WatchEngine([&load] { return load; }, EngineLimits());
  constexpr int kThreads = 4;
  constexpr int kRequests = 50;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&metrics] {
      for (int i = 0; i < kRequests; ++i) {
        auto request = metrics.OnAccepted(10, 1);
        for (int k = 0; k < 4; ++k) request->OnToken(0);
        request->OnFinished(Outcome::kLength, Usage(10, 4));
        metrics.OnStep({.seconds = 0.01, .tokens = 4, .prefill_tokens = 3});
      }
    });
  }
  double last = 0;
  for (int i = 0; i < 10; ++i) {
    const double now = Page(metrics).Value("k3serve_generation_tokens_total");
    EXPECT_GE(now, last);
    last = now;
  }
  for (std::thread& thread : threads) thread.join();
  const PrometheusText page = Page(metrics);
  EXPECT_EQ(page.Value("k3serve_generation_tokens_total"), kThreads * kRequests * 4);
  EXPECT_EQ(page.Value("k3serve_step_batch_tokens_sum"), kThreads * kRequests * 4);
  EXPECT_EQ(page.Value("k3serve_prefill_tokens_total"), kThreads * kRequests * 3);
  EXPECT_EQ(metrics.prefill_tokens(), kThreads * kRequests * 3u);
}

TEST(PrometheusTextTest, RefusesWhatAParserWould) {
  const char* bad[] = {
      "x 1",                                                                       // no newline at the end
      "x 1\n",                                                                     // no type
      "# TYPE x counter\nx -1\n",                                                  // falling counter
      "# TYPE x counter\nx 1\nx 2\n",                                              // twice
      "# TYPE x gauge\nx{a=\"b} 1\n",                                              // open label
      "# TYPE x gauge\nx{a=\"b\",a=\"c\"} 1\n",                                    // label twice
      "# TYPE x gauge\ny 1\n",                                                     // other family
      "# TYPE x gauge\nx one\n",                                                   // not a number
      "# TYPE x gauge\nx 1\n# TYPE y gauge\ny 1\n# TYPE x gauge\nx{a=\"b\"} 1\n",  // split family
      "# TYPE x histogram\nx_bucket{le=\"1\"} 2\nx_bucket{le=\"+Inf\"} 1\nx_sum 1\nx_count 1\n",
      "# TYPE x histogram\nx_bucket{le=\"+Inf\"} 1\nx_sum 1\nx_count 2\n",
  };
  for (const char* text : bad) EXPECT_FALSE(PrometheusText::Parse(text).ok()) << text;
}

}  // namespace
}  // namespace k3
