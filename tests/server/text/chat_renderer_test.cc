#include "server/text/chat_renderer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_replace.h"
#include "server/text/field_error.h"
#include "server/text/json_parser.h"
#include "tests/server/text/chat_json.h"
#include "tests/testing/paths.h"

namespace k3 {
namespace {

std::shared_ptr<const Tokenizer> Tiny() {
  static const auto tokenizer = Tokenizer::Load(testing::TinyK3()).value();
  return tokenizer;
}

const ChatRenderer& Renderer() {
  static const ChatRenderer renderer(Tiny());
  return renderer;
}

ChatRequest Request(const std::string& json) { return testing::ReadChatJson(ParseJson(json).value()); }

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

JsonValue Golden() { return ParseJson(ReadFile(testing::DataFile("chat.json"))).value(); }

std::vector<int32_t> Ids(const JsonValue& list) {
  std::vector<int32_t> ids;
  for (const JsonValue& item : list.items) ids.push_back(static_cast<int32_t>(item.AsDouble()));
  return ids;
}

// Markup between control tokens, shortened: <tag a="b"> for an opening, </tag> for a closing one, $ for the end.
std::string Shown(const std::vector<Segment>& segments) {
  std::string text;
  for (const Segment& segment : segments) {
    text += segment.control
                ? absl::StrReplaceAll(
                      segment.text, {{"<|open|>", "⟨"}, {"<|close|>", "⟨/"}, {"<|sep|>", "⟩"}, {"<|end_of_msg|>", "$"}})
                : segment.text;
  }
  return text;
}

std::string Render(const std::string& json) {
  const auto chat = Renderer().Render(Request(json));
  return chat.ok() ? Shown(chat->segments) : std::string(chat.status().message());
}

std::string ErrorPath(const std::string& json) {
  const auto chat = Renderer().RenderToIds(Request(json));
  EXPECT_EQ(chat.status().code(), absl::StatusCode::kInvalidArgument) << json;
  const std::string path = FieldErrorPath(chat.status());
  EXPECT_EQ(chat.status().message().substr(0, path.size() + 2), path + ": ");
  return path;
}

TEST(ChatRenderer, GoldenSegmentsAndIds) {
  const JsonValue golden = Golden();
  ASSERT_EQ(golden.Find("cases")->items.size(), 37u);
  for (const JsonValue& item : golden.Find("cases")->items) {
    const std::string& name = item.Find("name")->text;
    const ChatRequest request = testing::ReadChatJson(item);
    const auto chat = Renderer().Render(request);
    ASSERT_TRUE(chat.ok()) << name << ": " << chat.status();
    std::vector<Segment> expected;
    for (const JsonValue& segment : item.Find("segments")->items) {
      expected.push_back({segment.items[0].text, segment.items[1].boolean});
    }
    EXPECT_EQ(chat->segments, expected) << name << "\n" << Shown(chat->segments) << "\n" << Shown(expected);
    EXPECT_EQ(Renderer().RenderToIds(request).value().ids, Ids(*item.Find("ids_tiny"))) << name;
    EXPECT_EQ(Renderer().EncodeSegments(expected).value(), Ids(*item.Find("ids_tiny"))) << name;
  }
}

TEST(ChatRenderer, GoldenIdsInTheRealVocabulary) {
  const std::string directory = testing::RealTokenizerDir();
  if (directory.empty()) GTEST_SKIP() << "K3_KIMI_TOKENIZER names no vocabulary";
  const ChatRenderer renderer(Tokenizer::Load(directory).value());
  const JsonValue golden = Golden();
  for (const JsonValue& item : golden.Find("cases")->items) {
    EXPECT_EQ(renderer.RenderToIds(testing::ReadChatJson(item)).value().ids, Ids(*item.Find("ids_kimi")))
        << item.Find("name")->text;
  }
}

TEST(ChatRenderer, TellsWhatThePromptOpened) {
  ChatPrompt prompt = Renderer().RenderToIds(Request(R"({"messages":[{"role":"user","content":"Hi"}]})")).value();
  EXPECT_EQ(prompt.open_channel, OpenChannel::kReasoning);
  const std::vector<int32_t> think = Tiny()->Encode("<|open|>think<|sep|>", EncodeMode::kControl).value();
  ASSERT_EQ(prompt.opening_ids, static_cast<int32_t>(think.size()));
  EXPECT_TRUE(std::equal(think.rbegin(), think.rend(), prompt.ids.rbegin()));
  prompt = Renderer()
               .RenderToIds(Request(R"({"messages":[{"role":"user","content":"Hi"}],"options":{"thinking":false}})"))
               .value();
  EXPECT_EQ(prompt.open_channel, OpenChannel::kContent);
  EXPECT_GT(prompt.opening_ids, 0);
  prompt = Renderer()
               .RenderToIds(Request(
                   R"({"messages":[{"role":"user","content":"Hi"}],"options":{"add_generation_prompt":false}})"))
               .value();
  EXPECT_EQ(prompt.open_channel, OpenChannel::kNone);
  EXPECT_EQ(prompt.opening_ids, 0);
}

TEST(ChatRenderer, PartialMessageStaysOpen) {
  EXPECT_EQ(Render(R"({"messages":[{"role":"user","content":"a"},
                       {"role":"assistant","reasoning_content":"r","content":"so far","partial":true}]})"),
            "⟨message role=\"user\"⟩a⟨/message⟩$⟨message role=\"assistant\"⟩⟨think⟩r⟨/think⟩⟨response⟩so far");
  EXPECT_EQ(
      Render(R"({"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"so far","partial":true}],
                       "options":{"thinking":false,"tool_choice":"none"}})"),
      "⟨message role=\"user\"⟩a⟨/message⟩$⟨message role=\"system\" type=\"tool-choice\"⟩The system is invoked with "
      "`tool_choice=none`.\nYou MUST NOT call any tools in the next message.⟨/message⟩$"
      "⟨message role=\"assistant\"⟩⟨response⟩so far");
  EXPECT_EQ(Render(R"({"messages":[{"role":"user","content":"a"},
                       {"role":"assistant","reasoning_content":"r","name":"bot","partial":true}]})"),
            "⟨message role=\"user\"⟩a⟨/message⟩$⟨message role=\"assistant\" name=\"bot\"⟩⟨think⟩r");
  const ChatPrompt prompt =
      Renderer().RenderToIds(Request(R"({"messages":[{"role":"assistant","content":"x","partial":true}]})")).value();
  EXPECT_EQ(prompt.open_channel, OpenChannel::kContent);
  EXPECT_EQ(prompt.opening_ids, 0);
  // Nothing to continue: the same as asking for an answer.
  EXPECT_EQ(Render(R"({"messages":[{"role":"user","content":"a"},{"role":"assistant","partial":true}]})"),
            Render(R"({"messages":[{"role":"user","content":"a"}]})"));
}

