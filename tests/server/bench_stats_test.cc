#include "server/commands/bench_stats.h"

#include <gtest/gtest.h>

#include <chrono>

namespace k3 {
namespace {

const Clock::time_point kStart = Clock::time_point() + std::chrono::hours(1);

Clock::time_point At(double ms) {
  return kStart + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double, std::milli>(ms));
}

RequestRecord Record(double sent, std::vector<std::pair<double, int>> arrivals, double finished,
                     const std::string& error = "") {
  RequestRecord record;
  record.kind = "all";
  record.scheduled = record.sent = At(sent);
  for (const auto& [time, tokens] : arrivals) record.arrivals.push_back({At(time), tokens});
  record.finished = At(finished);
  record.prompt_tokens = 10;
  record.error = error;
  return record;
}

TEST(BenchStatsTest, PercentilesInterpolate) {
  const std::vector<double> sorted = {10, 20, 30, 40};
  EXPECT_DOUBLE_EQ(Percentile(sorted, 0), 10);
  EXPECT_DOUBLE_EQ(Percentile(sorted, 0.5), 25);
  EXPECT_DOUBLE_EQ(Percentile(sorted, 0.9), 37);
  EXPECT_DOUBLE_EQ(Percentile(sorted, 1), 40);
  EXPECT_DOUBLE_EQ(Percentile({5}, 0.99), 5);
}

TEST(BenchStatsTest, SummaryOfUnsortedValues) {
  const LatencySummary summary = SummarizeLatency({3, 1, 2});
  EXPECT_EQ(summary.count, 3);
  EXPECT_DOUBLE_EQ(summary.mean, 2);
  EXPECT_DOUBLE_EQ(summary.p50, 2);
  EXPECT_DOUBLE_EQ(summary.max, 3);
  EXPECT_EQ(SummarizeLatency({}).count, 0);
}

TEST(BenchStatsTest, OneRequestByHand) {
  // Sent at 0; a token at 100, three together at 160, one at 200; ends at 250.
  const BenchSummary summary = Summarize({Record(0, {{100, 1}, {160, 3}, {200, 1}}, 250)}, {});
  EXPECT_EQ(summary.completed, 1);
  EXPECT_NEAR(summary.seconds, 0.25, 1e-9);
  EXPECT_EQ(summary.output_tokens, 5);
  EXPECT_NEAR(summary.output_tokens_per_second(), 20, 1e-6);
  EXPECT_NEAR(summary.total_tokens_per_second(), 60, 1e-6);
  EXPECT_NEAR(summary.ttft.p50, 100, 1e-6);
  EXPECT_EQ(summary.itl.count, 4);  // 20, 20, 20, 40
  EXPECT_NEAR(summary.itl.mean, 25, 1e-6);
  EXPECT_NEAR(summary.itl.p50, 20, 1e-6);
  EXPECT_NEAR(summary.itl.max, 40, 1e-6);
  EXPECT_NEAR(summary.tpot.p50, 25, 1e-6);
  EXPECT_NEAR(summary.longest_gap.p50, 60, 1e-6);
  EXPECT_NEAR(summary.e2e.p50, 250, 1e-6);
  EXPECT_NEAR(summary.mean_in_flight, 1, 1e-9);
}

TEST(BenchStatsTest, FailuresAreCountedByKindAndKeepTheirTokens) {
  const BenchSummary summary = Summarize({Record(0, {{10, 1}}, 20), Record(0, {{10, 2}}, 100, "timeout"),
                                          Record(0, {}, 1, "http 429"), Record(5, {}, 6, "http 429")},
                                         {});
  EXPECT_EQ(summary.completed, 1);
  EXPECT_EQ(summary.failed, 3);
  EXPECT_EQ(summary.errors.at("http 429"), 2);
  EXPECT_EQ(summary.errors.at("timeout"), 1);
  EXPECT_EQ(summary.output_tokens, 3);
  EXPECT_EQ(summary.prompt_tokens, 10);
  EXPECT_EQ(summary.ttft.count, 1) << "latencies are those of requests that succeeded";
  EXPECT_NEAR(summary.seconds, 0.1, 1e-9);
}

TEST(BenchStatsTest, GoodputNeedsEveryGoal) {
  const std::vector<RequestRecord> records = {
      Record(0, {{50, 1}, {60, 1}}, 60),              // quick
      Record(0, {{500, 1}, {510, 1}}, 510),           // slow start
      Record(0, {{50, 1}, {450, 1}}, 450),            // slow after
      Record(0, {{50, 1}}, 50),                       // a single token has no gap
      Record(0, {{1, 1}, {2, 1}}, 2, "UNAVAILABLE"),  // quick, but failed
      Record(0, {}, 2),                               // nothing came
  };
  EXPECT_EQ(Summarize(records, {}).good, 4);
  EXPECT_EQ(Summarize(records, {.ttft_ms = 100.0, .itl_ms = {}}).good, 3);
  EXPECT_EQ(Summarize(records, {.ttft_ms = {}, .itl_ms = 20.0}).good, 3);
  EXPECT_EQ(Summarize(records, {.ttft_ms = 100.0, .itl_ms = 20.0}).good, 2);
}

TEST(BenchStatsTest, KindsShareTheTimeOfTheRun) {
  std::vector<RequestRecord> records = {Record(0, {{10, 1}}, 100), Record(0, {{10, 1}}, 1000)};
  EXPECT_TRUE(SummarizeKinds(records, {}).empty());
  records[0].kind = "short";
  records[1].kind = "long";
  const auto kinds = SummarizeKinds(records, {});
  ASSERT_EQ(kinds.size(), 2u);
  EXPECT_NEAR(kinds.at("short").seconds, 1, 1e-9);
  EXPECT_NEAR(kinds.at("short").mean_in_flight, 0.1, 1e-9);
  EXPECT_NEAR(kinds.at("long").mean_in_flight, 1, 1e-9);
}

TEST(BenchStatsTest, NothingIsNotADivision) {
  const BenchSummary summary = Summarize({}, {});
  EXPECT_EQ(summary.completed, 0);
  EXPECT_EQ(summary.requests_per_second(), 0);
  EXPECT_EQ(summary.mean_in_flight, 0);
}

}  // namespace
}  // namespace k3
