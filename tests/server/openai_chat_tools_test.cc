#include <gtest/gtest.h>

#include <set>
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

constexpr char kToolAnswer[] =
    "plan⟨/think⟩⟨tools⟩⟨call tool=\"get_weather\" index=\"1\"⟩⟨argument key=\"city\" type=\"string\"⟩Oslo⟨/argument⟩"
    "⟨argument key=\"days\" type=\"number\"⟩3⟨/argument⟩⟨/call⟩⟨call tool=\"now\" "
    "index=\"2\"⟩⟨/call⟩⟨/tools⟩⟨/message⟩";

Json WeatherTools() {
  return Json::parse(R"([
    {"type":"function","function":{"name":"get_weather","description":"Weather of a city",
     "parameters":{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"number"}}}}},
    {"type":"function","function":{"name":"now"}}])");
}

class OpenAiChatToolsTest : public ::testing::Test {
 protected:
  OpenAiServer server_;
};

TEST_F(OpenAiChatToolsTest, ToolCallsWholeAndStreamed) {
  for (const size_t bytes : {0, 1, 3}) {
    server_.ForceText(kToolAnswer, bytes);
    const Json body = ChatBody({{"tools", WeatherTools()}});
    const OpenAiReply reply = server_.Post(kChat, body);
    ASSERT_EQ(reply.status, 200) << reply.raw.body;
    const Json& message = reply.body["choices"][0]["message"];
    EXPECT_TRUE(message["content"].is_null());
    EXPECT_EQ(message["reasoning_content"], "plan");
    ASSERT_EQ(message["tool_calls"].size(), 2u);
    EXPECT_EQ(message["tool_calls"][0], Json::parse(R"({"id":"get_weather_0","type":"function",
                              "function":{"name":"get_weather","arguments":"{\"city\":\"Oslo\",\"days\":3}"}})"));
    EXPECT_EQ(message["tool_calls"][1], Json::parse(R"({"id":"now_1","type":"function",
                                                        "function":{"name":"now","arguments":"{}"}})"));
    EXPECT_EQ(reply.body["choices"][0]["finish_reason"], "tool_calls");

    const OpenAiStream stream = server_.Stream(kChat, body);
    EXPECT_EQ(stream.problem, "");
    EXPECT_EQ(stream.Reasoning(), "plan");
    EXPECT_EQ(stream.Text(), "");
    EXPECT_EQ(stream.FinishReason(), "tool_calls");
    const std::vector<Json> calls = stream.ToolCalls();
    ASSERT_EQ(calls.size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(calls[i]["id"], message["tool_calls"][i]["id"]);
      EXPECT_EQ(calls[i]["name"], message["tool_calls"][i]["function"]["name"]);
      EXPECT_EQ(calls[i]["arguments"], message["tool_calls"][i]["function"]["arguments"]);
    }
    // The first frame of a call is an empty slot; later ones hold index and arguments only.
    std::set<int> seen;
    for (const Json& chunk : stream.chunks) {
      const Json& delta = chunk["choices"][0]["delta"];
      if (!delta.contains("tool_calls")) continue;
      EXPECT_FALSE(delta.contains("content"));
      ASSERT_EQ(delta["tool_calls"].size(), 1u);
      const Json& call = delta["tool_calls"][0];
      if (seen.insert(call["index"].get<int>()).second) {
        EXPECT_EQ(call["type"], "function");
        EXPECT_EQ(call["function"]["arguments"], "");
      } else {
        EXPECT_FALSE(call.contains("id"));
        EXPECT_FALSE(call["function"].contains("name"));
        EXPECT_NE(call["function"]["arguments"], "");
      }
    }
  }
}

