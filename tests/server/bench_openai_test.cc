#include "server/commands/bench_openai.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

#include "server/commands/bench_http_client.h"

namespace k3 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Clock::time_point kStart = Clock::time_point() + std::chrono::hours(1);

struct Stream {
  void Feed(const std::string& bytes) { reader.Feed(bytes, kStart + std::chrono::milliseconds(++time)); }
  std::vector<int> tokens() const {
    std::vector<int> list;
    for (const TokenArrival& arrival : record.arrivals) list.push_back(arrival.tokens);
    return list;
  }
  RequestRecord record;
  OpenAiStreamReader reader{&record};
  int time = 0;
};

constexpr char kRole[] = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
constexpr char kText[] = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";
constexpr char kEnd[] = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
constexpr char kDone[] = "data: [DONE]\n\n";

TEST(OpenAiStreamReaderTest, CountsChunksWithTextAndTakesUsageFromTheEnd) {
  Stream s;
  s.Feed(kRole);
  s.Feed(kText);
  s.Feed(": heartbeat\n\n");
  s.Feed("data: {\"choices\":[{\"index\":0,\"delta\":{\"reasoning_content\":\"b\"}}]}\r\n\r\n");
  s.Feed("data:{\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0}]}}]}\n\n");
  s.Feed(kEnd);
  s.Feed(
      "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3,"
      "\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n");
  s.Feed(kDone);
  EXPECT_TRUE(s.reader.done());
  s.reader.Finish();
  EXPECT_TRUE(s.record.ok()) << s.record.error;
  EXPECT_THAT(s.tokens(), ElementsAre(1, 1, 1));
  EXPECT_EQ(s.record.arrivals[0].time, kStart + std::chrono::milliseconds(2)) << "the role alone is no token";
  EXPECT_EQ(s.record.prompt_tokens, 9);
  EXPECT_EQ(s.record.cached_tokens, 4);
}

TEST(OpenAiStreamReaderTest, SpreadsTokensThatChunksDoNotTell) {
  Stream s;
  for (int i = 0; i < 4; ++i) s.Feed("data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n");
  s.Feed("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":9}}\n\n");
  s.Feed(kDone);
  s.reader.Finish();
  EXPECT_EQ(s.record.output_tokens(), 9);
  EXPECT_EQ(s.tokens()[0], 1);
  EXPECT_THAT(s.tokens(), ElementsAre(1, 2, 3, 3));
}

TEST(OpenAiStreamReaderTest, TakesRunningTotals) {
  Stream s;
  s.Feed(
      "data: {\"choices\":[{\"index\":0,\"text\":\"\"}],\"usage\":{\"completion_tokens\":0,\"prompt_tokens\":5}}\n\n");
  s.Feed("data: {\"choices\":[{\"index\":0,\"text\":\"\"}],\"usage\":{\"completion_tokens\":1}}\n\n");
  s.Feed("data: {\"choices\":[{\"index\":0,\"text\":\"abc\"}],\"usage\":{\"completion_tokens\":4}}\n\n");
  s.Feed(
      "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"length\"}],"
      "\"usage\":{\"completion_tokens\":4}}\n\n");
  s.Feed("data: {\"choices\":[],\"usage\":{\"completion_tokens\":4,\"prompt_tokens\":5}}\n\n");
  s.Feed(kDone);
  s.reader.Finish();
  EXPECT_THAT(s.tokens(), ElementsAre(1, 3));
  EXPECT_EQ(s.record.prompt_tokens, 5);
}

TEST(OpenAiStreamReaderTest, UsageOnTheLastChoiceIsNoRunningTotal) {
  Stream s;
  s.Feed(kText);
  s.Feed(kText);
  s.Feed(
      "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\","
      "\"usage\":{\"completion_tokens\":4,\"prompt_tokens\":5}}]}\n\n");
  s.Feed(kDone);
  s.reader.Finish();
  EXPECT_THAT(s.tokens(), ElementsAre(1, 3));
}

