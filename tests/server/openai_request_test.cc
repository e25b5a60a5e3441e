#include "server/openai/openai_request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <utility>
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
constexpr char kCompletions[] = "/v1/completions";

Json Parse(const std::string& text) { return Json::parse(text); }

class OpenAiRequestTest : public ::testing::Test {
 protected:
  OpenAiRequestTest() { server_.ForceText("a⟨/think⟩⟨response⟩b⟨/response⟩⟨/message⟩"); }
  ~OpenAiRequestTest() override {
    EXPECT_EQ(server_.Post(kChat, ChatBody()).status, 200) << "still healthy";
    EXPECT_TRUE(server_.NothingLeaked());
  }

  // A 400 with this param, whole and streamed; the stream's refusal is plain JSON.
  void Refused(const Json& body, const std::string& param, const std::string& code = "", const char* path = kChat) {
    const std::string text = body.dump().substr(0, 300);
    const OpenAiReply reply = server_.Post(path, body);
    EXPECT_EQ(reply.status, 400) << text << " -> " << reply.raw.body;
    EXPECT_EQ(reply.Param(), param) << text << " -> " << reply.raw.body;
    EXPECT_EQ(reply.Code(), code) << text;
    if (!reply.body.contains("error")) return;
    EXPECT_EQ(reply.body["error"]["type"], "invalid_request_error");
    EXPECT_FALSE(reply.body["error"]["message"].get<std::string>().empty());
    EXPECT_EQ(reply.body["error"].size(), 4u);
    EXPECT_LE(reply.raw.body.size(), 4096u);
    const OpenAiStream stream = server_.Stream(path, body);
    EXPECT_EQ(stream.problem, "");
    EXPECT_EQ(stream.status, 400) << text;
    EXPECT_EQ(stream.error, reply.body);
  }
  void RefusedCompletion(Json body, const std::string& param, const std::string& code = "") {
    if (!body.contains("prompt")) body["prompt"] = "a";
    Refused(body, param, code, kCompletions);
  }
  void Accepted(const Json& body, const char* path = kChat) {
    const OpenAiReply reply = server_.Post(path, body);
    EXPECT_EQ(reply.status, 200) << body.dump().substr(0, 300) << " -> " << reply.raw.body;
  }

  OpenAiServer server_;
};

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

// B27
TEST_F(OpenAiRequestTest, MalformedMessages) {
  const std::pair<const char*, const char*> cases[] = {
      {"null", "messages"},
      {"5", "messages"},
      {"\"hi\"", "messages"},
      {"{}", "messages"},
      {"[]", "messages"},
      {"[null]", "messages[0]"},
      {"[5]", "messages[0]"},
      {"[{}]", "messages[0].role"},
      {R"([{"role":"user"}])", "messages[0].content"},
      {R"([{"role":"userr","content":"x"}])", "messages[0].role"},
      {R"([{"role":5,"content":"x"}])", "messages[0].role"},
      {R"([{"role":"user","content":5}])", "messages[0].content"},
      {R"([{"role":"user","content":{"a":1}}])", "messages[0].content"},
      {R"([{"role":"user","content":[]}])", "messages[0].content"},
      {R"([{"role":"user","content":"a"},{"role":"user","content":null}])", "messages[1].content"},
      {R"([{"role":"function","name":"f","content":"a"}])", "messages[0].role"},
      {R"([{"role":"user","content":"a","name":5}])", "messages[0].name"},
      {R"([{"role":"assistant","content":"a","reasoning_content":5}])", "messages[0].reasoning_content"},
      {R"([{"role":"assistant","content":"a","tool_calls":{}}])", "messages[0].tool_calls"},
      {R"([{"role":"assistant","tool_calls":[5]}])", "messages[0].tool_calls[0]"},
      {R"([{"role":"assistant","tool_calls":[{"id":"a","type":"function"}]}])", "messages[0].tool_calls[0].function"},
      {R"([{"role":"assistant","tool_calls":[{"id":"a","type":"x","function":{"name":"f"}}]}])",
       "messages[0].tool_calls[0].type"},
      {R"([{"role":"assistant","tool_calls":[{"id":"a","function":{"arguments":"{}"}}]}])",
       "messages[0].tool_calls[0].function.name"},
      {R"([{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":[1]}}]}])",
       "messages[0].tool_calls[0].function.arguments"},
      {R"([{"role":"assistant","content":"a","function_call":{"name":"f"}}])", "messages[0].function_call"},
      {R"([{"role":"user","content":"a","tool_calls":[{"id":"a","function":{"name":"f"}}]}])",
       "messages[0].tool_calls"},
      {R"([{"role":"assistant","content":"a","partial":"yes"}])", "messages[0].partial"},
      {R"([{"role":"assistant","content":"a","partial":true},{"role":"user","content":"b"}])", "messages[0].partial"},
      {R"([{"role":"user","content":"a","partial":true}])", "messages[0].partial"},
  };
  for (const auto& [messages, param] : cases) Refused({{"messages", Parse(messages)}}, param);
  Refused(Json::object(), "messages");
  // The shape is looked at before the model's name.
  Refused(Parse(R"({"model":"nope","messages":[]})"), "messages");
}