TEST(ChatRenderer, ContentForms) {
  const std::string one = R"([{"type":"text","text":"AB"},{"type":"text","text":"CD"}])";
  for (const std::string role : {"system", "user", "assistant", "developer"}) {
    const auto chat =
        Renderer().Render(Request(R"({"messages":[{"role":")" + role + R"(","content":)" + one + "}]}")).value();
    const auto ab = std::find(chat.segments.begin(), chat.segments.end(), Segment{"AB", false});
    ASSERT_NE(ab, chat.segments.end()) << role;
    EXPECT_EQ(ab[1], (Segment{"CD", false}));
  }
  EXPECT_NE(Render(R"({"messages":[{"role":"user","content":"q"},
              {"role":"assistant","content":null,"tool_calls":[{"id":"f_0","function":{"name":"f","arguments":"{}"}}]},
              {"role":"tool","tool_call_id":"f_0","content":[{"type":"text","text":"re"},{"type":"text","text":"sult"}]},
              {"role":"user","content":"go on"}]})")
                .find("⟨tools⟩⟨call tool=\"f\" index=\"1\"⟩⟨/call⟩⟨/tools⟩⟨/message⟩$"
                      "⟨message role=\"tool\" tool=\"f\" index=\"1\"⟩result⟨/message⟩$"),
            std::string::npos);
  EXPECT_EQ(Render(R"({"messages":[{"role":"developer","content":"x"}],"options":{"add_generation_prompt":false}})"),
            "⟨message role=\"system\"⟩x⟨/message⟩$");
}