// B32
TEST_F(OpenAiChatToolsTest, AToolCallAfterAnUnclosedThoughtIsSeen) {
  const std::string call =
      "⟨tools⟩⟨call tool=\"get_weather\" index=\"1\"⟩⟨argument key=\"city\" type=\"string\"⟩Oslo⟨/argument⟩⟨/call⟩"
      "⟨/tools⟩⟨/message⟩";
  const std::pair<std::string, std::string> cases[] = {
      {"plan" + call, ""},
      {"plan⟨/think⟩" + call, ""},
      {"plan⟨response⟩Let me see.⟨/response⟩" + call, "Let me see."},
  };
  for (const auto& [text, content] : cases) {
    for (const size_t bytes : {0, 1, 3}) {
      server_.ForceText(text, bytes);
      const Json body = ChatBody({{"tools", WeatherTools()}});
      const OpenAiReply reply = server_.Post(kChat, body);
      const Json& choice = reply.body["choices"][0];
      EXPECT_EQ(choice["message"]["reasoning_content"], "plan");
      if (content.empty()) {
        EXPECT_TRUE(choice["message"]["content"].is_null());
      } else {
        EXPECT_EQ(choice["message"]["content"], content);
      }
      ASSERT_EQ(choice["message"]["tool_calls"].size(), 1u) << text;
      EXPECT_EQ(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"city\":\"Oslo\"}");
      EXPECT_EQ(choice["finish_reason"], "tool_calls");
      const OpenAiStream stream = server_.Stream(kChat, body);
      EXPECT_EQ(stream.Reasoning(), "plan");
      EXPECT_EQ(stream.Text(), content);
      ASSERT_EQ(stream.ToolCalls().size(), 1u);
      EXPECT_EQ(stream.ToolCalls()[0]["arguments"], "{\"city\":\"Oslo\"}");
      EXPECT_EQ(stream.FinishReason(), "tool_calls");
    }
  }
}

TEST_F(OpenAiChatToolsTest, ACutOffToolCallFinishesByLength) {
  const std::vector<int32_t> tokens = server_.Tokens(
      "p⟨/think⟩⟨tools⟩⟨call tool=\"get_weather\" index=\"1\"⟩⟨argument key=\"city\" type=\"string\"⟩Os");
  server_.Force(tokens);
  const Json body = ChatBody({{"tools", WeatherTools()}, {"max_tokens", tokens.size()}});
  EXPECT_EQ(server_.Post(kChat, body).body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(server_.Stream(kChat, body).FinishReason(), "length");
}

TEST_F(OpenAiChatToolsTest, OneCallOnlyWithoutParallelCalls) {
  server_.ForceText(kToolAnswer);
  const Json body = ChatBody({{"tools", WeatherTools()}, {"parallel_tool_calls", false}});
  const OpenAiReply reply = server_.Post(kChat, body);
  EXPECT_EQ(reply.body["choices"][0]["message"]["tool_calls"].size(), 1u);
  EXPECT_EQ(reply.body["choices"][0]["finish_reason"], "tool_calls");
  const OpenAiStream stream = server_.Stream(kChat, body);
  EXPECT_EQ(stream.ToolCalls().size(), 1u);
  EXPECT_TRUE(server_.NothingLeaked());
}

TEST_F(OpenAiChatToolsTest, CallIdsCountOverTheHistory) {
  server_.ForceText(kToolAnswer);
  Json body = Json::parse(R"({"messages":[{"role":"user","content":"w"},
    {"role":"assistant","content":null,"tool_calls":[{"id":"now_0","type":"function","function":{"name":"now","arguments":""}}]},
    {"role":"tool","tool_call_id":"now_0","content":"12:00"}]})");
  body["tools"] = WeatherTools();
  const OpenAiReply reply = server_.Post(kChat, body);
  ASSERT_EQ(reply.status, 200) << reply.raw.body;
  EXPECT_EQ(reply.body["choices"][0]["message"]["tool_calls"][0]["id"], "get_weather_1");
  EXPECT_EQ(reply.body["choices"][0]["message"]["tool_calls"][1]["id"], "now_2");
}

}  // namespace
}  // namespace k3