// B27
// B27: a field that nobody knows is ignored, at every level.
TEST_F(OpenAiRequestTest, UnknownFieldsAreIgnored) {
  Accepted(ChatBody({{"mystery", {{"a", {1, "x", nullptr}}}}, {"stream_mode", "x"}}));
  Accepted(
      Parse(R"({"messages":[{"role":"user","content":[{"type":"text","text":"a","cache_control":{}}],"weight":1}]})"));
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
      {"top_k", {-2, 1.5, "40", Parse("9223372036854775808"), true}},
      {"min_p", {-0.1, 1.1, 1}},
      {"presence_penalty", {2.1, -2.1, "0"}},
      {"frequency_penalty", {2.1, -2.1}},
      {"repetition_penalty", {0, -1, 11}},
      {"seed", {"1", 1.5, true, Parse("18446744073709551616")}},
      {"n", {0, -1, 129, 100000, 1.5, "2"}},
      {"stop", {5, true, Json::object(), Parse("[5]"), Parse("[null]"), ""}},
      {"stop_token_ids", {5, Parse("[\"a\"]"), Parse("[-1]"), Parse("[1.5]"), Parse("[4096]")}},
      {"ignore_eos", {1, "true"}},
      {"min_tokens", {-1, 1.5, "1"}},
      {"stream_options", {5, "x"}},
      {"user", {}},
      {"priority", {1.5, "1", Parse("2147483648")}},
      {"session_id", {5, std::string(257, 'x')}},
      {"cache_salt", {5, std::string(257, 'x')}},
      {"tools", {5, "x", Json::object()}},
      {"response_format",
       {5, "json", Json::object(), Parse(R"({"type":"yaml"})"), Parse(R"({"type":5})"),
        Parse(R"({"type":"json_schema"})")}},
      {"reasoning_effort", {5, "extreme", true}},
      {"thinking", {5, true}},
      {"chat_template_kwargs", {5, "x"}},
      {"parallel_tool_calls", {1, "no"}},
      {"logprobs", {1, "yes"}},
      {"best_of", {2, 0, "1"}},
      {"functions", {Json::array(), Parse("[{\"name\":\"f\"}]")}},
      {"function_call", {"auto"}},
      {"audio", {Json::object()}},
      {"modalities", {Parse("[\"audio\"]")}},
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
  Accepted(ChatBody({{"seed", Parse("18446744073709551615")}}));
  EXPECT_EQ(server_.engine().LastRequest().sampling.seed, ~uint64_t{0});
}