TEST(ChatRenderer, Reasoning) {
  const auto reasoning = [](const std::string& fields) {
    const std::string text = Render(R"({"messages":[{"role":"assistant","content":"b",)" + fields +
                                    R"(}],"options":{"add_generation_prompt":false}})");
    const size_t begin = text.find("⟨think⟩") + std::string("⟨think⟩").size();
    return text.substr(begin, text.find("⟨/think⟩") - begin);
  };
  EXPECT_EQ(reasoning(R"("reasoning_content":"r","reasoning":"other")"), "r");
  EXPECT_EQ(reasoning(R"("reasoning_content":"","reasoning":"other")"), "other");
  EXPECT_EQ(reasoning(R"("reasoning_content":null,"reasoning":"other")"), "other");
  EXPECT_EQ(reasoning(R"("reasoning_content":" \n\t\u3000")"), "");
  EXPECT_EQ(reasoning(R"("reasoning_content":" r ")"), " r ");
}

std::string Arguments(const std::string& arguments) {
  const std::string text =
      Render(R"({"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":)" + arguments +
             R"(}}]}],"options":{"add_generation_prompt":false}})");
  const std::string begin = "index=\"1\"⟩";
  const size_t at = text.find(begin);
  return at == std::string::npos ? text : text.substr(at + begin.size(), text.find("⟨/call⟩") - at - begin.size());
}

TEST(ChatRenderer, ToolArguments) {
  EXPECT_EQ(Arguments(R"("")"), "");
  EXPECT_EQ(Arguments(R"("  \n ")"), "");
  EXPECT_EQ(Arguments("null"), "");
  EXPECT_EQ(Arguments(R"("{}")"), "");
  EXPECT_EQ(Arguments(R"("{\"a\": 1e3, \"b\": 1.50, \"c\": 1e-7, \"d\": 123456789012345678901234567890}")"),
            "⟨argument key=\"a\" type=\"number\"⟩1000.0⟨/argument⟩⟨argument key=\"b\" type=\"number\"⟩1.5⟨/argument⟩"
            "⟨argument key=\"c\" type=\"number\"⟩1e-07⟨/argument⟩"
            "⟨argument key=\"d\" type=\"number\"⟩123456789012345678901234567890⟨/argument⟩");
  EXPECT_EQ(Arguments(R"({"z":[1,{"b":1e3,"a":"é\n"}],"a":true})"),
            "⟨argument key=\"z\" type=\"array\"⟩[1, {\"b\": 1000.0, \"a\": \"é\\n\"}]⟨/argument⟩"
            "⟨argument key=\"a\" type=\"boolean\"⟩true⟨/argument⟩");
  EXPECT_EQ(Arguments(R"("{\"a\":")"), "⟨json type=\"object\"⟩{\"a\":⟨/json⟩");
  EXPECT_EQ(Arguments(R"("\ufeff{}")"), "⟨json type=\"object\"⟩\uFEFF{}⟨/json⟩");
  EXPECT_EQ(Arguments(R"("[1]")"), "messages[0].tool_calls[0].function.arguments: expected a JSON object");
  EXPECT_EQ(Arguments("[1]"), "messages[0].tool_calls[0].function.arguments: expected a JSON object");
  EXPECT_EQ(Arguments(R"("5")"), "messages[0].tool_calls[0].function.arguments: expected a JSON object");
}

std::string Results(const std::string& results) {
  const std::string text = Render(
      R"({"messages":[{"role":"assistant","tool_calls":[{"id":"x","function":{"name":"f"}},{"id":"y","function":{"name":"g"}},
      {"id":"x","function":{"name":"h"}}]},)" +
      results + R"(],"options":{"add_generation_prompt":false}})");
  const size_t at = text.find("⟨message role=\"tool\"");
  return at == std::string::npos ? text : text.substr(at);
}

