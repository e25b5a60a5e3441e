#include "server/text/output_parser.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/text/json_parser.h"
#include "server/text/utf8.h"
#include "server/text/xtml_output_parser.h"
#include "tests/testing/k2_tokenizer.h"
#include "tests/testing/paths.h"

namespace k3 {
namespace {

using Call = ParsedOutput::Call;

std::shared_ptr<const Tokenizer> Tiny() {
  static const auto tokenizer = Tokenizer::Load(testing::TinyK3()).value();
  return tokenizer;
}

std::shared_ptr<const Tokenizer> K2Tokenizer() {
  static const auto tokenizer = testing::K2Tokenizer();
  return tokenizer;
}

// Stands for spelled markup: ⟨tag⟩ and ⟨/tag⟩ are markers, $ the end of the message, ‹name› a marker of the K2 family.
// Between markers, text is cut into tokens of `bytes` bytes, or by the tokenizer when 0.
std::vector<int32_t> Tokens(const Tokenizer& tokenizer, const std::string& text, size_t bytes = 0) {
  const std::pair<std::string, std::string> markers[] = {
      {"⟨/", "<|close|>"}, {"⟨", "<|open|>"}, {"⟩", "<|sep|>"}, {"$", "<|end_of_msg|>"}};
  std::vector<int32_t> ids;
  std::string plain;
  const auto flush = [&] {
    const size_t step = bytes == 0 ? std::max<size_t>(plain.size(), 1) : bytes;
    for (size_t at = 0; at < plain.size(); at += step) tokenizer.EncodeBytes(plain.substr(at, step), &ids);
    plain.clear();
  };
  for (size_t at = 0; at < text.size();) {
    std::string special;
    size_t size = 0;
    for (const auto& [spelling, name] : markers) {
      if (text.compare(at, spelling.size(), spelling) == 0 && special.empty()) {
        special = name;
        size = spelling.size();
      }
    }
    if (text.compare(at, 3, "‹") == 0) {
      const size_t end = text.find("›", at);
      special = "<|" + text.substr(at + 3, end - at - 3) + "|>";
      size = end + 3 - at;
    }
    if (special.empty()) {
      plain.push_back(text[at++]);
      continue;
    }
    flush();
    ids.push_back(tokenizer.SpecialId(special).value());
    at += size;
  }
  flush();
  return ids;
}

struct Parsed {
  std::vector<OutputEvent> events;
  ParsedOutput output;
};

Parsed Parse(OutputParser* parser, const std::vector<int32_t>& ids) {
  Parsed run;
  for (const int32_t id : ids) parser->Append(id, &run.events);
  parser->Finish(&run.events);
  for (const OutputEvent& event : run.events) {
    EXPECT_TRUE(IsValidUtf8(event.text));
    const bool text_event = event.kind == OutputEvent::Kind::kReasoning || event.kind == OutputEvent::Kind::kContent ||
                            event.kind == OutputEvent::Kind::kCallArguments;
    EXPECT_NE(text_event, event.text.empty());
    run.output.Add(event);
  }
  for (const Call& call : run.output.calls) {
    if (call.complete) {
      EXPECT_TRUE(ParseJson(call.arguments).value().is_object()) << call.arguments;
    }
  }
  return run;
}

ParsedOutput Xtml(const std::string& text, OpenChannel open = OpenChannel::kReasoning, int32_t history = 0) {
  ParsedOutput first;
  for (const size_t bytes : {0, 1, 3}) {
    auto parser = MakeOutputParser(Tiny(), ChatFormat::kXtml, open, history);
    ParsedOutput output = Parse(parser.get(), Tokens(*Tiny(), text, bytes)).output;
    if (bytes == 0) {
      first = output;
    } else {
      EXPECT_EQ(output, first) << text << " in tokens of " << bytes << " bytes";
    }
  }
  return first;
}

const char kWholeAnswer[] =
    "Let me 想 a bit… 😀⟨/think⟩⟨response⟩Looking — now.⟨/response⟩⟨tools⟩"
    "⟨call tool=\"get_weather\" index=\"1\"⟩⟨argument key=\"city\" type=\"string\"⟩Os\"lo\\\n\t😀⟨/argument⟩"
    "⟨argument key=\"days\" type=\"number\"⟩3⟨/argument⟩⟨/call⟩"
    "⟨call tool=\"search\" index=\"2\"⟩⟨argument key=\"q&quot;&amp;amp;\" type=\"object\"⟩{\"a\": [1, "
    "\"é\"]}⟨/argument⟩⟨/call⟩"
    "⟨call tool=\"now\" index=\"3\"⟩⟨/call⟩⟨/tools⟩⟨/message⟩$";

TEST(XtmlOutputParser, WholeAnswer) {
  EXPECT_EQ(Xtml(kWholeAnswer, OpenChannel::kReasoning, 5),
            (ParsedOutput{"Let me 想 a bit… 😀",
                          "Looking — now.",
                          {{"get_weather_5", "get_weather", "{\"city\":\"Os\\\"lo\\\\\\n\\t😀\",\"days\":3}", true},
                           {"search_6", "search", "{\"q\\\"&amp;\":{\"a\": [1, \"é\"]}}", true},
                           {"now_7", "now", "{}", true}}}));
}

TEST(XtmlOutputParser, Events) {
  using Kind = OutputEvent::Kind;
  auto parser = MakeOutputParser(Tiny(), ChatFormat::kXtml, OpenChannel::kReasoning, 0);
  const Parsed run =
      Parse(parser.get(), Tokens(*Tiny(),
                                 "a⟨/think⟩⟨response⟩b⟨/response⟩⟨tools⟩⟨call tool=\"f\" index=\"9\"⟩"
                                 "⟨argument key=\"k\" type=\"string\"⟩v⟨/argument⟩⟨/call⟩⟨/tools⟩⟨/message⟩$"));
  const std::vector<OutputEvent> expected = {
      {Kind::kReasoning, "a", -1, "", "", false},    {Kind::kReasoningEnd, "", -1, "", "", false},
      {Kind::kContent, "b", -1, "", "", false},      {Kind::kContentEnd, "", -1, "", "", false},
      {Kind::kCallBegin, "", 0, "f_0", "f", false},  {Kind::kCallArguments, "{\"k\":\"", 0, "", "", false},
      {Kind::kCallArguments, "v", 0, "", "", false}, {Kind::kCallArguments, "\"", 0, "", "", false},
      {Kind::kCallArguments, "}", 0, "", "", false}, {Kind::kCallEnd, "", 0, "", "", true}};
  EXPECT_EQ(run.events, expected);
}

// A model that forgets to close its reasoning loses neither answer nor call.
TEST(XtmlOutputParser, OpeningALaterSectionEndsTheReasoning) {
  const ParsedOutput expected{"plan", "", {{"get_weather_0", "get_weather", "{\"city\":\"Oslo\"}", true}}};
  const std::string call =
      "⟨tools⟩⟨call tool=\"get_weather\" index=\"1\"⟩⟨argument key=\"city\" "
      "type=\"string\"⟩Oslo⟨/argument⟩⟨/call⟩⟨/tools⟩"
      "⟨/message⟩$";
  EXPECT_EQ(Xtml("plan" + call), expected);
  EXPECT_EQ(Xtml("plan⟨/think⟩" + call), expected);
  ParsedOutput with_content = expected;
  with_content.content = "text";
  EXPECT_EQ(Xtml("plan⟨response⟩text⟨/response⟩" + call), with_content);
  EXPECT_EQ(Xtml("plan⟨response⟩text" + call), with_content);
  EXPECT_EQ(Xtml("plan⟨/think⟩⟨response⟩text⟨/response⟩" + call), with_content);
}

TEST(XtmlOutputParser, MissingMarkers) {
  const ParsedOutput two{"", "", {{"f_0", "f", "{\"a\":\"x\",\"b\":1}", true}, {"g_1", "g", "{\"c\":\"y\"}", true}}};
  EXPECT_EQ(Xtml("⟨tools⟩⟨call tool=\"f\"⟩⟨argument key=\"a\" type=\"string\"⟩x⟨argument key=\"b\" type=\"number\"⟩1"
                 "⟨call tool=\"g\"⟩⟨argument key=\"c\" type=\"string\"⟩y⟨/tools⟩$"),
            two);
  EXPECT_EQ(Xtml("⟨/think⟩⟨call tool=\"f\"⟩⟨argument key=\"a\" type=\"string\"⟩x⟨/argument⟩⟨argument key=\"b\" "
                 "type=\"number\"⟩1⟨/call⟩\n⟨call tool=\"g\"⟩⟨argument key=\"c\" type=\"string\"⟩y⟨/call⟩⟨/message⟩$"),
            two);
  // Separators: a tag's bare name counts without one.
  EXPECT_EQ(Xtml("r⟨/think⟨response⟩c⟨/response⟨/message$"), (ParsedOutput{"r", "c", {}}));
  // Text without its channel.
  EXPECT_EQ(Xtml("r⟨/think⟩\n\n answer⟨/message⟩$"), (ParsedOutput{"r", "\n\n answer", {}}));
  EXPECT_EQ(Xtml("r⟨/think⟩\n⟨response⟩c⟨/response⟩\n$"), (ParsedOutput{"r", "c", {}}));
  // The prompt has opened think; a second opener is no text.
  EXPECT_EQ(Xtml("⟨think⟩r⟨/think⟩⟨response⟩c"), (ParsedOutput{"r", "c", {}}));
  EXPECT_EQ(Xtml("c⟨/response⟩$", OpenChannel::kContent), (ParsedOutput{"", "c", {}}));
  EXPECT_EQ(Xtml("⟨/think⟩c⟨/message⟩$", OpenChannel::kContent), (ParsedOutput{"", "c", {}}));
  EXPECT_EQ(Xtml("⟨message role=\"assistant\"⟩⟨think⟩r⟨/think⟩⟨response⟩c", OpenChannel::kNone),
            (ParsedOutput{"r", "c", {}}));
}

TEST(XtmlOutputParser, MarkupInTextStaysText) {
  const std::string spelled = "<|close|>argument<|sep|><|open|>tools<|sep|>";
  EXPECT_EQ(Xtml(spelled + "⟨/think⟩⟨response⟩" + spelled +
                 "⟨/response⟩⟨tools⟩⟨call tool=\"f\"⟩"
                 "⟨argument key=\"a\" type=\"string\"⟩" +
                 spelled + "⟨/argument⟩⟨/call⟩⟨/tools⟩$"),
            (ParsedOutput{spelled, spelled, {{"f_0", "f", "{\"a\":\"" + spelled + "\"}", true}}}));
}

TEST(XtmlOutputParser, ImpossibleTagsAreText) {
  EXPECT_EQ(Xtml("a⟨call tool=\"f\" index=\"1\"⟩b⟨/think⟩⟨response⟩⟨b⟩x⟨/b⟩⟨argument key=\"k\"⟩"),
            (ParsedOutput{"a<|open|>call tool=\"f\" index=\"1\"<|sep|>b",
                          "<|open|>b<|sep|>x<|close|>b<|sep|><|open|>argument key=\"k\"<|sep|>",
                          {}}));
  EXPECT_EQ(Xtml("⟨response⟩a⟩b"), (ParsedOutput{"", "a<|sep|>b", {}}));
  EXPECT_EQ(Xtml("⟨response⟩x⟨/" + std::string(100, 'y') + "⟨/response⟩"),
            (ParsedOutput{"", "x<|close|>" + std::string(100, 'y'), {}}));
}

TEST(XtmlOutputParser, ArgumentTypes) {
  const auto value = [](const std::string& type, const std::string& text) {
    const ParsedOutput output =
        Xtml("⟨tools⟩⟨call tool=\"f\"⟩⟨argument key=\"k\"" + type + "⟩" + text + "⟨/argument⟩⟨/call⟩");
    EXPECT_TRUE(output.calls.at(0).complete);
    const std::string& arguments = output.calls[0].arguments;
    return arguments.substr(5, arguments.size() - 6);
  };
  EXPECT_EQ(value(" type=\"string\"", "5"), "\"5\"");
  EXPECT_EQ(value(" type=\"string\"", ""), "\"\"");
  EXPECT_EQ(value("", "5"), "\"5\"");
  EXPECT_EQ(value(" type=\"number\"", "1e3"), "1e3");
  EXPECT_EQ(value(" type=\"number\"", " 5\n"), "5");
  EXPECT_EQ(value(" type=\"number\"", "five"), "\"five\"");
  EXPECT_EQ(value(" type=\"number\"", "NaN"), "\"NaN\"");
  EXPECT_EQ(value(" type=\"boolean\"", "true"), "true");
  EXPECT_EQ(value(" type=\"null\"", "null"), "null");
  EXPECT_EQ(value(" type=\"null\"", ""), "null");
  EXPECT_EQ(value(" type=\"object\"", "{\"a\": 1}"), "{\"a\": 1}");
  EXPECT_EQ(value(" type=\"object\"", "{\"a\": 1"), "\"{\\\"a\\\": 1\"");
  EXPECT_EQ(value(" type=\"array\"", "[1,\n2]"), "[1,\n2]");
}

TEST(XtmlOutputParser, JsonBlock) {
  EXPECT_EQ(Xtml("⟨tools⟩⟨call tool=\"f\"⟩⟨json type=\"object\"⟩ {\"a\": {}} ⟨/json⟩⟨/call⟩").calls,
            (std::vector<Call>{{"f_0", "f", "{\"a\": {}}", true}}));
  EXPECT_EQ(Xtml("⟨tools⟩⟨call tool=\"f\"⟩⟨json type=\"object\"⟩{\"a\": ⟨/json⟩⟨/call⟩").calls,
            (std::vector<Call>{{"f_0", "f", "{\"a\":", false}}));
  EXPECT_FALSE(
      Xtml("⟨tools⟩⟨call tool=\"f\"⟩⟨json⟩{}⟨/json⟩⟨argument key=\"a\"⟩b⟨/argument⟩⟨/call⟩").calls[0].complete);
}

TEST(XtmlOutputParser, CutOffCalls) {
  EXPECT_EQ(Xtml("⟨tools⟩⟨call tool=\"f\"⟩⟨argument key=\"a\" type=\"string\"⟩hal").calls,
            (std::vector<Call>{{"f_0", "f", "{\"a\":\"hal", false}}));
  EXPECT_EQ(Xtml("⟨tools⟩⟨call tool=\"f\"⟩⟨argument key=\"a\" type=\"number\"⟩12").calls,
            (std::vector<Call>{{"f_0", "f", "", false}}));
  EXPECT_EQ(Xtml("⟨tools⟩⟨call tool=\"f\"⟩⟨argument key=\"a\" type=\"string\"⟩hal$").calls,
            (std::vector<Call>{{"f_0", "f", "{\"a\":\"hal\"", false}}));
  EXPECT_EQ(Xtml("⟨tools⟩⟨call tool=\"f\"⟩$").calls, (std::vector<Call>{{"f_0", "f", "{}", true}}));
  EXPECT_EQ(Xtml("⟨tools⟩⟨call tool=\"f\"").calls, std::vector<Call>{});
}

TEST(XtmlOutputParser, HalfCharacters) {
  auto parser = MakeOutputParser(Tiny(), ChatFormat::kXtml, OpenChannel::kReasoning, 0);
  std::vector<int32_t> ids = {0xF0, 0x9F};
  const std::vector<int32_t> more = Tokens(*Tiny(), "⟨/think⟩⟨response⟩");
  ids.insert(ids.end(), more.begin(), more.end());
  ids.insert(ids.end(), {0x98, 0x80, 'a', 0xE4, 0xB8});
  EXPECT_EQ(Parse(parser.get(), ids).output, (ParsedOutput{"\uFFFD", "\uFFFD\uFFFDa\uFFFD", {}}));
}

TEST(XtmlOutputParser, HalfCharacterAtTheEndCanBeTakenRaw) {
  for (const ChatFormat format : {ChatFormat::kXtml, ChatFormat::kNone}) {
    auto parser = MakeOutputParser(Tiny(), format, OpenChannel::kContent, 0);
    std::vector<OutputEvent> events;
    for (const int32_t id : std::vector<int32_t>{'a', 0xF0, 0x9F}) parser->Append(id, &events);
    EXPECT_EQ(parser->channel(), OpenChannel::kContent);
    std::string undecoded;
    parser->Finish(&events, &undecoded);
    EXPECT_EQ(undecoded, "\xF0\x9F");
    ASSERT_EQ(events.size(), 1u);
    EXPECT_EQ(events[0].text, "a");
  }
}

TEST(XtmlOutputParser, ChannelOfEachToken) {
  auto parser = MakeOutputParser(Tiny(), ChatFormat::kXtml, OpenChannel::kReasoning, 0);
  std::string seen;
  for (const int32_t id : Tokens(*Tiny(), "a⟨/think⟩⟨response⟩b⟨/response⟩⟨tools⟩⟨call tool=\"f\"⟩⟨/call⟩")) {
    std::vector<OutputEvent> events;
    parser->Append(id, &events);
    const char c = parser->channel() == OpenChannel::kReasoning ? 'r'
                   : parser->channel() == OpenChannel::kContent ? 'c'
                                                                : '-';
    if (seen.empty() || seen.back() != c) seen.push_back(c);
    if (id == Tiny()->SpecialId("<|sep|>") || id == Tiny()->SpecialId("<|close|>")) {
      EXPECT_EQ(c, '-');
    }
  }
  EXPECT_EQ(seen, "r-c-");
}

TEST(XtmlOutputParser, Attributes) {
  using Attributes = std::vector<std::pair<std::string, std::string>>;
  EXPECT_EQ(ParseXtmlAttributes(" tool=\"a b\" index=\"1\""), (Attributes{{"tool", "a b"}, {"index", "1"}}));
  EXPECT_EQ(ParseXtmlAttributes(" k=\"&amp;quot;&quot;\""), (Attributes{{"k", "&quot;\""}}));
  EXPECT_EQ(ParseXtmlAttributes(" k=\"v"), Attributes{});
  EXPECT_EQ(ParseXtmlAttributes(" k"), Attributes{});
}

// Stopping after any token gives a prefix of everything; and a parser that goes on from there, in the channel that a
// continued message leaves open, gives the rest.
void CheckEveryCut(const std::shared_ptr<const Tokenizer>& tokenizer, ChatFormat format, OpenChannel open,
                   const std::vector<int32_t>& ids) {
  auto whole_parser = MakeOutputParser(tokenizer, format, open, 0);
  const ParsedOutput whole = Parse(whole_parser.get(), ids).output;
  const auto is_prefix = [](std::string part, const std::string& all) {
    if (all.compare(0, part.size(), part) == 0) return true;
    if (part.size() >= 3 && part.substr(part.size() - 3) == "\uFFFD") part.resize(part.size() - 3);
    return all.compare(0, part.size(), part) == 0;
  };
  for (size_t cut = 0; cut <= ids.size(); ++cut) {
    auto parser = MakeOutputParser(tokenizer, format, open, 0);
    std::vector<OutputEvent> events;
    for (size_t i = 0; i < cut; ++i) parser->Append(ids[i], &events);
    ParsedOutput seen;
    for (const OutputEvent& event : events) seen.Add(event);
    auto rest = std::vector<int32_t>(ids.begin() + cut, ids.end());
    const bool reasoning_open = format == ChatFormat::kXtml && seen.content.empty() && seen.calls.empty() &&
                                (events.empty() || events.back().kind == OutputEvent::Kind::kReasoning);
    const bool content_open = !events.empty() && events.back().kind == OutputEvent::Kind::kContent;
    const bool between_characters = IsValidUtf8(tokenizer->Decode(std::span(ids).first(cut)));
    bool in_text =
        cut > 0 && cut < ids.size() && !tokenizer->IsSpecial(ids[cut]) && !tokenizer->IsSpecial(ids[cut - 1]);
    for (size_t i = cut; in_text && i-- > 0;) {
      if (!tokenizer->IsSpecial(ids[i])) continue;
      in_text = tokenizer->TokenBytes(ids[i]) == "<|sep|>";  // not amid a tag's name
      break;
    }
    if (in_text && between_characters && (reasoning_open || content_open)) {
      auto continued =
          MakeOutputParser(tokenizer, format, reasoning_open ? OpenChannel::kReasoning : OpenChannel::kContent, 0);
      ParsedOutput joined = Parse(continued.get(), rest).output;
      joined.reasoning = seen.reasoning + joined.reasoning;
      joined.content = seen.content + joined.content;
      EXPECT_EQ(joined, whole) << "continued after " << cut;
    }
    parser->Finish(&events);
    ParsedOutput part;
    for (const OutputEvent& event : events) part.Add(event);
    EXPECT_TRUE(is_prefix(part.reasoning, whole.reasoning)) << cut;
    EXPECT_TRUE(is_prefix(part.content, whole.content)) << cut;
    ASSERT_LE(part.calls.size(), whole.calls.size());
    for (size_t i = 0; i < part.calls.size(); ++i) {
      EXPECT_EQ(part.calls[i].id, whole.calls[i].id);
      EXPECT_TRUE(is_prefix(part.calls[i].arguments, whole.calls[i].arguments)) << cut;
      if (part.calls[i].complete) {
        EXPECT_EQ(part.calls[i], whole.calls[i]);
      }
    }
  }
}

TEST(XtmlOutputParser, EveryCut) {
  for (const std::string& text :
       {std::string(kWholeAnswer), std::string("reasoning only, 漢字 and 👨\u200d👩\u200d👧"),
        std::string("plan⟨tools⟩⟨call tool=\"f\"⟩⟨argument key=\"é\" type=\"string\"⟩中文⟨/argument⟩⟨/call⟩⟨/tools⟩$"),
        std::string("⟨/think⟩⟨response⟩Just an answer.\n\n```c\nint x;\n```⟨/response⟩⟨/message⟩$")}) {
    for (const size_t bytes : {0, 1, 3}) {
      CheckEveryCut(Tiny(), ChatFormat::kXtml, OpenChannel::kReasoning, Tokens(*Tiny(), text, bytes));
    }
  }
}

ParsedOutput K2(const std::string& text, int32_t history = 0) {
  ParsedOutput first;
  for (const size_t bytes : {0, 1, 3}) {
    auto parser = MakeOutputParser(K2Tokenizer(), ChatFormat::kK2, OpenChannel::kContent, history);
    ParsedOutput output = Parse(parser.get(), Tokens(*K2Tokenizer(), text, bytes)).output;
    if (bytes == 0) first = output;
    EXPECT_EQ(output, first);
  }
  return first;
}

const char kK2Answer[] =
    "Looking — 想.‹tool_calls_section_begin›‹tool_call_begin›functions.get_weather:7‹tool_call_argument_begin›"
    "{\"city\": \"Os\\\"lo 😀\"}‹tool_call_end›‹tool_call_begin› functions.now:8 "
    "‹tool_call_argument_begin›‹tool_call_end›"
    "‹tool_calls_section_end›‹im_end›";

TEST(K2OutputParser, Calls) {
  EXPECT_EQ(K2(kK2Answer, 2),
            (ParsedOutput{"",
                          "Looking — 想.",
                          {{"functions.get_weather:2", "get_weather", "{\"city\": \"Os\\\"lo 😀\"}", true},
                           {"functions.now:3", "now", "{}", true}}}));
  EXPECT_EQ(K2("a‹im_end›"), (ParsedOutput{"", "a", {}}));
  EXPECT_EQ(K2("‹tool_call_begin›f‹tool_call_end›\n text"),
            (ParsedOutput{"", "\n text", {{"functions.f:0", "f", "{}", true}}}));
  EXPECT_EQ(K2("‹tool_calls_section_begin›‹tool_call_begin›functions.f:0‹tool_call_argument_begin›{\"a\":").calls,
            (std::vector<Call>{{"functions.f:0", "f", "{\"a\":", false}}));
  EXPECT_EQ(
      K2("‹tool_calls_section_begin›‹tool_call_begin›functions.f:0‹tool_call_argument_begin›{\"a\":‹im_end›").calls,
      (std::vector<Call>{{"functions.f:0", "f", "{\"a\":", false}}));
  EXPECT_EQ(K2("‹tool_calls_section_begin›‹tool_call_begin›functions.f").calls, std::vector<Call>{});
  EXPECT_EQ(K2("<|tool_call_begin|>functions.f:0"), (ParsedOutput{"", "<|tool_call_begin|>functions.f:0", {}}));
  EXPECT_EQ(K2("‹tool_call_begin›functions.a.b:c:12‹tool_call_argument_begin›{}").calls,
            (std::vector<Call>{{"functions.a.b:c:0", "a.b:c", "{}", false}}));
}

TEST(K2OutputParser, EveryCut) {
  for (const size_t bytes : {0, 1, 3}) {
    CheckEveryCut(K2Tokenizer(), ChatFormat::kK2, OpenChannel::kContent, Tokens(*K2Tokenizer(), kK2Answer, bytes));
  }
}

TEST(RawOutputParser, EverythingIsContent) {
  auto parser = MakeOutputParser(Tiny(), ChatFormat::kNone, OpenChannel::kNone, 0);
  EXPECT_EQ(Parse(parser.get(), Tokens(*Tiny(), "a⟨think⟩b 中😀$", 1)).output,
            (ParsedOutput{"", "a<|open|>think<|sep|>b 中😀", {}}));
}

// The work per token does not grow with the output.
TEST(XtmlOutputParser, LongOutputs) {
  const std::string argument = "⟨tools⟩⟨call tool=\"f\"⟩⟨argument key=\"a\" type=\"object\"⟩";
  for (const std::string& text : {std::string("⟨/think⟩"), argument, std::string("⟨response⟩")}) {
    auto parser = MakeOutputParser(Tiny(), ChatFormat::kXtml, OpenChannel::kReasoning, 0);
    std::vector<int32_t> ids = Tokens(*Tiny(), text);
    ids.insert(ids.end(), 300000, '\n');
    ids.push_back('x');
    const Parsed run = Parse(parser.get(), ids);
    EXPECT_EQ(run.output.content.size(), text == argument ? 0u : 300001u);
  }
}

}  // namespace
}  // namespace k3
