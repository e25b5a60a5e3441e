#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "server/commands/bench.h"
#include "tests/testing/scripted_server.h"

// The harness from flags to report, against servers whose every delay is known.
namespace k3 {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using testing::ReplyScript;
using testing::ScriptedGrpcServer;
using testing::ScriptedHttpServer;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Outcome {
  int code = -1;
  std::string out;
  std::string err;
  json report;
};

Outcome Bench(std::vector<std::string> args) {
  const std::string path =
      ::testing::TempDir() + "/bench_run_" + ::testing::UnitTest::GetInstance()->current_test_info()->name() + ".json";
  args.insert(args.end(), {"--json", path, "--save-requests", "--no-progress"});
  std::ostringstream out, err;
  Outcome outcome;
  outcome.code = RunBench(args, out, err);
  outcome.out = out.str();
  outcome.err = err.str();
  outcome.report = json::parse(ReadFile(path), nullptr, /*allow_exceptions=*/false);
  std::filesystem::remove(path);
  return outcome;
}

// Scripted: first token after 60 ms, then 9 messages of 2 tokens, 20 ms apart.
ReplyScript Paced() {
  ReplyScript script;
  script.first_ms = 60;
  script.gap_ms = 20;
  script.tokens_per_message = 2;
  return script;
}

// Sleeping and a busy machine only add time: lower bounds are strict, upper ones leave room.
void ExpectPacedFigures(const json& run, int requests) {
  EXPECT_EQ(run["completed"], requests);
  EXPECT_EQ(run["failed"], 0);
  EXPECT_EQ(run["output_tokens"], requests * 20);
  EXPECT_EQ(run["prompt_tokens"], requests * 16);
  EXPECT_EQ(run["cached_tokens"], requests * 2);
  EXPECT_EQ(run["itl_ms"]["count"], requests * 18);
  const double ttft = run["ttft_ms"]["p50"];
  EXPECT_GE(ttft, 60);
  EXPECT_LT(ttft, 200);
  EXPECT_NEAR(run["tpot_ms"]["p50"].get<double>(), 10, 4);
  EXPECT_NEAR(run["itl_ms"]["mean"].get<double>(), 10, 4);
  EXPECT_GE(run["longest_gap_ms"]["p50"].get<double>(), 19);
  const double e2e = run["e2e_ms"]["p50"];
  EXPECT_GE(e2e, 240);
  EXPECT_LT(e2e, 500);
  const double seconds = run["seconds"];
  EXPECT_NEAR(run["output_tokens_per_second"].get<double>(), requests * 20 / seconds, 1e-6);
}

const std::vector<std::string> kPacedArgs = {"--input-len", "16", "--output-len", "20", "--num-requests", "8"};

std::vector<std::string> With(std::vector<std::string> args, const std::vector<std::string>& more) {
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

TEST(BenchRunTest, ClosedLoopOverGrpc) {
  ScriptedGrpcServer server(Paced());
  const Outcome outcome = Bench(With(kPacedArgs, {"--target", server.target(), "--concurrency", "4"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json& run = outcome.report["runs"][0];
  ExpectPacedFigures(run, 8);
  EXPECT_EQ(run["load"]["concurrency"], 4);
  EXPECT_EQ(server.counts().most_running, 4);
  EXPECT_EQ(server.counts().requests, 8 + 1) << "one to warm up";
  EXPECT_GT(run["mean_in_flight"].get<double>(), 3);
  EXPECT_EQ(run["requests"].size(), 8u);
  EXPECT_EQ(run["requests"][0]["arrivals"].size(), 10u);
  EXPECT_THAT(outcome.out, HasSubstr("model scripted-model"));
  EXPECT_THAT(outcome.out, HasSubstr("time to first token p50 (ms)"));
}

TEST(BenchRunTest, ClosedLoopOverHttpInEveryForm) {
  for (const char* input : {"ids", "text", "chat"}) {
    ScriptedHttpServer server(Paced());
    const Outcome outcome = Bench(With(kPacedArgs, {"--url", server.url(), "--concurrency", "4", "--input", input}));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    json run = outcome.report["runs"][0];
    if (std::string(input) != "ids") {
      EXPECT_EQ(run["prompt_tokens"], 8 * 7) << "as the server counts";
      run["prompt_tokens"] = 8 * 16;
    }
    ExpectPacedFigures(run, 8);
    // The connections stay open and are used again: four, and those of the questions before.
    EXPECT_LE(server.counts().connections, 4 + 2 + 1);
  }
}

TEST(BenchRunTest, HttpWithoutTokenCountsTakesTheFinalUsage) {
  ReplyScript script = Paced();
  script.hide_tokens = true;
  ScriptedHttpServer server(script);
  const Outcome outcome = Bench(With(kPacedArgs, {"--url", server.url()}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.report["runs"][0]["output_tokens"], 8 * 20);
}

TEST(BenchRunTest, HttpConnectionsThatVanishAreReplaced) {
  ReplyScript script;
  script.close_silently = true;
  ScriptedHttpServer server(script);
  const Outcome outcome = Bench({"--url", server.url(), "--num-requests", "30", "--output-len", "2"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.report["runs"][0]["completed"], 30) << outcome.out;
}

TEST(BenchRunTest, OpenLoopDoesNotWaitForReplies) {
  ReplyScript script;
  script.first_ms = 400;  // far longer than the time between arrivals
  ScriptedGrpcServer server(script);
  const Outcome outcome = Bench({"--target", server.target(), "--request-rate", "100,inf", "--num-requests", "20",
                                 "--output-len", "1", "--warmup", "0", "--seed", "4"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json& paced = outcome.report["runs"][0];
  EXPECT_EQ(paced["completed"], 20);
  EXPECT_GE(server.counts().most_running, 15);
  double first = 1e9, last = 0;
  for (const json& request : paced["requests"]) {
    first = std::min(first, request["sent_ms"].get<double>());
    last = std::max(last, request["sent_ms"].get<double>());
    EXPECT_GE(request["sent_ms"].get<double>(), request["scheduled_ms"].get<double>());
  }
  EXPECT_NEAR(last - first, 190, 150) << "19 exponential gaps of 10 ms, and their spread";
  const json& burst = outcome.report["runs"][1];
  EXPECT_EQ(burst["load"]["request_rate"], "inf");
  EXPECT_EQ(burst["completed"], 20);
}

TEST(BenchRunTest, EqualSeedsSendEqualSchedules) {
  ScriptedGrpcServer server(ReplyScript{});
  const std::vector<std::string> args = {
      "--target", server.target(), "--request-rate", "200", "--num-requests", "10", "--output-len", "1", "--seed", "9"};
  const json a = Bench(args).report["runs"][0]["requests"];
  const json b = Bench(args).report["runs"][0]["requests"];
  std::map<int, double> scheduled;
  for (const json& request : a) scheduled[request["index"]] = request["scheduled_ms"];
  ASSERT_EQ(scheduled.size(), 10u);
  for (const json& request : b) {
    EXPECT_NEAR(request["scheduled_ms"].get<double>(), scheduled[request["index"]], 1e-3);
  }
}

TEST(BenchRunTest, CountsErrorsByKindOverGrpc) {
  ReplyScript script;
  script.refuse_every = 5;
  script.break_every = 4;
  ScriptedGrpcServer server(script);
  const Outcome outcome =
      Bench({"--target", server.target(), "--num-requests", "20", "--output-len", "3", "--warmup", "0"});
  EXPECT_EQ(outcome.code, 0);
  const json& run = outcome.report["runs"][0];
  EXPECT_EQ(run["errors"]["RESOURCE_EXHAUSTED"], 4);
  EXPECT_EQ(run["errors"]["INTERNAL"], 4);
  EXPECT_EQ(run["completed"], 12);
  EXPECT_EQ(run["output_tokens"], 12 * 3 + 4) << "tokens count as they are received";
  EXPECT_THAT(outcome.out, HasSubstr("RESOURCE_EXHAUSTED"));
}

TEST(BenchRunTest, CountsErrorsByKindOverHttp) {
  ReplyScript script;
  script.refuse_every = 5;
  script.break_every = 4;
  ScriptedHttpServer server(script);
  const Outcome outcome = Bench({"--url", server.url(), "--num-requests", "20", "--output-len", "3", "--warmup", "0"});
  EXPECT_EQ(outcome.code, 0);
  const json& run = outcome.report["runs"][0];
  SCOPED_TRACE(run["errors"].dump());
  EXPECT_EQ(run["errors"]["http 429 rate_limit_error"], 4);
  EXPECT_EQ(run["errors"]["connection closed"], 4);
  EXPECT_EQ(run["completed"], 12);
}

TEST(BenchRunTest, RequestsThatTakeTooLongFail) {
  ReplyScript script;
  script.first_ms = 300;
  ScriptedGrpcServer grpc_server(script);
  const Outcome grpc = Bench({"--target", grpc_server.target(), "--num-requests", "2", "--output-len", "1", "--timeout",
                              "0.05", "--warmup", "0"});
  EXPECT_EQ(grpc.code, 1) << "no request succeeded";
  EXPECT_EQ(grpc.report["runs"][0]["errors"]["DEADLINE_EXCEEDED"], 2);
  ScriptedHttpServer http_server(script);
  const Outcome http = Bench(
      {"--url", http_server.url(), "--num-requests", "2", "--output-len", "1", "--timeout", "0.05", "--warmup", "0"});
  EXPECT_EQ(http.code, 1);
  EXPECT_EQ(http.report["runs"][0]["errors"]["timeout"], 2);
}

TEST(BenchRunTest, StopsSendingAfterTheDuration) {
  ReplyScript script;
  script.first_ms = 20;
  ScriptedGrpcServer server(script);
  const Outcome outcome = Bench({"--target", server.target(), "--num-requests", "100000", "--duration", "0.3",
                                 "--output-len", "1", "--warmup", "0"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const int completed = outcome.report["runs"][0]["completed"];
  EXPECT_GE(completed, 2);
  EXPECT_LE(completed, 15);
}

TEST(BenchRunTest, GoodputCountsRequestsWithinTheGoals) {
  ScriptedGrpcServer server(Paced());
  const auto good = [&server](const std::vector<std::string>& goals) {
    const Outcome outcome = Bench(
        With({"--target", server.target(), "--num-requests", "4", "--output-len", "20", "--concurrency", "4"}, goals));
    return outcome.report["runs"][0]["good"].get<int>();
  };
  EXPECT_EQ(good({"--slo-ttft-ms", "1000", "--slo-itl-ms", "100"}), 4);
  EXPECT_EQ(good({"--slo-ttft-ms", "30"}), 0);
  EXPECT_EQ(good({"--slo-itl-ms", "5"}), 0);
}

TEST(BenchRunTest, WritesAPlotOfEveryRate) {
  ScriptedGrpcServer server(ReplyScript{});
  const std::string path = ::testing::TempDir() + "/bench_run.svg";
  const Outcome outcome = Bench({"--target", server.target(), "--request-rate", "100,200,400", "--num-requests", "10",
                                 "--output-len", "2", "--svg", path});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::string svg = ReadFile(path);
  EXPECT_THAT(svg, HasSubstr("<svg xmlns"));
  EXPECT_THAT(svg, HasSubstr("scripted-model"));
  std::filesystem::remove(path);
  EXPECT_EQ(outcome.report["runs"].size(), 3u);
}

TEST(BenchRunTest, ReplaysATraceAtItsTimes) {
  ScriptedGrpcServer server(ReplyScript{});
  const std::string path = ::testing::TempDir() + "/bench_trace.jsonl";
  std::ofstream(path) << "{\"timestamp\":0,\"input_length\":600,\"output_length\":3,\"hash_ids\":[1,2]}\n"
                         "{\"timestamp\":400,\"input_length\":40,\"output_length\":5}\n";
  const Outcome outcome = Bench(
      {"--target", server.target(), "--workload", "trace", "--trace", path, "--trace-speed", "2", "--warmup", "0"});
  std::filesystem::remove(path);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json& run = outcome.report["runs"][0];
  EXPECT_EQ(run["prompt_tokens"], 640);
  EXPECT_EQ(run["output_tokens"], 8);
  EXPECT_GE(run["seconds"].get<double>(), 0.199);
}

TEST(BenchRunTest, SaysWhenThereIsNoServer) {
  std::ostringstream out, err;
  EXPECT_EQ(RunBench({"--url", "http://127.0.0.1:1"}, out, err), 1);
  EXPECT_THAT(err.str(), HasSubstr("127.0.0.1:1"));
  EXPECT_EQ(RunBench({"--workload", "trace", "--trace", "/nonexistent"}, out, err), 2);
  EXPECT_THAT(err.str(), HasSubstr("/nonexistent"));
  EXPECT_EQ(RunBench({"--bogus"}, out, err), 2);
  EXPECT_EQ(RunBench({"--help"}, out, err), 0);
}

}  // namespace
}  // namespace k3