TEST(ChatRenderer, ToolResults) {
  const auto shown = [](const std::string& tool, int index, const std::string& content) {
    return "⟨message role=\"tool\" tool=\"" + tool + "\" index=\"" + std::to_string(index) + "\"⟩" + content +
           "⟨/message⟩$";
  };
  // Re-ordered to call order; the matched call's name wins over the message's own.
  EXPECT_EQ(
      Results(
          R"({"role":"tool","tool_call_id":"y","name":"stale","content":"1"},{"role":"tool","id":"x","content":"2"})"),
      shown("f", 1, "2") + shown("g", 2, "1"));
  EXPECT_EQ(
      Results(R"({"role":"tool","tool_call_id":"y","content":"1"},{"role":"tool","tool_call_id":"y","content":"2"})"),
      shown("g", 1, "1") + shown("g", 2, "2"));
  // One id unknown: as they came, named by the message or by position.
  EXPECT_EQ(
      Results(
          R"({"role":"tool","tool_call_id":"y","content":"1"},{"role":"tool","tool_call_id":"?","tool":"t","name":"n","content":"2"})"),
      shown("f", 1, "1") + shown("t", 2, "2"));
  EXPECT_EQ(
      Results(
          R"({"role":"tool","content":"1"},{"role":"tool","name":"n","content":"2"},{"role":"tool","content":"3"})"),
      shown("f", 1, "1") + shown("n", 2, "2") + shown("h", 3, "3"));
  // The count goes on across other messages until the next assistant turn.
  EXPECT_EQ(Results(R"({"role":"tool","tool_call_id":"x","content":"1"},{"role":"user","content":"u"},
                       {"role":"tool","tool_call_id":"y","content":"2"})"),
            shown("f", 1, "1") + "⟨message role=\"user\"⟩u⟨/message⟩$" + shown("g", 2, "2"));
  EXPECT_EQ(ErrorPath(R"({"messages":[{"role":"tool","tool_call_id":"x","content":"1"}]})"),
            "messages[0].tool_call_id");
}

TEST(ChatRenderer, DynamicTools) {
  EXPECT_EQ(
      Render(R"({"messages":[{"role":"system","tools":[{"b":1,"a":2}]}],"options":{"add_generation_prompt":false}})"),
      "⟨message role=\"system\" type=\"tool-declare\"⟩## New Tools Available\nThe system dynamically extends the "
      "toolset "
      "via lazy-loading.\nYou have access to all existing and extended tools.\nHere are the specs for the extended "
      "tools.\n\n```json\n[{\"a\":2,\"b\":1}]\n```⟨/message⟩$");
  EXPECT_EQ(
      Render(
          R"({"messages":[{"role":"system","content":"x","tools":[]}],"options":{"tools":[],"add_generation_prompt":false}})"),
      "⟨message role=\"system\"⟩x⟨/message⟩$");
}

TEST(ChatRenderer, ResponseSchemaAliases) {
  const auto schema = [](const std::string& format) { return SchemaOfResponseFormat(ParseJson(format).value()).text; };
  EXPECT_EQ(schema(R"({"response_schema":"a","json_schema":{"schema":"b"}})"), "a");
  EXPECT_EQ(schema(R"({"json_schema":{"schema":"b","json_schema":"c"}})"), "b");
  EXPECT_EQ(schema(R"({"json_schema":{"json_schema":"c"}})"), "c");
  EXPECT_EQ(schema(R"({"json_schema":"d"})"), "d");
  EXPECT_TRUE(SchemaOfResponseFormat(ParseJson(R"({"type":"json_schema"})").value()).is_null());
}

TEST(ChatRenderer, ErrorsNameTheField) {
  EXPECT_EQ(ErrorPath(R"({"messages":[]})"), "messages");
  EXPECT_EQ(ErrorPath(R"({"messages":[{"role":"user","content":"a"},{"role":"userr","content":"x"}]})"),
            "messages[1].role");
  EXPECT_EQ(ErrorPath(R"({"messages":[{"content":"x"}]})"), "messages[0].role");
  EXPECT_EQ(ErrorPath(R"({"messages":[{"role":"user"}]})"), "messages[0].content");
  EXPECT_EQ(ErrorPath(R"({"messages":[{"role":"user","content":null}]})"), "messages[0].content");
  EXPECT_EQ(ErrorPath(R"({"messages":[{"role":"user","content":[]}]})"), "messages[0].content");
  EXPECT_EQ(ErrorPath(R"({"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url"}]}]})"),
            "messages[0].content[1].type");
  EXPECT_EQ(ErrorPath(R"({"messages":[{"role":"assistant","tool_calls":[{"function":{}}]}]})"),
            "messages[0].tool_calls[0].function.name");
  EXPECT_EQ(ErrorPath(R"({"messages":[{"role":"user","content":"a","tool_calls":[{"function":{"name":"f"}}]}]})"),
            "messages[0].tool_calls");
  EXPECT_EQ(ErrorPath(R"({"messages":[{"role":"user","content":"a","partial":true}]})"), "messages[0].partial");
  EXPECT_EQ(
      ErrorPath(R"({"messages":[{"role":"assistant","content":"a","partial":true},{"role":"user","content":"a"}]})"),
      "messages[0].partial");
  EXPECT_EQ(ErrorPath(R"({"messages":[{"role":"user","content":"a"}],
                         "options":{"response_format":{"type":"json_schema"}}})"),
            "response_format.json_schema");
  ChatRequest request = Request(R"({"messages":[{"role":"user","content":"a"}]})");
  request.messages[0].content.parts[0].text = "ab\xff";
  EXPECT_EQ(Renderer().RenderToIds(request).status().message(), "messages[0].content: invalid UTF-8 at byte 2");
  EXPECT_EQ(FieldErrorPath(ParseEffort("medium", "reasoning_effort").status()), "reasoning_effort");
}

