#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/testing/openai_server.h"

namespace k3 {
namespace {

using testing::ChatBody;
using testing::Json;
using testing::kChat;
using testing::OpenAiReply;
using testing::OpenAiServer;
using testing::OpenAiStream;

constexpr char kAnswer[] = "Think about it.⟨/think⟩⟨response⟩The answer is 42.⟨/response⟩⟨/message⟩";

class OpenAiChatStreamTest : public ::testing::Test {
 protected:
  OpenAiServer server_;
};

TEST_F(OpenAiChatStreamTest, StreamShape) {
  server_.ForceText(kAnswer);
  const OpenAiReply whole = server_.Post(kChat, ChatBody());
  const OpenAiStream stream = server_.Stream(kChat, ChatBody({{"stream_options", {{"include_usage", true}}}}));
  ASSERT_EQ(stream.status, 200);
  EXPECT_EQ(stream.problem, "");
  EXPECT_TRUE(stream.done);
  EXPECT_EQ(stream.head.Header("cache-control"), "no-cache");
  EXPECT_EQ(stream.head.Header("x-accel-buffering"), "no");
  EXPECT_NE(stream.head.Header("x-request-id"), "");
  EXPECT_EQ(stream.Text(), "The answer is 42.");
  EXPECT_EQ(stream.Reasoning(), "Think about it.");
  EXPECT_EQ(stream.FinishReason(), "stop");
  const Json& first = stream.chunks.front();
  EXPECT_EQ(first["object"], "chat.completion.chunk");
  EXPECT_EQ(first["choices"][0]["delta"], Json({{"role", "assistant"}, {"content", ""}}));
  EXPECT_TRUE(first["choices"][0].contains("finish_reason"));
  EXPECT_TRUE(first["choices"][0]["finish_reason"].is_null());
  int finishes = 0;
  int roles = 0;
  for (const Json& chunk : stream.chunks) {
    for (const Json& choice : chunk["choices"]) {
      const Json& delta = choice["delta"];
      finishes += choice["finish_reason"].is_string();
      roles += delta.contains("role");
      EXPECT_FALSE(delta.contains("content") && delta.contains("reasoning_content"));
      for (const auto& [key, value] : delta.items()) EXPECT_FALSE(value.is_null()) << key;
      const bool spam = !delta.contains("role") && delta.contains("content") && delta["content"] == "";
      EXPECT_FALSE(spam);
      EXPECT_EQ(choice["finish_reason"].is_string(), delta.empty());
    }
  }
  EXPECT_EQ(finishes, 1);
  EXPECT_EQ(roles, 1);
  const Json& last = stream.chunks.back();
  EXPECT_EQ(last["choices"], Json::array());
  EXPECT_EQ(last["usage"], whole.body["usage"]);
}

// B25
TEST_F(OpenAiChatStreamTest, UsageComesOnlyWhenAskedFor) {
  server_.ForceText(kAnswer);
  for (const Json& options :
       {Json(), Json::object(), Json({{"include_usage", false}}), Json({{"include_usage", nullptr}})}) {
    const OpenAiStream stream = server_.Stream(kChat, ChatBody({{"stream_options", options}, {"max_tokens", 5}}));
    EXPECT_EQ(stream.problem, "");
    EXPECT_TRUE(stream.done);
    for (const Json& chunk : stream.chunks) {
      EXPECT_EQ(chunk["choices"].size(), 1u);
      EXPECT_FALSE(chunk.contains("usage"));
    }
    EXPECT_EQ(stream.FinishReason(), "length");
  }
  const OpenAiStream stream =
      server_.Stream(kChat, ChatBody({{"stream_options", {{"include_usage", true}}}, {"max_tokens", 5}}));
  int empty = 0;
  for (const Json& chunk : stream.chunks) empty += chunk["choices"].empty();
  EXPECT_EQ(empty, 1);
  EXPECT_EQ(stream.chunks.back()["usage"]["completion_tokens"], 5);
  const OpenAiReply refused = server_.Post(kChat, ChatBody({{"stream_options", {{"include_usage", true}}}}));
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(refused.Param(), "stream_options");
}

TEST_F(OpenAiChatStreamTest, ContinuousUsageCountsEveryToken) {
  server_.ForceText(kAnswer);
  const OpenAiStream stream = server_.Stream(
      kChat, ChatBody({{"stream_options", {{"include_usage", true}, {"continuous_usage_stats", true}}}}));
  EXPECT_EQ(stream.problem, "");
  int64_t before = 0;
  for (const Json& chunk : stream.chunks) {
    ASSERT_TRUE(chunk.contains("usage"));
    EXPECT_GE(chunk["usage"]["completion_tokens"], before);
    EXPECT_EQ(chunk["usage"]["prompt_tokens"], stream.chunks.back()["usage"]["prompt_tokens"]);
    before = chunk["usage"]["completion_tokens"];
  }
  const Json& end = stream.chunks[stream.chunks.size() - 2];
  EXPECT_EQ(end["usage"]["completion_tokens"], stream.chunks.back()["usage"]["completion_tokens"]);
}

// B22
TEST_F(OpenAiChatStreamTest, SplitCharactersArriveWhole) {
  const auto bytes = [&](std::string_view text) {
    std::vector<int32_t> tokens = server_.Tokens("⟨/think⟩⟨response⟩");
    for (const char c : text) tokens.push_back(server_.ByteToken(static_cast<uint8_t>(c)));
    return tokens;
  };
  const std::string family = "👨\u200d👩\u200d👧 中国";
  server_.Force(bytes(family));
  const Json body = ChatBody({{"logprobs", true}, {"max_tokens", 200}});
  const OpenAiReply whole = server_.Post(kChat, body);
  EXPECT_EQ(whole.body["choices"][0]["message"]["content"], family);
  const OpenAiStream stream = server_.Stream(kChat, body);
  EXPECT_EQ(stream.problem, "");
  EXPECT_EQ(stream.Text(), family);
  std::string joined;
  for (const Json& chunk : stream.chunks) {
    const Json& choice = chunk["choices"][0];
    EXPECT_EQ(choice["delta"].dump().find("\uFFFD"), std::string::npos);
    if (choice["logprobs"].is_null()) continue;
    for (const Json& token : choice["logprobs"]["content"]) {
      for (const Json& byte : token["bytes"]) joined += static_cast<char>(byte.get<int>());
    }
  }
  EXPECT_EQ(joined, family);
  std::string whole_bytes;
  for (const Json& token : whole.body["choices"][0]["logprobs"]["content"]) {
    for (const Json& byte : token["bytes"]) whole_bytes += static_cast<char>(byte.get<int>());
  }
  EXPECT_EQ(whole_bytes, family);

  server_.Force(bytes("\xF0 a"));
  EXPECT_EQ(server_.Post(kChat, ChatBody()).body["choices"][0]["message"]["content"], "\uFFFD a");
  EXPECT_EQ(server_.Stream(kChat, ChatBody()).Text(), "\uFFFD a");
}

// B23
TEST_F(OpenAiChatStreamTest, ALimitInsideACharacterGivesValidJson) {
  std::vector<int32_t> tokens = server_.Tokens("⟨/think⟩⟨response⟩");
  tokens.push_back(server_.ByteToken(0xF0));
  tokens.push_back(server_.ByteToken(0x9F));
  server_.Force(tokens);
  const Json body = ChatBody({{"max_tokens", tokens.size()}});
  const OpenAiReply whole = server_.Post(kChat, body);
  ASSERT_EQ(whole.status, 200);
  const OpenAiStream stream = server_.Stream(kChat, body);
  EXPECT_EQ(stream.problem, "");
  EXPECT_TRUE(stream.done);
  EXPECT_EQ(whole.body["choices"][0]["message"]["content"], stream.Text());
  EXPECT_TRUE(stream.Text() == "" || stream.Text() == "\uFFFD") << stream.Text();
  EXPECT_EQ(stream.FinishReason(), "length");
  EXPECT_EQ(whole.body["choices"][0]["finish_reason"], "length");

  const OpenAiReply nul = server_.PostText(kChat, R"({"model":"x\u0000","messages":[{"role":"user","content":"a"}]})");
  EXPECT_EQ(nul.status, 404);
  EXPECT_TRUE(nul.body.contains("error"));
  const OpenAiReply huge = server_.Post(kChat, ChatBody({{"model", std::string(100000, 'm')}}));
  EXPECT_EQ(huge.status, 404);
  EXPECT_LE(huge.raw.body.size(), 4096u);
  EXPECT_EQ(server_.Post(kChat, ChatBody()).status, 200);
}

// B24
TEST_F(OpenAiChatStreamTest, StopStringsNeverLeak) {
  const auto force = [&](const std::vector<std::string>& pieces) {
    std::vector<int32_t> tokens = server_.Tokens("⟨/think⟩⟨response⟩");
    for (const std::string& piece : pieces) server_.tokenizer().EncodeBytes(piece, &tokens);
    for (int i = 0; i < 100; ++i) server_.tokenizer().EncodeBytes(" more", &tokens);
    server_.Force(tokens);
  };
  const auto expect = [&](const Json& stop, const std::string& text, const std::string& matched) {
    const Json body = ChatBody({{"stop", stop}});
    const OpenAiReply whole = server_.Post(kChat, body);
    ASSERT_EQ(whole.status, 200) << whole.raw.body;
    EXPECT_EQ(whole.body["choices"][0]["message"]["content"], text);
    EXPECT_EQ(whole.body["choices"][0]["finish_reason"], "stop");
    EXPECT_EQ(whole.body["choices"][0]["stop_reason"], matched);
    const OpenAiStream stream = server_.Stream(kChat, body);
    EXPECT_EQ(stream.problem, "");
    EXPECT_EQ(stream.Text(), text);
    EXPECT_EQ(stream.FinishReason(), "stop");
    EXPECT_EQ(stream.chunks.back()["choices"][0]["stop_reason"], matched);
  };
  force({"abc", "\nUs", "er", ": x"});
  expect({"\nUser:"}, "abc", "\nUser:");
  expect("\nUser:", "abc", "\nUser:");
  force({"aE", "ND", "X"});
  expect({"END", "NDX"}, "a", "END");
  force({"fooSTOPbar"});
  expect("STOP", "foo", "STOP");
  force({"hi \xF0", "\x9F", "\x98", "\x80"});
  expect("😀", "hi ", "😀");
  EXPECT_TRUE(server_.NothingLeaked());

  EXPECT_EQ(server_.Post(kChat, ChatBody({{"stop", {""}}})).Param(), "stop");
  EXPECT_EQ(server_.Post(kChat, ChatBody({{"stop", Json(std::vector<std::string>(17, "x"))}})).Param(), "stop");
  EXPECT_EQ(server_.Post(kChat, ChatBody({{"stop", Json(std::vector<std::string>(16, "x"))}})).status, 200);
  EXPECT_EQ(server_.Post(kChat, ChatBody({{"stop", {std::string(257, 'x')}}})).Param(), "stop");
}

TEST_F(OpenAiChatStreamTest, SeveralChoicesInterleave) {
  server_.ForceText(kAnswer);
  const OpenAiReply whole = server_.Post(kChat, ChatBody({{"n", 3}}));
  ASSERT_EQ(whole.status, 200);
  ASSERT_EQ(whole.body["choices"].size(), 3u);
  const OpenAiStream stream =
      server_.Stream(kChat, ChatBody({{"n", 3}, {"stream_options", {{"include_usage", true}}}}));
  EXPECT_EQ(stream.problem, "");
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(whole.body["choices"][i]["index"], i);
    EXPECT_EQ(whole.body["choices"][i]["message"]["content"], "The answer is 42.");
    EXPECT_EQ(stream.Text(i), "The answer is 42.");
    EXPECT_EQ(stream.FinishReason(i), "stop");
  }
  EXPECT_EQ(whole.body["usage"]["completion_tokens"], 3 * (server_.Tokens(kAnswer).size() + 1));
  EXPECT_EQ(stream.chunks.back()["usage"], whole.body["usage"]);
}

TEST_F(OpenAiChatStreamTest, EngineFailuresInsideAStreamAreErrorEvents) {
  server_.ForceEndless(server_.Tokens("x")[0]);
  testing::HttpClient client(server_.port());
  client.SendRequest("POST", kChat, ChatBody({{"stream", true}}).dump());
  ASSERT_TRUE(client.ReadHead());
  ASSERT_TRUE(client.ReadEvent());
  server_.engine().Fail();
  Json last;
  bool done = false;
  while (const auto event = client.ReadEvent()) {
    if (*event == "[DONE]") {
      done = true;
    } else {
      last = Json::parse(*event);
      EXPECT_TRUE(last.contains("error") || last["choices"][0]["finish_reason"].is_null());
    }
  }
  EXPECT_TRUE(done);
  ASSERT_TRUE(last.contains("error"));
  EXPECT_EQ(last["error"]["type"], "server_error");
  EXPECT_EQ(last.dump().find("device fault"), std::string::npos) << "no internals";
}

}  // namespace
}  // namespace k3
