#include "server/openai/openai_request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/openai_request_fixture.h"
#include "tests/testing/process_memory.h"

namespace k3 {
namespace {

using testing::ChatBody;
using testing::Json;
using testing::kChat;
using testing::kCompletions;
using testing::OpenAiReply;
using testing::OpenAiStream;

// B49: what a client was refused is counted, whichever layer saw it.
TEST_F(OpenAiRequestTest, EveryRefusalIsCountedOnce) {
  const auto counted = [this](const std::string& reason) {
    const std::string page = server_.metrics().Render();
    const std::string name = "k3serve_rejected_total{reason=\"" + reason + "\"} ";
    const size_t at = page.find(name);
    return at == std::string::npos ? -1 : std::stoi(page.substr(at + name.size()));
  };
  EXPECT_EQ(counted("invalid_argument"), 0);
  server_.PostText(kChat, "{");
  EXPECT_EQ(counted("invalid_argument"), 1) << "no JSON";
  server_.Post(kChat, ChatBody({{"temperature", "hot"}}));
  EXPECT_EQ(counted("invalid_argument"), 2) << "a field of the route";
  server_.Post(kCompletions, {{"prompt", {5, 4096}}});
  EXPECT_EQ(counted("invalid_argument"), 3) << "found by the common path";
  server_.Post(kChat, ChatBody({{"model", "nope"}}));
  EXPECT_EQ(counted("not_found"), 1);
  EXPECT_EQ(counted("invalid_argument"), 3);
}

// B27: a field that nobody knows is ignored, at every level.
TEST_F(OpenAiRequestTest, UnknownFieldsAreIgnored) {
  Accepted(ChatBody({{"mystery", {{"a", {1, "x", nullptr}}}}, {"stream_mode", "x"}}));
  Accepted(Json::parse(
      R"({"messages":[{"role":"user","content":[{"type":"text","text":"a","cache_control":{}}],"weight":1}]})"));
  const OpenAiReply raw = server_.Post(kCompletions, {{"prompt", "a"}, {"max_tokens", 1}, {"mystery", 5}});
  EXPECT_EQ(raw.status, 200) << raw.raw.body;
  EXPECT_EQ(server_.Stream(kChat, ChatBody({{"mystery", true}})).status, 200);
}

TEST_F(OpenAiRequestTest, BodiesThatAreNoObject) {
  for (const char* body :
       {"{", "", "[]", "\"x\"", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],}", "5", "null",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]} x", "nul", "{\"a\" 1}", "{a:1}", "{'a':1}",
        "{\"a\":01}", "{\"a\":.5}", "{\"a\":+1}", "{\"a\":\"\\x\"}", "{\"a\":\"\n\"}", "\xEF\xBB\xBF{}"}) {
    for (const char* path : {kChat, kCompletions, "/tokenize", "/detokenize", "/render"}) {
      const OpenAiReply reply = server_.PostText(path, body);
      EXPECT_EQ(reply.status, 400) << path << " " << body;
      ASSERT_TRUE(reply.body.contains("error")) << body;
      EXPECT_EQ(reply.body["error"]["type"], "invalid_request_error");
    }
  }
  const OpenAiReply reply = server_.PostText(kChat, R"({"messages": [1,, 2]})");
  EXPECT_NE(reply.body["error"]["message"].get<std::string>().find("byte 16"), std::string::npos) << reply.raw.body;
  const OpenAiReply nan = server_.PostText(kChat, R"({"messages":[{"role":"user","content":"a"}],"temperature":NaN})");
  EXPECT_EQ(nan.status, 400);
}

TEST_F(OpenAiRequestTest, InvalidUtf8) {
  for (const char* bytes : {"\xFF", "\xC3(", "\xED\xA0\x80", "\xF5\x80\x80\x80", "\xC0\x80"}) {
    const std::string body = std::string(R"({"messages":[{"role":"user","content":")") + bytes + "\"}]}";
    const OpenAiReply reply = server_.PostText(kChat, body);
    EXPECT_EQ(reply.status, 400);
    EXPECT_TRUE(reply.body.contains("error")) << "the error is valid JSON and UTF-8";
  }
}

