#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <variant>

#include "server/commands/bench.h"
#include "server/grpc_server.h"
#include "tests/testing/mock_server.h"
#include "tests/testing/prometheus_text.h"

// What the metrics page says after requests of every kind have gone through the service: gauges show the present,
// every accepted request has one outcome, and totals are the sums of what clients saw.
namespace k3 {
namespace {

using testing::MockEngine;
using testing::MockService;
using testing::PrometheusText;

struct Served {
  explicit Served(MockEngine::Options engine) : service({.engine = std::move(engine), .service = {}}) {
    service.metrics.WatchEngine([this] { return service.engine.Load(); }, service.engine.Limits());
  }

  PrometheusText Page() {
    auto page = PrometheusText::Parse(service.metrics.Render());
    EXPECT_TRUE(page.ok()) << page.status();
    return page.ok() ? *std::move(page) : PrometheusText();
  }

  std::shared_ptr<ResponseStream> Start(size_t prompt_tokens, uint32_t max_new_tokens) {
    GenerationRequest request;
    request.request_id = "r";
    request.input = std::vector<uint32_t>(prompt_tokens, 5);
    request.stopping.max_new_tokens = max_new_tokens;
    request.stopping.ignore_eos = true;
    std::shared_ptr<ResponseStream> stream;
    service.generation.Start(std::move(request), std::make_shared<std::atomic<bool>>(false),
                             [&stream](absl::StatusOr<std::shared_ptr<ResponseStream>> made) {
                               if (made.ok()) stream = *std::move(made);
                             });
    if (stream != nullptr) streams.push_back(stream);
    return stream;
  }

  // Takes all events that wait, as a front end does. Returns the requests that have ended so far.
  int ReadAll() {
    for (const auto& stream : streams) {
      stream->Drain();
      for (StreamEvent event; stream->Next(&event);) {
        if (const auto* finished = std::get_if<FinishedEvent>(&event)) {
          ++ended;
          completion_tokens += finished->usage.completion_tokens;
        }
      }
    }
    return ended;
  }

