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
