#include "server/commands/bench_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace k3 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string ErrorOf(const std::vector<std::string>& args) {
  return std::string(ParseBenchCommandLine(args).status().message());
}

TEST(BenchConfigTest, DefaultsToOneRequestAtATimeOverGrpc) {
  const auto config = ParseBenchCommandLine({});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_FALSE(config->is_http());
  EXPECT_THAT(config->request_rates, IsEmpty());
  EXPECT_THAT(config->concurrencies, ElementsAre(1));
  EXPECT_EQ(config->workload, WorkloadKind::kFixed);
}

TEST(BenchConfigTest, RatesAreAListInEitherSpelling) {
  const auto commas = ParseBenchCommandLine({"--request-rate", "1,2.5,inf", "--url", "http://localhost:8000"});
  ASSERT_TRUE(commas.ok()) << commas.status();
  EXPECT_THAT(commas->request_rates, ElementsAre(1, 2.5, HUGE_VAL));
  EXPECT_TRUE(commas->is_http());
  EXPECT_THAT(commas->concurrencies, IsEmpty());
  const auto words = ParseBenchCommandLine({"--concurrency", "4", "16", "--input", "chat"});
  ASSERT_TRUE(words.ok()) << words.status();
  EXPECT_THAT(words->concurrencies, ElementsAre(4, 16));
  EXPECT_EQ(words->input, BenchInput::kChat);
}

TEST(BenchConfigTest, RefusesWhatDoesNotGoTogether) {
  EXPECT_THAT(ErrorOf({"--request-rate", "1", "--concurrency", "2"}), HasSubstr("exclude each other"));
  EXPECT_THAT(ErrorOf({"--url", "http://a", "--target", "b:1"}), HasSubstr("exclude each other"));
  EXPECT_THAT(ErrorOf({"--request-rate", "0"}), HasSubstr("--request-rate"));
  EXPECT_THAT(ErrorOf({"--request-rate", "1,,2"}), HasSubstr("--request-rate"));
  EXPECT_THAT(ErrorOf({"--concurrency", "1.5"}), HasSubstr("--concurrency"));
  EXPECT_THAT(ErrorOf({"--prefix-len", "8"}), HasSubstr("--workload shared-prefix"));
  EXPECT_THAT(ErrorOf({"--workload", "trace"}), HasSubstr("--trace FILE"));
  EXPECT_THAT(ErrorOf({"--workload", "trace", "--trace", "x", "--input-len", "4"}), HasSubstr("--input-len"));
  EXPECT_THAT(ErrorOf({"--save-requests"}), HasSubstr("--json"));
  EXPECT_THAT(ErrorOf({"--url", "http://a", "--bypass-prefix-cache"}), HasSubstr("--bypass-prefix-cache"));
  EXPECT_THAT(ErrorOf({"--request-rat", "1"}), HasSubstr("did you mean --request-rate"));
  EXPECT_THAT(ErrorOf({"stray"}), HasSubstr("stray"));
}

TEST(BenchConfigTest, ATraceNeedsNoLoad) {
  const auto config = ParseBenchCommandLine({"--workload", "trace", "--trace", "file"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->request_rates, IsEmpty());
  EXPECT_THAT(config->concurrencies, IsEmpty());
}

TEST(BenchConfigTest, HelpNamesEveryGroup) {
  const std::string help = BenchHelp();
  for (const char* flag : {"--target", "--request-rate", "--workload", "--slo-itl-ms", "--svg"}) {
    EXPECT_THAT(help, HasSubstr(flag));
  }
}

}  // namespace
}  // namespace k3