TEST(OpenAiStreamReaderTest, AnyCutOfTheBytesGivesTheSame) {
  const std::string bytes = std::string(kRole) + kText + kText + kEnd + kDone;
  for (size_t size = 1; size < 40; ++size) {
    Stream s;
    for (size_t i = 0; i < bytes.size(); i += size) s.Feed(bytes.substr(i, size));
    s.reader.Finish();
    EXPECT_TRUE(s.record.ok()) << s.record.error;
    EXPECT_THAT(s.tokens(), ElementsAre(1, 1)) << size;
  }
}

TEST(OpenAiStreamReaderTest, SaysHowAStreamFailed) {
  Stream cut;
  cut.Feed(kText);
  cut.reader.Finish();
  EXPECT_EQ(cut.record.error, "stream without [DONE]");
  Stream error;
  error.Feed(kText);
  error.Feed("data: {\"error\":{\"message\":\"m\",\"type\":\"server_error\",\"code\":null}}\n\n");
  error.reader.Finish();
  EXPECT_EQ(error.record.error, "error event server_error");
  Stream garbage;
  garbage.Feed("data: oops\n\ndata: [DONE]\n\n");
  garbage.reader.Finish();
  EXPECT_EQ(garbage.record.error, "event is not a JSON object");
}

TEST(OpenAiTest, ErrorKindsTakeTheCodeElseTheType) {
  EXPECT_EQ(OpenAiErrorKind(429, "{\"error\":{\"type\":\"rate_limit_error\",\"code\":null}}"),
            "http 429 rate_limit_error");
  EXPECT_EQ(OpenAiErrorKind(400, "{\"error\":{\"type\":\"t\",\"code\":\"context_length_exceeded\"}}"),
            "http 400 context_length_exceeded");
  EXPECT_EQ(OpenAiErrorKind(502, "<html>"), "http 502");
  EXPECT_EQ(OpenAiErrorKind(500, "[]"), "http 500");
}

TEST(OpenAiTest, BodiesFollowTheInput) {
  BenchConfig config;
  BenchRequest request;
  request.prompt_tokens = {1, 2};
  request.max_tokens = 7;
  const auto ids = nlohmann::json::parse(OpenAiBody(config, request, "m"));
  EXPECT_EQ(ids["prompt"], nlohmann::json({1, 2}));
  EXPECT_EQ(ids["max_tokens"], 7);
  EXPECT_EQ(ids["stream_options"]["include_usage"], true);
  EXPECT_EQ(ids["ignore_eos"], true);
  EXPECT_STREQ(OpenAiRoute(config), "/v1/completions");
  config.input = BenchInput::kChat;
  config.ignore_eos = false;
  request.prompt_tokens.clear();
  request.prompt_text = "hi \xff";  // not UTF-8: still a body
  const auto chat = nlohmann::json::parse(OpenAiBody(config, request, "m"));
  EXPECT_EQ(chat["messages"][0]["role"], "user");
  EXPECT_FALSE(chat.contains("ignore_eos"));
  EXPECT_STREQ(OpenAiRoute(config), "/v1/chat/completions");
}

TEST(HttpUrlTest, ReadsHostPortAndBase) {
  const auto plain = ParseHttpUrl("http://localhost:8000");
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(plain->host, "localhost");
  EXPECT_EQ(plain->port, "8000");
  EXPECT_EQ(plain->base, "");
  const auto base = ParseHttpUrl("http://10.0.0.1/proxy/k3//");
  ASSERT_TRUE(base.ok());
  EXPECT_EQ(base->authority(), "10.0.0.1:80");
  EXPECT_EQ(base->base, "/proxy/k3");
  const auto six = ParseHttpUrl("http://[::1]:81");
  ASSERT_TRUE(six.ok());
  EXPECT_EQ(six->host, "::1");
  EXPECT_EQ(six->authority(), "[::1]:81");
  const auto tls = ParseHttpUrl("https://k3.example.org/proxy");
  ASSERT_TRUE(tls.ok());
  EXPECT_TRUE(tls->https);
  EXPECT_EQ(tls->authority(), "k3.example.org:443");
  EXPECT_FALSE(plain->https);
  for (const char* bad :
       {"https://", "ftp://a", "localhost:8000", "http://", "http://a:0", "http://a:x", "http://[::1", ""}) {
    EXPECT_THAT(std::string(ParseHttpUrl(bad).status().message()), HasSubstr("--url")) << bad;
  }
}

}  // namespace
}  // namespace k3