int CountSpecial(const std::vector<int32_t>& ids) {
  return static_cast<int>(std::count_if(ids.begin(), ids.end(), [](int32_t id) { return Tiny()->IsSpecial(id); }));
}

// Whatever a user, a tool or the history holds, the prompt has the special ids of its structure and no others.
TEST(ChatRenderer, TextCannotForgeStructure) {
  const auto conversation = [](const std::string& inserted, const std::string& split = "") {
    ChatRequest request =
        Request(R"({"messages":[{"role":"system","content":"s"},{"role":"user","content":"u","name":"n"},
      {"role":"assistant","content":"a","reasoning_content":"r","tool_calls":[{"id":"i","function":{"name":"f","arguments":{}}},
      {"id":"j","function":{"name":"g","arguments":"{broken"}}]},
      {"role":"tool","tool_call_id":"i","content":"t"},{"role":"tool","tool_call_id":"j","content":"t"}],
      "options":{"tools":[{"type":"function","function":{"name":"f"}}],"response_format":{"type":"json_schema","json_schema":{}}}})");
    for (ChatMessage& message : request.messages) {
      message.content.parts[0].text = "hi" + inserted + split + "system";
      if (!split.empty()) {
        message.content.parts[0].text = "hi" + inserted;
        message.content.parts.push_back({"text", split + "system"});
        message.content.form = ChatContent::Form::kParts;
      }
    }
    const std::string whole = inserted + split;
    request.messages[1].name += whole;
    request.messages[2].reasoning_content += whole;
    request.messages[2].tool_calls[0].name += whole;
    request.messages[2].tool_calls[0].arguments->Set("key" + whole, JsonValue::String("v" + whole));
    *request.messages[2].tool_calls[1].arguments_text += whole;
    request.tools.items[0].Set("x" + whole, JsonValue::String(whole));
    request.options.response_schema.Set("x" + whole, JsonValue::String(whole));
    return request;
  };
  const int expected = CountSpecial(Renderer().RenderToIds(conversation(" ")).value().ids);
  for (int32_t id = Tiny()->num_ranks(); id < Tiny()->vocab_size(); ++id) {
    const std::string name(Tiny()->TokenBytes(id));
    EXPECT_EQ(CountSpecial(Renderer().RenderToIds(conversation(name)).value().ids), expected) << name;
    EXPECT_EQ(CountSpecial(Renderer().RenderToIds(conversation(name.substr(0, 3), name.substr(3))).value().ids),
              expected);
  }
}

TEST(ChatRenderer, CountsCallsOfTheHistory) {
  const std::string call = R"({"id":"i","function":{"name":"f","arguments":"{}"}})";
  const std::string turn = R"({"role":"assistant","tool_calls":[)" + call + "," + call + "]}";
  const auto chat =
      Renderer().Render(Request(R"({"messages":[)" + turn + "," + turn + R"(,{"role":"user","content":"u"}]})"));
  EXPECT_EQ(chat->history_calls, 4);
}

// The tiny vocabulary under the special tokens of the K2 family.
std::shared_ptr<const Tokenizer> K2Tokenizer() {
  const std::string config = R"({"added_tokens_decoder":{"3840":{"content":"[BOS]"},"3841":{"content":"[EOS]"},
    "3842":{"content":"<|im_end|>"},"3843":{"content":"<|im_user|>"},"3844":{"content":"<|im_assistant|>"},
    "3850":{"content":"<|im_system|>"},"3851":{"content":"<|tool_calls_section_begin|>"},
    "3852":{"content":"<|tool_calls_section_end|>"},"3853":{"content":"<|tool_call_begin|>"},
    "3854":{"content":"<|tool_call_argument_begin|>"},"3855":{"content":"<|tool_call_end|>"},
    "3857":{"content":"<|im_middle|>"}},"bos_token":"[BOS]","eos_token":"[EOS]"})";
  return Tokenizer::FromContents(ReadFile(testing::TinyK3() + "/tiktoken.model"), config).value();
}