TEST_F(OpenAiRequestTest, UnknownModel) {
  const OpenAiReply reply = server_.Post(kChat, ChatBody({{"model", "nope"}}));
  EXPECT_EQ(reply.status, 404);
  EXPECT_EQ(reply.Code(), "model_not_found");
  EXPECT_EQ(reply.Param(), "model");
  const OpenAiStream stream = server_.Stream(kChat, ChatBody({{"model", "nope"}}));
  EXPECT_EQ(stream.status, 404);
  EXPECT_EQ(stream.error["error"]["code"], "model_not_found");
  for (const char* name : {"tiny-k3", "org/alias"}) {
    EXPECT_EQ(server_.Post(kChat, ChatBody({{"model", name}})).body["model"], name);
  }
  EXPECT_EQ(server_.Post(kChat, ChatBody()).body["model"], "tiny-k3");
  Refused(ChatBody({{"model", 5}}), "model");
}

TEST_F(OpenAiRequestTest, WrongTypesAndRanges) {
  const std::pair<const char*, std::vector<Json>> cases[] = {
      {"temperature", {"hot", -1, 2.1, true, Json::array()}},
      {"top_p", {0, -0.1, 1.1, "1"}},
      {"top_k", {-2, 1.5, "40", Json::parse("9223372036854775808"), true}},
      {"min_p", {-0.1, 1.1, 1}},
      {"presence_penalty", {2.1, -2.1, "0"}},
      {"frequency_penalty", {2.1, -2.1}},
      {"repetition_penalty", {0, -1, 11}},
      {"seed", {"1", 1.5, true, Json::parse("18446744073709551616")}},
      {"n", {0, -1, 129, 100000, 1.5, "2"}},
      {"stop", {5, true, Json::object(), Json::parse("[5]"), Json::parse("[null]"), ""}},
      {"stop_token_ids", {5, Json::parse("[\"a\"]"), Json::parse("[-1]"), Json::parse("[1.5]"), Json::parse("[4096]")}},
      {"ignore_eos", {1, "true"}},
      {"min_tokens", {-1, 1.5, "1"}},
      {"stream_options", {5, "x"}},
      {"user", {}},
      {"priority", {1.5, "1", Json::parse("2147483648")}},
      {"session_id", {5, std::string(257, 'x')}},
      {"cache_salt", {5, std::string(257, 'x')}},
      {"tools", {5, "x", Json::object()}},
      {"response_format",
       {5, "json", Json::object(), Json::parse(R"({"type":"yaml"})"), Json::parse(R"({"type":5})"),
        Json::parse(R"({"type":"json_schema"})")}},
      {"reasoning_effort", {5, "extreme", true}},
      {"thinking", {5, true}},
      {"chat_template_kwargs", {5, "x"}},
      {"parallel_tool_calls", {1, "no"}},
      {"logprobs", {1, "yes"}},
      {"best_of", {2, 0, "1"}},
      {"functions", {Json::array(), Json::parse("[{\"name\":\"f\"}]")}},
      {"function_call", {"auto"}},
      {"audio", {Json::object()}},
      {"modalities", {Json::parse("[\"audio\"]")}},
      {"use_beam_search", {true}},
  };
  for (const auto& [key, values] : cases) {
    for (const Json& value : values) Refused(ChatBody({{key, value}}), key);
  }
  Refused(ChatBody({{"thinking", {{"type", "maybe"}}}}), "thinking.type");
  Refused(ChatBody({{"thinking", {{"effort", "extreme"}}}}), "thinking.effort");
  Refused(ChatBody({{"thinking", {{"keep", "some"}}}}), "thinking.keep");
  Refused(ChatBody({{"chat_template_kwargs", {{"thinking_effort", "x"}}}}), "chat_template_kwargs.thinking_effort");
  Refused(ChatBody({{"repetition_stop", {{"max_period", 0}, {"count", 2}}}}), "repetition_stop.max_period");
  Refused(ChatBody({{"repetition_stop", {{"max_period", 4}}}}), "repetition_stop");
  for (const Json& value : {Json(-1), Json(0), Json(1), Json(4095), Json(4096), Json(4097), Json(2147483647)}) {
    Accepted(ChatBody({{"top_k", value}}));
    const int32_t expected = value <= 0 || value >= 4096 ? 0 : value.get<int32_t>();
    EXPECT_EQ(server_.engine().LastRequest().sampling.top_k, expected) << value;
  }
  for (const Json& value : {Json(0), Json(2), Json(0.0), Json(1e-3)}) Accepted(ChatBody({{"temperature", value}}));
  Accepted(ChatBody({{"n", 2.0}, {"best_of", 1}, {"modalities", {"text"}}}));
  Accepted(ChatBody({{"seed", Json::parse("18446744073709551615")}}));
  EXPECT_EQ(server_.engine().LastRequest().sampling.seed, ~uint64_t{0});
}

