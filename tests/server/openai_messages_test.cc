#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/openai_request_fixture.h"

namespace k3 {
namespace {

using testing::ChatBody;
using testing::Json;
using testing::kChat;
using testing::OpenAiReply;

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
  for (const auto& [messages, param] : cases) Refused({{"messages", Json::parse(messages)}}, param);
  Refused(Json::object(), "messages");
  // The shape is looked at before the model's name.
  Refused(Json::parse(R"({"model":"nope","messages":[]})"), "messages");
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
  const Json parts = Json::parse(R"([{"type":"text","text":"AB"},{"type":"text","text":"CD"}])");
  for (const char* role : {"system", "user", "assistant"}) {
    const Json rendered =
        ids(Json::array({{{"role", role}, {"content", parts}}, {{"role", "user"}, {"content", "x"}}}));
    std::vector<int32_t> both = server_.tokenizer().Encode("AB").value();
    const std::vector<int32_t> second = server_.tokenizer().Encode("CD").value();
    both.insert(both.end(), second.begin(), second.end());
    const auto all = rendered.get<std::vector<int32_t>>();
    EXPECT_NE(std::search(all.begin(), all.end(), both.begin(), both.end()), all.end()) << role;
  }
  const Json tool_turns = Json::parse(R"([{"role":"user","content":"a"},
    {"role":"assistant","content":null,"tool_calls":[{"id":"f_0","type":"function","function":{"name":"f","arguments":"{}"}}]},
    {"role":"tool","tool_call_id":"f_0","content":[{"type":"text","text":"AB"},{"type":"text","text":"CD"}]}])");
  {
    const auto all = ids(tool_turns).get<std::vector<int32_t>>();
    std::vector<int32_t> both = server_.tokenizer().Encode("AB").value();
    const std::vector<int32_t> second = server_.tokenizer().Encode("CD").value();
    both.insert(both.end(), second.begin(), second.end());
    EXPECT_NE(std::search(all.begin(), all.end(), both.begin(), both.end()), all.end()) << "tool";
  }
  const Json turns = Json::parse(R"([{"role":"user","content":"a"},
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
    Refused({{"messages", Json::array({{{"role", "user"}, {"content", Json::parse(content)}}})}}, param);
  }
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
      Json::parse(R"([{"role":"user","content":"a"},{"role":"assistant","content":"b","reasoning_content":"because"},
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

}  // namespace
}  // namespace k3