  MockService service;
  std::vector<std::shared_ptr<ResponseStream>> streams;
  int ended = 0;
  int64_t completion_tokens = 0;
};

MockEngine::Options Manual(int max_num_seqs) {
  MockEngine::Options options;
  options.manual = true;
  options.prefill_chunk = 8;
  options.limits.max_num_seqs = max_num_seqs;
  return options;
}

TEST(MetricsFlowTest, GaugesAreZeroOnceAllIsCancelled) {
  Served served(Manual(20));
  for (int i = 0; i < 40; ++i) ASSERT_NE(served.Start(6, 100), nullptr);
  served.service.engine.Step();
  served.service.engine.Step();
  PrometheusText page = served.Page();
  EXPECT_EQ(page.Value("k3serve_requests_running"), 20);
  EXPECT_EQ(page.Value("k3serve_requests_waiting"), 20);
  EXPECT_GT(page.Value("k3serve_latent_pages_used"), 0);

  for (const auto& stream : served.streams) stream->Cancel();
  served.service.engine.Step();
  page = served.Page();
  EXPECT_EQ(page.Value("k3serve_requests_running"), 0);
  EXPECT_EQ(page.Value("k3serve_requests_waiting"), 0);
  EXPECT_EQ(page.Value("k3serve_latent_pages_used"), 0);
  EXPECT_EQ(page.Value("k3serve_state_slots_used"), 0);
  EXPECT_EQ(served.ReadAll(), 40);
  EXPECT_EQ(served.Page().Value("k3serve_requests_finished_total", {{"reason", "abort"}}), 40);
}

TEST(MetricsFlowTest, OutcomesAndTotalsAgreeWithTheClients) {
  Served served(Manual(64));
  std::vector<std::shared_ptr<ResponseStream>> in_prefill, in_decode;
  for (int i = 0; i < 5; ++i) {
    ASSERT_NE(served.Start(4, 3), nullptr);
    in_prefill.push_back(served.Start(1000, 3));
    in_decode.push_back(served.Start(4, 1000));
    ASSERT_NE(in_prefill.back(), nullptr);
    ASSERT_NE(in_decode.back(), nullptr);
    EXPECT_EQ(served.Start(4, 1u << 30), nullptr) << "more than any context";
  }
  for (int i = 0; i < 6; ++i) served.service.engine.Step();
  for (const auto& stream : in_prefill) stream->Cancel();
  for (const auto& stream : in_decode) stream->Cancel();
  served.service.engine.Step();
  ASSERT_EQ(served.ReadAll(), 15);

  const PrometheusText page = served.Page();
  EXPECT_EQ(page.Value("k3serve_requests_accepted_total"), 15);
  EXPECT_EQ(page.Value("k3serve_requests_finished_total", {{"reason", "length"}}), 5);
  EXPECT_EQ(page.Value("k3serve_requests_finished_total", {{"reason", "abort"}}), 10);
  EXPECT_EQ(page.Sum("k3serve_requests_finished_total"), 15);
  EXPECT_EQ(page.Sum("k3serve_rejected_total"), 5);
  EXPECT_EQ(page.Value("k3serve_prompt_tokens_total"), 5 * (4 + 1000 + 4));
  EXPECT_EQ(page.Value("k3serve_request_prompt_tokens_sum"), 5 * (4 + 1000 + 4));
  EXPECT_GT(served.completion_tokens, 15);
  EXPECT_EQ(page.Value("k3serve_generation_tokens_total"), served.completion_tokens);
  EXPECT_EQ(page.Value("k3serve_request_generation_tokens_sum"), served.completion_tokens);
  EXPECT_EQ(page.Value("k3serve_time_to_first_token_seconds_count"), 10) << "five never had a token";
}

TEST(MetricsFlowTest, TheLoadHarnessCountsTheSame) {
  MockEngine::Options options;
  options.step_time = std::chrono::milliseconds(1);
  Served served(options);
  const ApiKeys keys;
  GrpcServerOptions grpc_options;
  grpc_options.port = 0;
  const auto server = GrpcServer::Start(grpc_options, &served.service.generation, &served.service.health, &keys, {});
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string report = ::testing::TempDir() + "/metrics_flow_test.json";
  std::ostringstream out, err;
  ASSERT_EQ(
      RunBench({"--target", "127.0.0.1:" + std::to_string((*server)->port()), "--concurrency", "8", "--num-requests",
                "40", "--input-len", "32", "--output-len", "16", "--warmup", "0", "--json", report, "--no-progress"},
               out, err),
      0)
      << err.str();
  const auto run = nlohmann::json::parse(std::ifstream(report))["runs"][0];
  std::remove(report.c_str());
  (*server)->Shutdown(std::chrono::milliseconds(1000));

  const PrometheusText page = served.Page();
  EXPECT_EQ(run["completed"], 40);
  EXPECT_EQ(page.Value("k3serve_requests_accepted_total"), 40);
  EXPECT_EQ(page.Value("k3serve_requests_finished_total", {{"reason", "length"}}), 40);
  EXPECT_EQ(page.Value("k3serve_generation_tokens_total"), run["output_tokens"].get<double>());
  EXPECT_EQ(page.Value("k3serve_prompt_tokens_total"), run["prompt_tokens"].get<double>());
  EXPECT_EQ(page.Value("k3serve_time_to_first_token_seconds_count"), 40);
  EXPECT_EQ(page.Value("k3serve_inter_token_latency_seconds_count"), 40 * 15);
  // The server's clock starts later and stops earlier than the client's.
  const double server_mean = page.Value("k3serve_e2e_request_latency_seconds_sum") / 40;
  EXPECT_LE(server_mean, run["e2e_ms"]["mean"].get<double>() / 1000);
  EXPECT_GE(server_mean, 16 * 0.001);
}

}  // namespace
}  // namespace k3