// B19
TEST_F(OpenAiRequestTest, LogitBias) {
  for (const char* bad : {R"({"4096":5})", R"({"-1":1})", R"({"abc":1})", R"({"1.0":1})", R"({"5":101})",
                          R"({"5":-101})", R"({"5":null})", R"({"5":"1"})", "[1,2]", R"({"":1})", R"({" 5":1})",
                          R"({"99999999999":1})", R"({"5":1e999})"}) {
    Refused(ChatBody({{"logit_bias",
                       Json::parse(bad, nullptr, false).is_discarded() ? Parse("{\"5\":1e300}") : Parse(bad)}}),
            "logit_bias");
  }
  Accepted(ChatBody({{"logit_bias", Parse(R"({"4095":-100})")}}));
  Accepted(ChatBody({{"logit_bias", Json::object()}}));
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

// B28
TEST_F(OpenAiRequestTest, HalfSurrogatePairs) {
  for (const char* half : {R"("a \ud83d")", R"("\ude00 b")", R"("\ud83d\ud83d\ude00")"}) {
    const std::string text = half;
    const std::pair<std::string, std::string> cases[] = {
        {R"({"messages":[{"role":"user","content":)" + text + "}]}", "messages[0].content"},
        {R"({"messages":[{"role":"user","content":[{"type":"text","text":)" + text + "}]}]}",
         "messages[0].content[0].text"},
        {R"({"messages":[{"role":"system","content":)" + text + R"(},{"role":"user","content":"a"}]})",
         "messages[0].content"},
        {R"({"messages":[{"role":"user","content":"a"}],"stop":)" + text + "}", "stop"},
        {R"({"messages":[{"role":"user","content":"a"}],"stop":[)" + text + "]}", "stop[0]"},
        {R"({"messages":[{"role":"user","content":"a"},{"role":"assistant","tool_calls":[{"id":"f_0","function":{"name":"f"}}]},
          {"role":"tool","tool_call_id":"f_0","content":)" +
             text + "}]}",
         "messages[2].content"},
    };
    for (const auto& [body, param] : cases) {
      for (const char* stream : {"", ",\"stream\":true"}) {
        std::string sent = body;
        sent.insert(sent.size() - 1, stream);
        const OpenAiReply reply = server_.PostText(kChat, sent);
        EXPECT_EQ(reply.status, 400) << sent;
        EXPECT_EQ(reply.Param(), param) << sent;
        EXPECT_EQ(reply.raw.body.find("xception"), std::string::npos);
      }
    }
  }
  const OpenAiReply escaped = server_.PostText(kChat, R"({"messages":[{"role":"user","content":"\ud83d\ude00"}]})");
  const OpenAiReply literal = server_.PostText(kChat, R"({"messages":[{"role":"user","content":"😀"}]})");
  ASSERT_EQ(escaped.status, 200);
  EXPECT_EQ(escaped.body["usage"]["prompt_tokens"], literal.body["usage"]["prompt_tokens"]);
  const OpenAiReply nul = server_.PostText(kChat, R"({"messages":[{"role":"user","content":"a\u0000b"}]})");
  const OpenAiReply ab = server_.PostText(kChat, R"({"messages":[{"role":"user","content":"ab"}]})");
  ASSERT_EQ(nul.status, 200);
  EXPECT_GT(nul.body["usage"]["prompt_tokens"], ab.body["usage"]["prompt_tokens"]) << "not cut off";
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

// B31
TEST_F(OpenAiRequestTest, TextPartsAndNullContent) {
  const auto ids = [&](const Json& messages) {
    return server_.Post("/render", {{"messages", messages}}).body["token_ids"];
  };
  const auto contains = [&](const Json& haystack, const std::string& text) {
    const std::vector<int32_t> part = server_.tokenizer().Encode(text).value();
    const std::vector<int32_t> all = haystack.get<std::vector<int32_t>>();
    return std::search(all.begin(), all.end(), part.begin(), part.end()) != all.end();
  };
  const Json parts = Parse(R"([{"type":"text","text":"AB"},{"type":"text","text":"CD"}])");
  for (const char* role : {"system", "user", "assistant"}) {
    const Json rendered =
        ids(Json::array({{{"role", role}, {"content", parts}}, {{"role", "user"}, {"content", "x"}}}));
    std::vector<int32_t> both = server_.tokenizer().Encode("AB").value();
    const std::vector<int32_t> second = server_.tokenizer().Encode("CD").value();
    both.insert(both.end(), second.begin(), second.end());
    const auto all = rendered.get<std::vector<int32_t>>();
    EXPECT_NE(std::search(all.begin(), all.end(), both.begin(), both.end()), all.end()) << role;
  }
  const Json tool_turns = Parse(R"([{"role":"user","content":"a"},
    {"role":"assistant","content":null,"tool_calls":[{"id":"f_0","type":"function","function":{"name":"f","arguments":"{}"}}]},
    {"role":"tool","tool_call_id":"f_0","content":[{"type":"text","text":"AB"},{"type":"text","text":"CD"}]}])");
  {
    const auto all = ids(tool_turns).get<std::vector<int32_t>>();
    std::vector<int32_t> both = server_.tokenizer().Encode("AB").value();
    const std::vector<int32_t> second = server_.tokenizer().Encode("CD").value();
    both.insert(both.end(), second.begin(), second.end());
    EXPECT_NE(std::search(all.begin(), all.end(), both.begin(), both.end()), all.end()) << "tool";
  }
  const Json turns = Parse(R"([{"role":"user","content":"a"},
    {"role":"assistant","content":null,"tool_calls":[{"id":"lookup_0","type":"function","function":{"name":"lookup","arguments":"{\"key\":\"zebra\"}"}}]},
    {"role":"tool","tool_call_id":"lookup_0","content":[{"type":"text","text":"striped"}]},{"role":"user","content":"b"}])");
  Accepted({{"messages", turns}});
  const Json rendered = ids(turns);
  EXPECT_TRUE(contains(rendered, "zebra"));
  EXPECT_TRUE(contains(rendered, "striped"));
  const std::pair<const char*, const char*> bad[] = {
      {R"([{"type":"image_url","image_url":{"url":"x"}}])", "messages[0].content[0].type"},
      {R"([{"type":"text","text":"a"},{"type":"sound"}])", "messages[0].content[1].type"},
      {R"([{"type":"text"}])", "messages[0].content[0].text"},
      {R"([{"type":"text","text":5}])", "messages[0].content[0].text"},
      {R"([{"text":"a"}])", "messages[0].content[0].type"},
      {R"(["a"])", "messages[0].content[0]"},
      {R"([null])", "messages[0].content[0]"},
  };
  for (const auto& [content, param] : bad) {
    Refused({{"messages", Json::array({{{"role", "user"}, {"content", Parse(content)}}})}}, param);
  }
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

TEST_F(OpenAiRequestTest, Tools) {
  const auto tool = [](const std::string& name) {
    return Json({{"type", "function"}, {"function", {{"name", name}}}});
  };
  const auto with = [&](const Json& tools) { return ChatBody({{"tools", tools}}); };
  Accepted(with(Json::array({tool("f"), tool("g-1_X")})));
  Accepted(with(Json::array()));
  const std::pair<Json, const char*> bad[] = {
      {Json::array({nullptr}), "tools[0]"},
      {Json::array({5}), "tools[0]"},
      {Json::array({Json::object()}), "tools[0].type"},
      {Json::array({{{"type", "web_search"}}}), "tools[0].type"},
      {Json::array({{{"type", "function"}}}), "tools[0].function"},
      {Json::array({{{"type", "function"}, {"function", 5}}}), "tools[0].function"},
      {Json::array({{{"type", "function"}, {"function", Json::object()}}}), "tools[0].function.name"},
      {Json::array({tool("")}), "tools[0].function.name"},
      {Json::array({tool("a b")}), "tools[0].function.name"},
      {Json::array({tool("naïve")}), "tools[0].function.name"},
      {Json::array({tool(std::string(65, 'f'))}), "tools[0].function.name"},
      {Json::array({tool("f"), tool("f")}), "tools[1].function.name"},
      {Parse(R"([{"type":"function","function":{"name":"f","description":5}}])"), "tools[0].function.description"},
      {Parse(R"([{"type":"function","function":{"name":"f","parameters":[]}}])"), "tools[0].function.parameters"},
      {Parse(R"([{"type":"function","function":{"name":"f","parameters":{"type":"string"}}}])"),
       "tools[0].function.parameters.type"},
      {Parse(R"([{"type":"function","function":{"name":"f","strict":"yes"}}])"), "tools[0].function.strict"},
  };
  for (const auto& [tools, param] : bad) {
    Refused(with(tools), param);
    // The same in a system message.
    Json body = ChatBody();
    body["messages"].push_back({{"role", "system"}, {"tools", tools}});
    Refused(body, "messages[1]." + std::string(param));
  }
  Json twice = with(Json::array({tool("f")}));
  twice["messages"].push_back({{"role", "system"}, {"tools", Json::array({tool("f")})}});
  Refused(twice, "messages[1].tools[0].function.name");
  Json by_user = ChatBody();
  by_user["messages"].push_back({{"role", "user"}, {"content", "x"}, {"tools", Json::array({tool("f")})}});
  Refused(by_user, "messages[1].tools");
}

TEST_F(OpenAiRequestTest, ToolChoice) {
  const Json tools = Parse(R"([{"type":"function","function":{"name":"f"}}])");
  const auto choose = [&](const Json& choice, bool with_tools = true) {
    Json body = ChatBody({{"tool_choice", choice}});
    if (with_tools) body["tools"] = tools;
    return body;
  };
  const Json named = Parse(R"({"type":"function","function":{"name":"f"}})");
  for (const Json& choice : {Json("auto"), Json("none"), Json("required")}) Accepted(choose(choice));
  Accepted(choose(named));
  Accepted(choose("auto", false));
  Accepted(choose("none", false));
  Refused(choose("required", false), "tool_choice");
  Refused(choose(named, false), "tool_choice");
  for (const Json& choice :
       {Json("bogus"), Json(5), Json(true), Json::array(), Json::object(), Parse(R"({"type":"function"})"),
        Parse(R"({"type":"function","function":{"name":5}})"), Parse(R"({"type":"function","function":{"name":"g"}})"),
        Parse(R"({"type":"allowed_tools"})")}) {
    Refused(choose(choice), "tool_choice");
  }
  // A call can be required of tools that join later, too.
  Json later = ChatBody({{"tool_choice", "required"}});
  later["messages"].push_back({{"role", "system"}, {"tools", tools}});
  Accepted(later);
}

TEST_F(OpenAiRequestTest, EffortAndThinkingInThreeSpellings) {
  const auto ids = [&](Json members) {
    return server_.Post("/render", ChatBody(std::move(members))).body["token_ids"];
  };
  const Json low = ids({{"thinking", {{"effort", "low"}}}});
  const Json high = ids({{"thinking", {{"effort", "high"}}}});
  const Json max = ids({{"thinking", {{"effort", "max"}}}});
  EXPECT_NE(low, high);
  EXPECT_NE(high, max);
  EXPECT_EQ(ids(Json::object()), max) << "the default effort is max";
  EXPECT_EQ(ids({{"reasoning_effort", "low"}}), low);
  EXPECT_EQ(ids({{"chat_template_kwargs", {{"thinking_effort", "low"}}}}), low);
  EXPECT_EQ(ids({{"thinking", {{"effort", "low"}}}, {"reasoning_effort", "high"}}), low);
  EXPECT_EQ(ids({{"reasoning_effort", "high"}, {"chat_template_kwargs", {{"thinking_effort", "low"}}}}), high);
  EXPECT_EQ(ids({{"thinking", {{"type", "enabled"}}}, {"reasoning_effort", "high"}}), high);
  EXPECT_EQ(ids({{"reasoning_effort", "minimal"}}), low);
  EXPECT_EQ(ids({{"reasoning_effort", "medium"}}), high);
  EXPECT_EQ(ids({{"reasoning_effort", "xhigh"}}), max);
  EXPECT_EQ(ids({{"reasoning_effort", nullptr}, {"thinking", nullptr}}), max);
  const Json off = ids({{"thinking", {{"type", "disabled"}}}});
  EXPECT_NE(off, max);
  EXPECT_EQ(ids({{"chat_template_kwargs", {{"thinking", false}}}}), off);
  EXPECT_EQ(ids({{"thinking", {{"type", "disabled"}}}, {"chat_template_kwargs", {{"thinking", true}}}}), off);
  // "none" in OpenAI's field switches thinking off; in the vendor's it says nothing about effort, and thinking stays
  // on.
  const Json silent = ids({{"thinking", {{"effort", "none"}}}});
  EXPECT_NE(silent, off);
  EXPECT_LT(silent.size(), max.size());
  EXPECT_EQ(ids({{"chat_template_kwargs", {{"thinking_effort", "none"}}}}), silent);
  EXPECT_EQ(ids({{"reasoning_effort", "none"}}), off);
  EXPECT_EQ(ids({{"reasoning_effort", "none"}, {"thinking", {{"type", "enabled"}}}}), silent);
  EXPECT_EQ(ids({{"reasoning_effort", "none"}, {"chat_template_kwargs", {{"thinking", true}}}}), silent);
  EXPECT_EQ(ids({{"reasoning_effort", "none"}, {"thinking", {{"effort", "low"}}}}), low);
  // History reasoning is kept unless the client says otherwise.
  const Json history =
      Parse(R"([{"role":"user","content":"a"},{"role":"assistant","content":"b","reasoning_content":"because"},
                                 {"role":"user","content":"c"}])");
  const Json kept = ids({{"messages", history}});
  const Json dropped = ids({{"messages", history}, {"thinking", {{"keep", "none"}}}});
  EXPECT_LT(dropped.size(), kept.size());
  EXPECT_EQ(ids({{"messages", history}, {"chat_template_kwargs", {{"preserve_thinking", false}}}}), dropped);
  EXPECT_EQ(ids({{"messages", history},
                 {"thinking", {{"keep", "all"}}},
                 {"chat_template_kwargs", {{"preserve_thinking", false}}}}),
            kept);
}

