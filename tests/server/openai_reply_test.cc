#include <gtest/gtest.h>

#include <bit>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "absl/time/time.h"
#include "server/error_details.h"
#include "server/http/http_message.h"
#include "server/openai/openai_errors.h"
#include "server/openai/reply_json.h"

namespace k3 {
namespace {

std::string FloatText(float value) {
  std::string text;
  AppendFloat(value, &text);
  return text;
}

TEST(ReplyJsonTest, FloatsComeBackExactly) {
  std::mt19937 random(7);
  for (int i = 0; i < 100000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    const std::string text = FloatText(value);
    const auto json = nlohmann::json::parse(text, nullptr, false);
    ASSERT_TRUE(json.is_number_float()) << text;
    if (!std::isfinite(value) || value < -9999.0f) continue;
    float back = 0;
    std::from_chars(text.data(), text.data() + text.size(), back);
    ASSERT_EQ(std::bit_cast<uint32_t>(back), std::bit_cast<uint32_t>(value)) << text;
    ASSERT_EQ(static_cast<float>(json.get<double>()), value) << "also by way of a double";
  }
  EXPECT_EQ(FloatText(-0.25f), "-0.25");
  EXPECT_EQ(FloatText(0.0f), "0.0");
  EXPECT_EQ(FloatText(-3.0f), "-3.0");
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity(), -1e30f}) {
    EXPECT_EQ(FloatText(bad), "-9999.0");
  }
}

TEST(ReplyJsonTest, StringsStayOneLineAndComeBack) {
  for (const std::string& text : {std::string("plain"), std::string("\"\\/\b\f\n\r\t"), std::string("a\0b", 3),
                                  std::string("\u0085\u2028\u2029\x7f"), std::string("中国 😀 é\u00a0")}) {
    const std::string json = JsonString(text);
    EXPECT_EQ(nlohmann::json::parse(json).get<std::string>(), text);
    for (const char* breaks : {"\n", "\r", "\u0085", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c"}) {
      EXPECT_EQ(json.find(breaks), std::string::npos);
    }
  }
  EXPECT_EQ(nlohmann::json::parse(JsonString("a\xFF\xE4\xB8z")).get<std::string>(), "a\uFFFD\uFFFDz");
}

TEST(OpenAiErrorsTest, StatusesTypesAndNames) {
  struct Case {
    absl::Status status;
    int http;
    const char* type;
  };
  const Case cases[] = {
      {InvalidField("sampling.top_p", "is wrong"), 400, "invalid_request_error"},
      {UnimplementedFeature("constraint", "is missing"), 400, "invalid_request_error"},
      {absl::FailedPreconditionError("never fits"), 400, "invalid_request_error"},
      {absl::UnauthenticatedError("no key"), 401, "authentication_error"},
      {absl::PermissionDeniedError("not you"), 403, "permission_error"},
      {absl::NotFoundError("no model"), 404, "invalid_request_error"},
      {absl::ResourceExhaustedError("full"), 429, "rate_limit_error"},
      {absl::InternalError("secret detail"), 500, "server_error"},
      {UnavailableFor("draining", "going away", absl::Hours(1)), 503, "server_error"},
      {absl::DeadlineExceededError("late"), 504, "timeout"},
  };
  for (const Case& item : cases) {
    const OpenAiError error = ErrorOf(item.status);
    EXPECT_EQ(error.status, item.http) << item.status;
    EXPECT_EQ(error.type, item.type) << item.status;
  }
  EXPECT_EQ(ErrorOf(absl::InternalError("secret detail")).message.find("secret"), std::string::npos);
  EXPECT_EQ(ErrorOf(UnavailableFor("draining", "x", absl::Milliseconds(2001))).retry_after_seconds, 3);
  EXPECT_EQ(ErrorOf(UnavailableFor("draining", "x", absl::Hours(1))).retry_after_seconds, 120)
      << "clients honour no more";
  const std::pair<const char*, const char*> names[] = {
      {"sampling.logit_bias[7]", "logit_bias"},
      {"stopping.max_new_tokens", "max_completion_tokens"},
      {"stopping.stop[3]", "stop"},
      {"chat.messages[2].content[1].type", "messages[2].content[1].type"},
      {"input", "messages"},
      {"output.top_logprobs", "top_logprobs"},
      {"reasoning.enabled", "thinking"},
      {"cache.salt", "cache_salt"},
      {"model", "model"},
  };
  for (const auto& [path, param] : names) {
    const OpenAiError error = ErrorOf(InvalidField(path, "is wrong"), OpenAiRoute::kChat, "max_completion_tokens", "r");
    EXPECT_EQ(error.param, param);
    EXPECT_EQ(error.message, std::string(param) + ": is wrong");
    EXPECT_EQ(error.code, "");
  }
}

TEST(HttpMessageTest, Targets) {
  std::string path;
  std::string query;
  EXPECT_TRUE(ParseTarget("/a%2Fb%20c?d=%41#e", &path, &query));
  EXPECT_EQ(path, "/a/b c");
  EXPECT_EQ(query, "d=%41");
  EXPECT_TRUE(ParseTarget("http://host:1/x", &path, &query));
  EXPECT_EQ(path, "/x");
  EXPECT_TRUE(ParseTarget("http://host", &path, &query));
  EXPECT_EQ(path, "/");
  EXPECT_TRUE(ParseTarget("*", &path, &query));
  EXPECT_EQ(path, "*");
  for (const char* bad : {"/%", "/%1", "/%zz", "/a%g1"}) EXPECT_FALSE(ParseTarget(bad, &path, &query)) << bad;
}

}  // namespace
}  // namespace k3
