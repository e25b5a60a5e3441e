#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "tests/server/openai_request_fixture.h"

namespace k3 {
namespace {

using testing::ChatBody;
using testing::Json;
using testing::kChat;
using testing::kCompletions;
using testing::OpenAiReply;
using testing::OpenAiServer;

TEST(OpenAiLengthTest, TokenLimits) {  // B30
  OpenAiServer::Options options;
  options.engine.limits.max_model_len = 512;
  OpenAiServer server(options);
  server.ForceEndless(server.Tokens("x")[0]);
  Json body = ChatBody();
  const int prompt = server.Post("/render", body).body["count"];
  for (const Json& absent : {Json(), Json(nullptr)}) {
    body["max_tokens"] = absent;
    const OpenAiReply reply = server.Post(kChat, body);
    ASSERT_EQ(reply.status, 200);
    EXPECT_EQ(reply.body["usage"]["completion_tokens"], 512 - prompt);
    EXPECT_EQ(reply.body["choices"][0]["finish_reason"], "length");
  }
  for (const char* key : {"max_tokens", "max_completion_tokens"}) {
    for (const Json& bad : {Json(0), Json(-1), Json(1.5), Json("5"), Json(true)}) {
      const OpenAiReply reply = server.Post(kChat, ChatBody({{key, bad}}));
      EXPECT_EQ(reply.status, 400) << bad;
      EXPECT_EQ(reply.Param(), key) << bad;
    }
    for (const Json& big :
         {Json(512 - prompt + 1), Json(2147483648ll), Json(1e18), Json::parse("100000000000000000000000")}) {
      const OpenAiReply reply = server.Post(kChat, ChatBody({{key, big}}));
      EXPECT_EQ(reply.status, 400) << big;
      EXPECT_EQ(reply.Code(), "context_length_exceeded") << big;
      EXPECT_EQ(reply.Param(), key);
      const std::string message = reply.body["error"]["message"];
      EXPECT_EQ(message.find("at least") != std::string::npos, big.get<double>() > 4294967295.0) << message;
    }
    const OpenAiReply least = server.Post(kChat, ChatBody({{"min_tokens", 5}, {key, 3}}));
    EXPECT_EQ(least.Param(), "min_tokens");
    EXPECT_EQ(least.body["error"]["message"], "min_tokens: 5 is more than the limit of 3 new tokens");
    EXPECT_EQ(server.Post(kChat, ChatBody({{key, 512 - prompt}})).body["usage"]["completion_tokens"], 512 - prompt);
  }
  EXPECT_EQ(server.Post(kChat, ChatBody({{"max_tokens", 3}, {"max_completion_tokens", 5}}))
                .body["usage"]["completion_tokens"],
            5);
  EXPECT_EQ(server.Post(kCompletions, {{"prompt", "a"}}).body["usage"]["completion_tokens"], 16);
  EXPECT_EQ(server.Post(kCompletions, {{"prompt", "a"}, {"max_tokens", nullptr}}).body["usage"]["completion_tokens"],
            16);
  EXPECT_EQ(server.Post(kCompletions, {{"prompt", "a"}, {"max_tokens", 0}}).Param(), "max_tokens");
  EXPECT_EQ(server.Post(kCompletions, {{"prompt", "a"}, {"max_tokens", 0}, {"echo", true}}).status, 200);

  // B16
  const auto tokens = [](int count) { return Json(std::vector<int>(count, 100)); };
  OpenAiReply reply = server.Post(kCompletions, {{"prompt", tokens(511)}, {"max_tokens", 1}});
  ASSERT_EQ(reply.status, 200);
  EXPECT_EQ(reply.body["usage"]["completion_tokens"], 1);
  EXPECT_EQ(reply.body["choices"][0]["finish_reason"], "length");
  reply = server.Post(kCompletions, {{"prompt", tokens(511)}});
  ASSERT_EQ(reply.status, 200);
  EXPECT_EQ(reply.body["usage"]["completion_tokens"], 1);
  for (const int count : {512, 513}) {
    reply = server.Post(kCompletions, {{"prompt", tokens(count)}});
    EXPECT_EQ(reply.status, 400);
    EXPECT_EQ(reply.Code(), "context_length_exceeded");
    EXPECT_EQ(reply.Param(), "prompt");
    const std::string message = reply.body["error"]["message"];
    EXPECT_NE(message.find(std::to_string(count)), std::string::npos);
    EXPECT_NE(message.find("512"), std::string::npos);
  }
  reply = server.Post(kCompletions, {{"prompt", tokens(500)}, {"max_tokens", 100}});
  EXPECT_EQ(reply.Code(), "context_length_exceeded");
  EXPECT_EQ(reply.Param(), "max_tokens");
  for (const Json& empty :
       {Json::array(), Json(""), Json::parse("[[]]"), Json(), Json::parse("[[1],[]]"), Json::parse("[\"a\",\"\"]")}) {
    reply = server.Post(kCompletions, {{"prompt", empty}});
    EXPECT_EQ(reply.status, 400);
    EXPECT_TRUE(reply.Param().starts_with("prompt"));
  }
  EXPECT_TRUE(server.NothingLeaked());
}

// B12
TEST(OpenAiLengthTest, WhatThePoolsNeverHoldIsRefusedAtOnce) {
  OpenAiServer::Options options;
  options.engine.limits.max_model_len = 16384;
  options.engine.limits.latent_pages = 64;
  OpenAiServer server(options);
  server.Force({100});
  const OpenAiReply reply = server.Post(kCompletions, {{"prompt", std::vector<int>(5000, 100)}, {"max_tokens", 10}});
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.Code(), "capacity_exceeded");
  EXPECT_EQ(reply.Param(), "prompt");
  std::string text;
  for (int i = 0; i < 5000; ++i) text += "\x01";
  const OpenAiReply chat = server.Post(kChat, {{"messages", Json::array({{{"role", "user"}, {"content", text}}})}});
  EXPECT_EQ(chat.status, 400);
  EXPECT_EQ(chat.Code(), "capacity_exceeded");
  EXPECT_EQ(chat.Param(), "messages");
  EXPECT_EQ(server.Post(kCompletions, {{"prompt", std::vector<int>(20, 100)}}).status, 200);
}

// B33, second half: a short request does not wait while a long prompt is encoded.
TEST(OpenAiLongPromptTest, AShortRequestDoesNotWait) {
  OpenAiServer::Options options;
  options.engine.limits.max_model_len = 4 << 20;
  options.engine.limits.latent_pages = 1 << 20;
  OpenAiServer server(options);
  server.Force({100});
  std::string text;  // letters in no order: the slowest kind to encode
  for (uint32_t i = 0, x = 1; i < 4u << 20; ++i) {
    x = x * 1664525u + 1013904223u;
    text.push_back(static_cast<char>('a' + (x >> 24) % 26));
  }
  std::atomic<bool> done{false};
  std::thread slow([&] {
    EXPECT_EQ(server.Post(kCompletions, {{"prompt", text}, {"max_tokens", 1}}).status, 200);
    done = true;
  });
  int finished_before = 0;
  while (!done) {
    EXPECT_EQ(server.Post(kCompletions, {{"prompt", "ten tokens or so, no more"}, {"max_tokens", 1}}).status, 200);
    if (!done) ++finished_before;
  }
  slow.join();
  EXPECT_GT(finished_before, 3);
}

}  // namespace
}  // namespace k3