TEST_F(OpenAiRequestTest, StructuredOutputTakesOneWayAndNamesWhatIsWrong) {
  for (
      const char* members :
      {R"({"response_format":{"type":"json_object"}})",
       R"({"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object"},"strict":true}}})",
       R"({"response_format":{"type":"regex","pattern":"a+"}})", R"({"guided_json":{"type":"object"}})",
       R"({"guided_json":"{\"type\":\"object\"}"})", R"({"guided_choice":["a","b"]})",
       R"({"guided_grammar":"root ::= \"a\""})", R"({"structured_outputs":{"regex":"a"}})",
       R"({"structured_outputs":null,"guided_regex":null})"}) {
    Accepted(ChatBody(Parse(members)));
  }
  const std::pair<const char*, const char*> wrong[] = {
      {R"({"guided_regex":"a","guided_choice":["a"]})", "guided_choice"},
      {R"({"response_format":{"type":"json_object"},"structured_outputs":{"regex":"a"}})", "structured_outputs.regex"},
      {R"({"guided_json":5})", "guided_json"},
      {R"({"guided_json":{"type":"thing"}})", "guided_json.type"},
      {R"({"guided_json":{"type":"object","properties":{"a":{"$ref":"#/nowhere"}}}})", "guided_json.properties.a.$ref"},
      {R"({"guided_choice":[]})", "guided_choice"},
      {R"({"guided_choice":[1]})", "guided_choice"},
      {R"({"guided_regex":"a{9999999}"})", "guided_regex"},
      {R"({"structured_outputs":{"json":{"minItems":-1}}})", "structured_outputs.json.minItems"},
      {R"({"structured_outputs":{"choice":"x"}})", "structured_outputs.choice"},
      {R"({"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"not":{}}}}})",
       "response_format.json_schema.schema.not"},
      {R"({"tools":[{"type":"function","function":{"name":"f","strict":true,"parameters":{"type":"object","properties":
           {"a":{"not":{}}}}}}]})",
       "tools[0].function.parameters.properties.a.not"},
  };
  for (const auto& [members, param] : wrong) Refused(ChatBody(Parse(members)), param);
  Accepted(ChatBody(Parse(
      R"({"response_format":{"type":"json_schema","json_schema":{"name":"n","strict":false,"schema":{"not":{}}}}})")));
}

