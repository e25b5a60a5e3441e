#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "tests/testing/openai_server.h"

namespace k3 {
namespace {

using testing::ChatBody;
using testing::Json;
using testing::OpenAiReply;
using testing::OpenAiServer;
using testing::OpenAiStream;

constexpr char kChat[] = "/v1/chat/completions";
constexpr char kAnswer[] = "Think about it.⟨/think⟩⟨response⟩The answer is 42.⟨/response⟩⟨/message⟩";
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

class OpenAiChatTest : public ::testing::Test {
 protected:
  OpenAiServer server_;
};

TEST_F(OpenAiChatTest, WholeReply) {
  server_.ForceText(kAnswer);
  const OpenAiReply reply = server_.Post(kChat, ChatBody({{"model", "org/alias"}}), "x-request-id: mine-1\r\n");
  ASSERT_EQ(reply.status, 200) << reply.raw.body;
  EXPECT_EQ(reply.raw.Header("x-request-id"), "mine-1");
  EXPECT_EQ(reply.raw.Header("content-type"), "application/json");
  const Json& body = reply.body;
  EXPECT_TRUE(body["id"].get<std::string>().starts_with("chatcmpl-"));
  EXPECT_EQ(body["id"].get<std::string>().size(), 9u + 24u);
  EXPECT_EQ(body["object"], "chat.completion");
  EXPECT_TRUE(body["created"].is_number_integer());
  EXPECT_EQ(body["model"], "org/alias");
  ASSERT_EQ(body["choices"].size(), 1u);
  const Json& choice = body["choices"][0];
  EXPECT_EQ(choice["index"], 0);
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_TRUE(choice["logprobs"].is_null());
  const Json& message = choice["message"];
  EXPECT_EQ(message["role"], "assistant");
  EXPECT_EQ(message["content"], "The answer is 42.");
  EXPECT_EQ(message["reasoning_content"], "Think about it.");
  EXPECT_FALSE(message.contains("tool_calls"));
  const Json& usage = body["usage"];
  EXPECT_EQ(usage["completion_tokens"], server_.Tokens(kAnswer).size() + 1);
  EXPECT_EQ(usage["total_tokens"], usage["prompt_tokens"].get<int>() + usage["completion_tokens"].get<int>());
  EXPECT_EQ(usage["completion_tokens_details"]["reasoning_tokens"], server_.Tokens("Think about it.").size());
  EXPECT_EQ(usage["prompt_tokens_details"]["cached_tokens"], 0);
  EXPECT_EQ(server_.engine().LastRequest().external_id, "mine-1");
}

TEST_F(OpenAiChatTest, StreamShape) {
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
TEST_F(OpenAiChatTest, UsageComesOnlyWhenAskedFor) {
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

TEST_F(OpenAiChatTest, ContinuousUsageCountsEveryToken) {
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

TEST_F(OpenAiChatTest, ToolCallsWholeAndStreamed) {
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
TEST_F(OpenAiChatTest, AToolCallAfterAnUnclosedThoughtIsSeen) {
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

TEST_F(OpenAiChatTest, ACutOffToolCallFinishesByLength) {
  const std::vector<int32_t> tokens = server_.Tokens(
      "p⟨/think⟩⟨tools⟩⟨call tool=\"get_weather\" index=\"1\"⟩⟨argument key=\"city\" type=\"string\"⟩Os");
  server_.Force(tokens);
  const Json body = ChatBody({{"tools", WeatherTools()}, {"max_tokens", tokens.size()}});
  EXPECT_EQ(server_.Post(kChat, body).body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(server_.Stream(kChat, body).FinishReason(), "length");
}

TEST_F(OpenAiChatTest, OneCallOnlyWithoutParallelCalls) {
  server_.ForceText(kToolAnswer);
  const Json body = ChatBody({{"tools", WeatherTools()}, {"parallel_tool_calls", false}});
  const OpenAiReply reply = server_.Post(kChat, body);
  EXPECT_EQ(reply.body["choices"][0]["message"]["tool_calls"].size(), 1u);
  EXPECT_EQ(reply.body["choices"][0]["finish_reason"], "tool_calls");
  const OpenAiStream stream = server_.Stream(kChat, body);
  EXPECT_EQ(stream.ToolCalls().size(), 1u);
  EXPECT_TRUE(server_.NothingLeaked());
}

TEST_F(OpenAiChatTest, CallIdsCountOverTheHistory) {
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

// B22
TEST_F(OpenAiChatTest, SplitCharactersArriveWhole) {
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
TEST_F(OpenAiChatTest, ALimitInsideACharacterGivesValidJson) {
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
TEST_F(OpenAiChatTest, StopStringsNeverLeak) {
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

TEST_F(OpenAiChatTest, SeveralChoicesInterleave) {
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

TEST_F(OpenAiChatTest, Logprobs) {
  server_.ForceText("x⟨/think⟩⟨response⟩one two⟨/response⟩⟨/message⟩");
  const OpenAiReply reply = server_.Post(kChat, ChatBody({{"logprobs", true}, {"top_logprobs", 2}}));
  ASSERT_EQ(reply.status, 200) << reply.raw.body;
  const Json& content = reply.body["choices"][0]["logprobs"]["content"];
  const std::vector<int32_t> tokens = server_.Tokens("one two");
  ASSERT_EQ(content.size(), tokens.size()) << "tokens of the content only, without reasoning and markers";
  std::string joined;
  for (const Json& token : content) {
    joined += token["token"].get<std::string>();
    EXPECT_EQ(token["logprob"], -0.25);
    ASSERT_EQ(token["top_logprobs"].size(), 2u);
    EXPECT_EQ(token["top_logprobs"][0]["token"], token["token"]);
    EXPECT_EQ(token["top_logprobs"][0]["logprob"], -0.25);
    EXPECT_EQ(token["top_logprobs"][1]["logprob"], -1.25);
  }
  EXPECT_EQ(joined, "one two");
  const OpenAiReply plain = server_.Post(kChat, ChatBody({{"logprobs", true}}));
  for (const Json& token : plain.body["choices"][0]["logprobs"]["content"]) {
    EXPECT_TRUE(token["top_logprobs"].empty());
  }
  const OpenAiStream stream = server_.Stream(kChat, ChatBody({{"logprobs", true}, {"top_logprobs", 2}}));
  Json streamed = Json::array();
  for (const Json& chunk : stream.chunks) {
    const Json& logprobs = chunk["choices"][0]["logprobs"];
    if (!logprobs.is_null()) streamed.insert(streamed.end(), logprobs["content"].begin(), logprobs["content"].end());
  }
  EXPECT_EQ(streamed, content);
  EXPECT_EQ(server_.Post(kChat, ChatBody({{"top_logprobs", 2}})).Param(), "top_logprobs");
  EXPECT_EQ(server_.Post(kChat, ChatBody({{"logprobs", true}, {"top_logprobs", 21}})).Param(), "top_logprobs");
}

TEST_F(OpenAiChatTest, PromptLogprobsAndTokenIds) {
  server_.ForceText(kAnswer);
  const OpenAiReply reply = server_.Post(kChat, ChatBody({{"prompt_logprobs", 0}, {"return_token_ids", true}}));
  ASSERT_EQ(reply.status, 200) << reply.raw.body;
  const Json& ids = reply.body["prompt_token_ids"];
  EXPECT_EQ(ids.size(), reply.body["usage"]["prompt_tokens"]);
  const OpenAiReply rendered = server_.Post("/render", ChatBody());
  EXPECT_EQ(rendered.body["token_ids"], ids);
  const Json& rows = reply.body["prompt_logprobs"];
  ASSERT_EQ(rows.size(), ids.size());
  EXPECT_TRUE(rows[0].is_null());
  EXPECT_EQ(rows[3][std::to_string(ids[3].get<int>())]["logprob"], -1.5);
  std::vector<int32_t> expected = server_.Tokens(kAnswer);
  expected.push_back(3842);
  EXPECT_EQ(reply.body["choices"][0]["token_ids"], Json(expected));
  const OpenAiStream stream = server_.Stream(kChat, ChatBody({{"return_token_ids", true}}));
  Json streamed = Json::array();
  for (const Json& chunk : stream.chunks) {
    const Json& choice = chunk["choices"][0];
    if (choice.contains("token_ids"))
      streamed.insert(streamed.end(), choice["token_ids"].begin(), choice["token_ids"].end());
  }
  EXPECT_EQ(streamed, Json(expected));
  EXPECT_EQ(stream.chunks.front()["prompt_token_ids"], ids);
}

TEST_F(OpenAiChatTest, ParametersReachTheEngine) {
  server_.ForceText(kAnswer);
  const OpenAiReply reply = server_.Post(kChat, ChatBody({{"temperature", 0.5},
                                                          {"top_p", 0.9},
                                                          {"top_k", 7.0},
                                                          {"min_p", 0.1},
                                                          {"presence_penalty", -1},
                                                          {"frequency_penalty", 1.5},
                                                          {"repetition_penalty", 1.1},
                                                          {"seed", -3},
                                                          {"logit_bias", {{"5", 2.5}, {"6", -100}}},
                                                          {"max_completion_tokens", 9.0},
                                                          {"max_tokens", 3},
                                                          {"min_tokens", 2},
                                                          {"ignore_eos", true},
                                                          {"stop_token_ids", {11, 12}},
                                                          {"priority", 4},
                                                          {"session_id", "s"},
                                                          {"cache_salt", "c"},
                                                          {"bypass_prefix_cache", true},
                                                          {"n", 2},
                                                          {"user", "u"},
                                                          {"metadata", {{"a", 1}}},
                                                          {"unknown_field", {1, 2}},
                                                          {"repetition_stop", {{"max_period", 8}, {"count", 3}}}}));
  ASSERT_EQ(reply.status, 200) << reply.raw.body;
  const Request request = server_.engine().LastRequest();
  const SamplingParams& sampling = request.sampling;
  EXPECT_EQ(sampling.temperature, 0.5f);
  EXPECT_EQ(sampling.top_p, 0.9f);
  EXPECT_EQ(sampling.top_k, 7);
  EXPECT_EQ(sampling.min_p, 0.1f);
  EXPECT_EQ(sampling.presence_penalty, -1.0f);
  EXPECT_EQ(sampling.frequency_penalty, 1.5f);
  EXPECT_EQ(sampling.repetition_penalty, 1.1f);
  EXPECT_EQ(sampling.seed, static_cast<uint64_t>(-3));
  EXPECT_EQ(sampling.logit_bias, (std::vector<std::pair<int32_t, float>>{{5, 2.5f}, {6, -100.0f}}));
  EXPECT_EQ(sampling.max_new_tokens, 9);
  EXPECT_EQ(sampling.min_new_tokens, 2);
  EXPECT_TRUE(sampling.ignore_eos);
  EXPECT_EQ(sampling.stop_token_ids, (std::vector<int32_t>{11, 12}));
  EXPECT_EQ(sampling.repetition_max_period, 8);
  EXPECT_EQ(sampling.repetition_count, 3);
  EXPECT_EQ(request.priority, 4);
  EXPECT_EQ(request.session_id, "s");
  EXPECT_EQ(request.cache_salt, "c");
  EXPECT_TRUE(request.bypass_prefix_cache);
  EXPECT_EQ(request.num_choices, 2);

  // null is absent, for every field.
  Json nulls = ChatBody();
  for (const char* key : {"model",
                          "temperature",
                          "top_p",
                          "top_k",
                          "min_p",
                          "presence_penalty",
                          "frequency_penalty",
                          "repetition_penalty",
                          "seed",
                          "logit_bias",
                          "max_tokens",
                          "max_completion_tokens",
                          "min_tokens",
                          "ignore_eos",
                          "stop",
                          "stop_token_ids",
                          "n",
                          "stream",
                          "stream_options",
                          "tools",
                          "tool_choice",
                          "parallel_tool_calls",
                          "response_format",
                          "reasoning_effort",
                          "thinking",
                          "chat_template_kwargs",
                          "logprobs",
                          "top_logprobs",
                          "user",
                          "priority",
                          "functions",
                          "function_call",
                          "best_of",
                          "prompt_logprobs",
                          "return_token_ids",
                          "modalities",
                          "audio"}) {
    nulls[key] = nullptr;
  }
  EXPECT_EQ(server_.Post(kChat, nulls).status, 200);
  EXPECT_EQ(server_.engine().LastRequest().sampling.temperature, 1.0f);
}

TEST_F(OpenAiChatTest, EngineFailuresInsideAStreamAreErrorEvents) {
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

TEST(OpenAiStrictTest, UsageStandsOnTheEndingChoiceAndFixedValuesHold) {
  OpenAiServer::Options options;
  options.vendor_strict = true;
  OpenAiServer server(options);
  server.ForceText(kAnswer);
  const OpenAiStream stream = server.Stream(kChat, ChatBody({{"stream_options", {{"include_usage", true}}}}));
  EXPECT_EQ(stream.problem, "");
  const Json& end = stream.chunks[stream.chunks.size() - 2];
  EXPECT_EQ(end["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(end["choices"][0]["usage"], stream.chunks.back()["usage"]);
  const OpenAiReply rendered = server.Post("/render", ChatBody());
  // The ids that only open the think channel do not count: <|open|> think <|sep|>, the word being some ids.
  const int opening = 2 + static_cast<int>(server.Tokens("think").size());
  EXPECT_EQ(stream.chunks.back()["usage"]["prompt_tokens"], rendered.body["count"].get<int>() - opening);

  const Json accepted = {
      {"temperature", 1.0}, {"top_p", 0.95}, {"n", 1}, {"presence_penalty", 0}, {"frequency_penalty", 0}};
  EXPECT_EQ(server.Post(kChat, ChatBody(accepted)).status, 200);
  const std::pair<const char*, Json> refused[] = {
      {"temperature", 0.6}, {"top_p", 0.9}, {"n", 2}, {"presence_penalty", 0.5}, {"frequency_penalty", 0.1}};
  for (const auto& [key, value] : refused) {
    const OpenAiReply reply = server.Post(kChat, ChatBody({{key, value}}));
    EXPECT_EQ(reply.status, 400) << key;
    EXPECT_EQ(reply.Param(), key);
  }
  EXPECT_EQ(server.Post(kChat, ChatBody({{"stop", {"a", "b", "c", "d", "e"}}})).status, 200);
  EXPECT_EQ(server.Post(kChat, ChatBody({{"stop", {"a", "b", "c", "d", "e", "f"}}})).Param(), "stop");
  EXPECT_EQ(server.Post(kChat, ChatBody({{"stop", std::string(33, 'x')}})).Param(), "stop");
  EXPECT_EQ(server.Post(kChat, ChatBody({{"thinking", {{"type", "disabled"}}}})).Param(), "thinking");
  EXPECT_EQ(server.Post(kChat, ChatBody({{"reasoning_effort", "medium"}})).Param(), "reasoning_effort");
}

}  // namespace
}  // namespace k3