// B19
TEST_F(OpenAiRequestTest, LogitBias) {
  for (const char* bad : {R"({"4096":5})", R"({"-1":1})", R"({"abc":1})", R"({"1.0":1})", R"({"05":1})", R"({"5":101})",
                          R"({"5":-101})", R"({"5":null})", R"({"5":"1"})", "[1,2]", R"({"":1})", R"({" 5":1})",
                          R"({"99999999999":1})", R"({"5":1e999})"}) {
    Refused(ChatBody({{"logit_bias", Json::parse(bad, nullptr, false).is_discarded() ? Json::parse("{\"5\":1e300}")
                                                                                     : Json::parse(bad)}}),
            "logit_bias");
  }
  Accepted(ChatBody({{"logit_bias", Json::parse(R"({"4095":-100})")}}));
  Accepted(ChatBody({{"logit_bias", Json::object()}}));
}

// A batch of thousands of prompts shares the rest of the body, whose strings nobody has looked at yet.
TEST_F(OpenAiRequestTest, LongFieldsOfABatchTakeTheirMemoryOnce) {
  const std::vector<std::string> prompts(4000, "a");
  const std::string text(2 << 20, 'x');
  const double before = testing::PeakMegabytes();
  for (const char* key : {"guided_regex", "stop", "session_id", "cache_salt"}) {
    const OpenAiReply reply = server_.Post(kCompletions, {{"prompt", prompts}, {key, text}});
    EXPECT_EQ(reply.status, 400);
    EXPECT_EQ(reply.Param(), key);
  }
  EXPECT_EQ(server_.Post(kCompletions, {{"prompt", prompts}, {"model", text}}).status, 404);
  EXPECT_LT(testing::PeakMegabytes() - before, 1000) << "a copy for each prompt is 8,000";
}