TEST(OpenAiNoGrammarTest, StructuredOutputIsRefusedButRendered) {
  OpenAiServer::Options options;
  options.grammars = false;
  OpenAiServer server(options);
  server.Force({100});
  const auto refused = [&](const Json& members, const std::string& param) {
    const OpenAiReply reply = server.Post(kChat, ChatBody(members));
    EXPECT_EQ(reply.status, 400) << members;
    EXPECT_EQ(reply.Param(), param) << reply.raw.body;
    EXPECT_EQ(reply.Code(), "unsupported_parameter") << reply.raw.body;
  };
  const Json formats[] = {Parse(R"({"type":"json_object"})"),
                          Parse(R"({"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object"}}})"),
                          Parse(R"({"type":"regex","pattern":"a+"})"),
                          Parse(R"({"type":"ebnf","grammar":"root ::= \"a\""})")};
  const char* const params[] = {"response_format", "response_format.json_schema.schema", "response_format.pattern",
                                "response_format.grammar"};
  for (size_t i = 0; i < 4; ++i) refused({{"response_format", formats[i]}}, params[i]);
  for (const char* key : {"guided_regex", "guided_grammar"}) refused({{key, "a"}}, key);
  refused({{"guided_json", Json::object()}}, "guided_json");
  refused({{"guided_choice", {"a", "b"}}}, "guided_choice");
  refused({{"structured_outputs", {{"regex", "a"}}}}, "structured_outputs.regex");
  const Json tool = Parse(R"({"type":"function","function":{"name":"f"}})");
  refused({{"tools", Json::array({tool})}, {"tool_choice", "required"}}, "tool_choice");
  refused({{"tools", Json::array({tool})}, {"tool_choice", Parse(R"({"type":"function","function":{"name":"f"}})")}},
          "tool_choice");
  const Json strict = Parse(R"({"type":"function","function":{"name":"f","strict":true}})");
  refused({{"tools", Json::array({strict})}}, "tools");
  EXPECT_EQ(server.Post(kChat, ChatBody({{"tools", Json::array({tool})}, {"tool_choice", "none"}})).status, 200);
  EXPECT_EQ(server.Post(kChat, ChatBody({{"response_format", {{"type", "text"}}}})).status, 200);
  const Json plain = server.Post("/render", ChatBody()).body["token_ids"];
  const Json object = server.Post("/render", ChatBody({{"response_format", formats[0]}})).body["token_ids"];
  const Json schema = server.Post("/render", ChatBody({{"response_format", formats[1]}})).body["token_ids"];
  EXPECT_GT(object.size(), plain.size());
  EXPECT_GT(schema.size(), plain.size());
}

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
         {Json(512 - prompt + 1), Json(2147483648ll), Json(1e18), Parse("100000000000000000000000")}) {
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
  for (const Json& empty : {Json::array(), Json(""), Parse("[[]]"), Json(), Parse("[[1],[]]"), Parse("[\"a\",\"\"]")}) {
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

TEST(OpenAiStrictRequestTest, Tools) {
  OpenAiServer::Options options;
  options.vendor_strict = true;
  OpenAiServer server(options);
  server.Force({100});
  const auto param = [&](const std::string& messages, const std::string& tools = "[]") {
    return server.Post(kChat, {{"messages", Parse(messages)}, {"tools", Parse(tools)}}).Param();
  };
  const std::string tool = R"({"type":"function","function":{"name":"f"}})";
  EXPECT_EQ(param(R"([{"role":"user","content":"a"},{"role":"system","content":"x","tools":[)" + tool + "]}]"),
            "messages[1].content");
  EXPECT_EQ(param(R"([{"role":"user","content":"a"},{"role":"system","content":"","tools":[)" + tool + "]}]"), "?");
  EXPECT_EQ(param(R"([{"role":"user","content":"a"},{"role":"tool","content":"x"}])"), "messages[1].tool_call_id");
  EXPECT_EQ(param(R"([{"role":"user","content":"a"}])", R"([{"type":"function","function":{"name":"1f"}}])"),
            "tools[0].function.name");
  for (const char* format : {R"({"type":"json_schema"})", R"({"type":"json_schema","json_schema":{"schema":{}}})",
                             R"({"type":"json_schema","json_schema":{"name":"n"}})",
                             R"({"type":"json_schema","json_schema":{"name":"n","schema":{},"strict":1}})"}) {
    const OpenAiReply reply = server.Post(kChat, ChatBody({{"response_format", Parse(format)}}));
    EXPECT_EQ(reply.status, 400);
    EXPECT_TRUE(reply.Param().starts_with("response_format")) << reply.raw.body;
    EXPECT_NE(reply.Code(), "unsupported_parameter");
  }
}

}  // namespace
}  // namespace k3
