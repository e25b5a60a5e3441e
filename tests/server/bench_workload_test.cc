#include "server/commands/bench_workload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

namespace k3 {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kVocab = 1000;

BenchConfig Config(WorkloadKind kind) {
  BenchConfig config;
  config.workload = kind;
  config.num_requests = 1000;
  config.input_len = 20;
  config.output_len = 8;
  return config;
}

TEST(BenchWorkloadTest, EqualSeedsGiveEqualRequestsInAnyOrder) {
  const BenchConfig config = Config(WorkloadKind::kNormal);
  const Workload a(config, {}, kVocab, 7, 0);
  const Workload b(config, {}, kVocab, 7, 0);
  const BenchRequest late = b.Make(999);
  for (const int64_t i : {0, 1, 500, 999}) {
    EXPECT_EQ(a.Make(i).prompt_tokens, b.Make(i).prompt_tokens);
    EXPECT_EQ(a.Make(i).seed, b.Make(i).seed);
    EXPECT_EQ(a.PoissonGap(i, 3), b.PoissonGap(i, 3));
  }
  EXPECT_EQ(late.prompt_tokens, a.Make(999).prompt_tokens);
  const Workload other_seed(config, {}, kVocab, 8, 0);
  const Workload other_run(config, {}, kVocab, 7, 1);
  EXPECT_NE(a.Make(0).prompt_tokens, other_seed.Make(0).prompt_tokens);
  EXPECT_NE(a.Make(0).prompt_tokens, other_run.Make(0).prompt_tokens) << "a later run would hit the prefix cache";
  EXPECT_NE(a.Make(0).prompt_tokens, a.Make(1).prompt_tokens);
}

TEST(BenchWorkloadTest, FixedLengthsAndIdsBelowTheLimit) {
  const BenchConfig config = Config(WorkloadKind::kFixed);
  const Workload workload(config, {}, kVocab, 1, 0);
  EXPECT_EQ(workload.size(), 1000);
  std::vector<int> seen(kVocab);
  for (int64_t i = 0; i < workload.size(); ++i) {
    const BenchRequest request = workload.Make(i);
    ASSERT_EQ(request.prompt_tokens.size(), 20u);
    EXPECT_EQ(request.max_tokens, 8);
    EXPECT_EQ(request.index, i);
    for (const int32_t id : request.prompt_tokens) {
      ASSERT_GE(id, 0);
      ASSERT_LT(id, kVocab);
      ++seen[static_cast<size_t>(id)];
    }
  }
  // 20,000 draws over 1,000 ids: each about 20 times.
  EXPECT_GT(*std::min_element(seen.begin(), seen.end()), 0);
  EXPECT_LT(*std::max_element(seen.begin(), seen.end()), 60);
}

TEST(BenchWorkloadTest, NormalLengthsHaveTheirMeanAndDeviation) {
  BenchConfig config = Config(WorkloadKind::kNormal);
  config.input_len = 100;
  config.input_stddev = 10;
  config.output_len = 50;
  config.output_stddev = 5;
  config.num_requests = 4000;
  const Workload workload(config, {}, kVocab, 3, 0);
  double in = 0, in_squares = 0, out = 0, product = 0;
  for (int64_t i = 0; i < workload.size(); ++i) {
    const BenchRequest request = workload.Make(i);
    const auto length = static_cast<double>(request.prompt_tokens.size());
    in += length;
    in_squares += length * length;
    out += request.max_tokens;
    product += (length - 100) * (request.max_tokens - 50);
  }
  const double n = static_cast<double>(workload.size());
  EXPECT_NEAR(in / n, 100, 0.6);
  EXPECT_NEAR(std::sqrt(in_squares / n - in / n * in / n), 10, 0.6);
  EXPECT_NEAR(out / n, 50, 0.3);
  EXPECT_NEAR(product / n / 50, 0, 0.06) << "lengths of prompt and reply must not depend on each other";
}

TEST(BenchWorkloadTest, NormalLengthsAreAtLeastOne) {
  BenchConfig config = Config(WorkloadKind::kNormal);
  config.input_len = 1;
  config.input_stddev = 50;
  const Workload workload(config, {}, kVocab, 3, 0);
  for (int64_t i = 0; i < 200; ++i) ASSERT_GE(workload.Make(i).prompt_tokens.size(), 1u);
}

TEST(BenchWorkloadTest, PoissonArrivalsHaveTheirRate) {
  const BenchConfig config = Config(WorkloadKind::kFixed);
  const Workload workload(config, {}, kVocab, 5, 0);
  double sum = 0, squares = 0;
  constexpr int kDraws = 20000;
  for (int64_t i = 0; i < kDraws; ++i) {
    const double gap = workload.PoissonGap(i, 4);
    ASSERT_GE(gap, 0);
    sum += gap;
    squares += gap * gap;
  }
  const double mean = sum / kDraws;
  EXPECT_NEAR(mean, 0.25, 0.01);
  EXPECT_NEAR(std::sqrt(squares / kDraws - mean * mean), 0.25, 0.01) << "an exponential's deviation is its mean";
  EXPECT_EQ(workload.PoissonGap(3, HUGE_VAL), 0);
}

TEST(BenchWorkloadTest, GroupsShareTheirPrefixOnly) {
  BenchConfig config = Config(WorkloadKind::kSharedPrefix);
  config.prefix_len = 64;
  config.prefix_groups = 4;
  const Workload workload(config, {}, kVocab, 5, 0);
  std::map<std::vector<int32_t>, int> prefixes;
  std::set<std::vector<int32_t>> rests;
  for (int64_t i = 0; i < 400; ++i) {
    const std::vector<int32_t> tokens = workload.Make(i).prompt_tokens;
    ASSERT_EQ(tokens.size(), 84u);
    ++prefixes[{tokens.begin(), tokens.begin() + 64}];
    rests.insert({tokens.begin() + 64, tokens.end()});
  }
  EXPECT_EQ(prefixes.size(), 4u);
  EXPECT_EQ(rests.size(), 400u);
  for (const auto& [prefix, count] : prefixes) EXPECT_GT(count, 50);
}

TEST(BenchWorkloadTest, LongContextMixesTwoKinds) {
  BenchConfig config = Config(WorkloadKind::kLongContext);
  config.long_input_len = 300;
  config.long_share = 0.25;
  const Workload workload(config, {}, kVocab, 5, 0);
  int longs = 0;
  for (int64_t i = 0; i < workload.size(); ++i) {
    const BenchRequest request = workload.Make(i);
    ASSERT_EQ(request.prompt_tokens.size(), request.kind == "long" ? 300u : 20u);
    longs += request.kind == "long" ? 1 : 0;
  }
  EXPECT_NEAR(longs, 250, 50);
  config.long_share = 1;
  EXPECT_EQ(Workload(config, {}, kVocab, 5, 0).Make(17).kind, "long");
  config.long_share = 0;
  EXPECT_EQ(Workload(config, {}, kVocab, 5, 0).Make(17).kind, "short");
}

TEST(BenchWorkloadTest, TextHasOneWordPerToken) {
  BenchConfig config = Config(WorkloadKind::kFixed);
  config.input = BenchInput::kChat;
  const BenchRequest request = Workload(config, {}, kVocab, 5, 0).Make(0);
  EXPECT_TRUE(request.prompt_tokens.empty());
  EXPECT_EQ(std::count(request.prompt_text.begin(), request.prompt_text.end(), ' '), 19);
}

TEST(BenchTraceTest, ReadsLengthsBlocksAndPrompts) {
  const auto trace = ParseTrace(
      "{\"timestamp\": 5000, \"input_length\": 1100, \"output_length\": 7, \"hash_ids\": [1, 2, 3]}\n"
      "\n"
      "{\"timestamp\": 5500, \"input_length\": 1100, \"output_length\": 8, \"hash_ids\": [1, 2, 9]}\r\n"
      "{\"timestamp\": 6000, \"prompt_token_ids\": [4, 5], \"output_length\": 1}\n"
      "{\"timestamp\": 6000, \"prompt\": \"hello\", \"output_length\": 2}",
      "t.jsonl");
  ASSERT_TRUE(trace.ok()) << trace.status();
  BenchConfig config = Config(WorkloadKind::kTrace);
  config.trace_speed = 2;
  const Workload workload(config, *trace, kVocab, 5, 0);
  ASSERT_EQ(workload.size(), 4);
  const BenchRequest a = workload.Make(0);
  const BenchRequest b = workload.Make(1);
  EXPECT_EQ(a.arrival_seconds, 0);
  EXPECT_EQ(b.arrival_seconds, 0.25);
  EXPECT_EQ(workload.Make(2).arrival_seconds, 0.5);
  ASSERT_EQ(a.prompt_tokens.size(), 1100u);
  ASSERT_EQ(b.prompt_tokens.size(), 1100u);
  EXPECT_TRUE(std::equal(a.prompt_tokens.begin(), a.prompt_tokens.begin() + 1024, b.prompt_tokens.begin()));
  EXPECT_FALSE(std::equal(a.prompt_tokens.begin() + 1024, a.prompt_tokens.end(), b.prompt_tokens.begin() + 1024));
  EXPECT_EQ(b.max_tokens, 8);
  EXPECT_EQ(workload.Make(2).prompt_tokens, (std::vector<int32_t>{4, 5}));
  EXPECT_EQ(workload.Make(3).prompt_text, "hello");
}

TEST(BenchTraceTest, ErrorsNameTheLine) {
  const auto error = [](const std::string& text) { return std::string(ParseTrace(text, "t").status().message()); };
  const std::string good = "{\"input_length\": 1, \"output_length\": 1, \"timestamp\": 5}\n";
  EXPECT_THAT(error(""), HasSubstr("no requests"));
  EXPECT_THAT(error(good + "{"), HasSubstr("t:2: is not JSON"));
  EXPECT_THAT(error(good + "[]"), HasSubstr("t:2: is not a JSON object"));
  EXPECT_THAT(error(good + "{\"input_length\": 1, \"output_length\": 1}"), HasSubstr("t:2: \"timestamp\" is earlier"));
  EXPECT_THAT(error("{\"output_length\": 1}"), HasSubstr("input_length"));
  EXPECT_THAT(error("{\"input_length\": 0, \"output_length\": 1}"), HasSubstr("input_length"));
  EXPECT_THAT(error("{\"input_length\": 1}"), HasSubstr("output_length"));
  EXPECT_THAT(error("{\"output_length\": 1, \"prompt_token_ids\": [-1]}"), HasSubstr("prompt_token_ids"));
  EXPECT_THAT(error("{\"output_length\": 1, \"prompt\": \"\"}"), HasSubstr("prompt"));
}

}  // namespace
}  // namespace k3