// What is wrong names the field, what was expected and what came.
TEST_F(OpenAiRequestTest, MessagesSayWhatCame) {
  const auto message = [this](const std::string& body, const char* path = kChat) {
    const OpenAiReply reply = server_.PostText(path, body);
    EXPECT_EQ(reply.status, 400) << body;
    return reply.body["error"]["message"].get<std::string>();
  };
  const auto with = [&](const std::string& member) {
    return message(R"({"messages":[{"role":"user","content":"a"}],)" + member + "}");
  };
  const std::pair<const char*, std::vector<const char*>> cases[] = {
      {R"("logit_bias":{"abc":1})", {"logit_bias: ", "token ids", "not \"abc\""}},
      {R"("logit_bias":{"-1":1})", {"logit_bias: ", "from 0", "not \"-1\""}},
      {R"("logit_bias":{"99999999999":1})", {"logit_bias: ", "token ids", "not \"99999999999\""}},
      {R"("logit_bias":{"4096":1})", {"logit_bias: ", "from 0 to 4095, not 4096"}},
      {R"("logit_bias":{"5":101})", {"logit_bias: ", "from -100 to 100, not 101"}},
      {R"("logit_bias":{"5":"x"})", {"logit_bias: ", "from -100 to 100, not the string \"x\""}},
      {R"("max_tokens":1e30)", {"max_tokens: ", "at least 4294967295", "over the context limit of"}},
      {R"("max_tokens":1.5)", {"max_tokens: expected an integer, not 1.5"}},
      {R"("max_tokens":-3)", {"max_tokens: must be at least 1, not -3"}},
      {R"("min_tokens":1e30)", {"min_tokens: at least 4294967295"}},
      {R"("temperature":3)", {"temperature: must be from 0 to 2, not 3"}},
      {R"("top_p":0)", {"top_p: must be above 0 and at most 1, not 0"}},
      {R"("seed":99999999999999999999999)", {"seed: must fit into 64 bits, not 99999999999999999999999"}},
      {R"("n":1000)", {"n: must be from 1 to 128, not 1000"}},
      {R"("stop":5)", {"stop: expected a string or a list of strings, not 5"}},
      {R"("stop":["a",5])", {"stop: expected a string or a list of strings, not 5 in it"}},
      {R"("stop_token_ids":[-1])", {"stop_token_ids: expected token ids", "not -1"}},
      {R"("guided_regex":"")", {"guided_regex: is empty"}},
      {R"("guided_grammar":"")", {"guided_grammar: is empty"}},
      {R"("guided_json":"")", {"guided_json: is empty"}},
      {R"("guided_json":5)", {"guided_json: expected a JSON schema: an object or its text, not 5"}},
      {R"("guided_choice":["a",5])", {"guided_choice: expected a list of strings, not 5 in it"}},
      {R"("response_format":{"type":"json_schema","json_schema":{"name":"n","schema":"x"}})",
       {"response_format.json_schema.schema: expected a JSON schema, not the text \"x\": expected a value at byte 0"}},
      {R"("response_format":{"type":"json_schema","json_schema":{"name":"n","schema":5}})",
       {"response_format.json_schema.schema: expected a JSON schema: an object, not 5"}},
      {R"("response_format":{"type":7})", {"response_format: type must be a string, not 7"}},
      {R"("response_format":{})", {"response_format: needs a type"}},
      {R"("tool_choice":5)", {"tool_choice: expected auto, none, required or", "not 5"}},
      {R"("thinking":{"keep":5})", {"thinking.keep: expected \"all\" or \"none\", not 5"}},
  };
  for (const auto& [member, parts] : cases) {
    const std::string text = with(member);
    for (const char* part : parts) EXPECT_THAT(text, ::testing::HasSubstr(part)) << member;
  }
  EXPECT_THAT(message("\xef\xbb\xbf{\"messages\":[]}"), ::testing::HasSubstr("not a byte order mark at byte 0"));
  EXPECT_THAT(message(R"({"prompt":[1,"a"]})", kCompletions), ::testing::HasSubstr("not the string \"a\""));
  EXPECT_THAT(message(R"({"prompt":5})", kCompletions), ::testing::HasSubstr("or a list of such lists, not 5"));
  EXPECT_THAT(message(R"({"prompt":"a","max_tokens":1e30})", kCompletions),
              ::testing::HasSubstr("max_tokens: the prompt has"));
}

// B29
TEST_F(OpenAiRequestTest, DeepNesting) {
  const auto brackets = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  const auto objects = [](int depth) {
    std::string text;
    for (int i = 0; i < depth; ++i) text += "{\"a\":";
    return text + "1" + std::string(depth, '}');
  };
  const std::string user = R"("messages":[{"role":"user","content":"a"}])";
  for (const int depth : {100, 1000, 10000, 100000}) {
    const std::string cases[] = {
        "{" + user + ",\"unknown\":" + brackets(depth) + "}",
        "{" + user + ",\"tools\":" + brackets(depth) + "}",
        R"({"messages":[{"role":"user","content":)" + brackets(depth) + "}]}",
        "{" + user + ",\"response_format\":" + brackets(depth) + "}",
        "{" + user + R"(,"tools":[{"type":"function","function":{"name":"f","parameters":)" + objects(depth) + "}}]}",
        "{" + user + ",\"unknown\":" + std::string(depth, '['),
    };
    for (const std::string& body : cases) {
      const auto start = std::chrono::steady_clock::now();
      EXPECT_EQ(server_.PostText(kChat, body).status, 400) << depth << body.substr(0, 100);
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
    }
  }
  const std::string fine =
      "{" + user + R"(,"tools":[{"type":"function","function":{"name":"f","parameters":)" + objects(20) + "}}]}";
  EXPECT_EQ(server_.PostText(kChat, fine).status, 200);
  // Arguments of past calls are JSON in a string.
  for (const int depth : {100, 100000}) {
    Json body = ChatBody();
    body["messages"].push_back(
        {{"role", "assistant"},
         {"tool_calls", Json::array({{{"id", "f_0"}, {"function", {{"name", "f"}, {"arguments", objects(depth)}}}}})}});
    body["messages"].push_back({{"role", "tool"}, {"tool_call_id", "f_0"}, {"content", "r"}});
    const int status = server_.Post(kChat, body).status;
    EXPECT_TRUE(status == 200 || status == 400) << status;
  }
}

}  // namespace
}  // namespace k3