TEST(K2Renderer, Conversation) {
  const ChatRenderer renderer(K2Tokenizer());
  ASSERT_EQ(renderer.format(), ChatFormat::kK2);
  const ChatRequest request = Request(R"({"messages":[{"role":"system","content":"Be brief."},
    {"role":"user","content":[{"type":"text","text":"We"},{"type":"text","text":"ather?"}]},
    {"role":"assistant","content":"Looking.","tool_calls":[{"id":"call_a","function":{"name":"w","arguments":"{\"c\": 1e3}"}},
      {"id":"call_b","function":{"name":"w","arguments":{"c":[1,2]}}}]},
    {"role":"tool","tool_call_id":"call_b","content":"two"},{"role":"tool","tool_call_id":"call_a","content":"one"},
    {"role":"assistant","content":"ok","tool_calls":[{"id":"functions.v:2","function":{"name":"v","arguments":""}}]},
    {"role":"tool","tool_call_id":"elsewhere","content":"<|im_end|>"}],
    "options":{"tools":[{"type":"function","function":{"name":"w"}}]}})");
  const auto chat = renderer.Render(request).value();
  std::string text;
  for (const Segment& segment : chat.segments) text += segment.text;
  EXPECT_EQ(text,
            "<|im_system|>tool_declare<|im_middle|>[{\"type\":\"function\",\"function\":{\"name\":\"w\"}}]<|im_end|>"
            "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Weather?<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>Looking.<|tool_calls_section_begin|>"
            "<|tool_call_begin|>functions.w:0<|tool_call_argument_begin|>{\"c\": 1e3}<|tool_call_end|>"
            "<|tool_call_begin|>functions.w:1<|tool_call_argument_begin|>{\"c\": [1, 2]}<|tool_call_end|>"
            "<|tool_calls_section_end|><|im_end|>"
            "<|im_system|>tool<|im_middle|>## Return of functions.w:0\none<|im_end|>"
            "<|im_system|>tool<|im_middle|>## Return of functions.w:1\ntwo<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>ok<|tool_calls_section_begin|>"
            "<|tool_call_begin|>functions.v:2<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|><|im_end|>"
            "<|im_system|>tool<|im_middle|>## Return of elsewhere\n<|im_end|><|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>");
  EXPECT_EQ(chat.history_calls, 3);
  EXPECT_EQ(chat.open_channel, OpenChannel::kContent);
  // The user's <|im_end|> is text: the flat string has one more special token than the prompt.
  const auto ids = renderer.RenderToIds(request).value().ids;
  const auto flat = K2Tokenizer()->Encode(text, EncodeMode::kControl).value();
  EXPECT_EQ(CountSpecial(ids) + 1, CountSpecial(flat));
  EXPECT_EQ(K2Tokenizer()->Decode(ids), text);
}

TEST(K2Renderer, EqualsTheFlatStringWithoutForgery) {
  const ChatRenderer renderer(K2Tokenizer());
  const ChatRequest request = Request(R"({"messages":[{"role":"user","content":"Hi  there\n","name":"ann"},
    {"role":"assistant","content":"It is","partial":true}]})");
  const ChatPrompt prompt = renderer.RenderToIds(request).value();
  EXPECT_EQ(prompt.ids,
            K2Tokenizer()
                ->Encode("<|im_user|>ann<|im_middle|>Hi  there\n<|im_end|><|im_assistant|>assistant<|im_middle|>It is",
                         EncodeMode::kControl)
                .value());
  EXPECT_EQ(prompt.open_channel, OpenChannel::kContent);
}

TEST(ChatRenderer, ModelsWithoutChatTokens) {
  const auto tokenizer = Tokenizer::FromContents(ReadFile(testing::TinyK3() + "/tiktoken.model"), "{}").value();
  const ChatRenderer renderer(tokenizer);
  EXPECT_EQ(renderer.format(), ChatFormat::kNone);
  EXPECT_EQ(renderer.Render(Request(R"({"messages":[{"role":"user","content":"a"}]})")).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace k3
