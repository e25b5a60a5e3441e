#include "server/grammar/answer_grammar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <regex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "nlohmann/json.hpp"
#include "server/grammar/grammar_engine.h"
#include "server/text/field_error.h"
#include "server/text/json_parser.h"
#include "server/text/output_parser.h"
#include "server/text/utf8.h"
#include "tests/testing/k2_tokenizer.h"
#include "tests/testing/paths.h"

// Every answer that a grammar lets through, however improbable, reads back as what was asked for.
namespace k3 {
namespace {

using Json = nlohmann::json;

// Whether `value` fits `schema`, for the keywords that RandomSchema uses; `root` resolves references.
bool Fits(const Json& value, const Json& schema, const Json& root) {
  if (schema.is_boolean()) return schema.get<bool>();
  if (schema.contains("$ref")) {
    return Fits(value, root.at(Json::json_pointer(schema["$ref"].get<std::string>().substr(1))), root);
  }
  if (schema.contains("const")) return value == schema["const"];
  if (schema.contains("enum")) {
    return std::find(schema["enum"].begin(), schema["enum"].end(), value) != schema["enum"].end();
  }
  if (schema.contains("anyOf")) {
    return std::any_of(schema["anyOf"].begin(), schema["anyOf"].end(),
                       [&](const Json& branch) { return Fits(value, branch, root); });
  }
  if (!schema.contains("type")) return true;
  if (schema["type"].is_array()) {
    return std::any_of(schema["type"].begin(), schema["type"].end(), [&](const Json& type) {
      Json one = schema;
      one["type"] = type;
      return Fits(value, one, root);
    });
  }
  const std::string type = schema["type"];
  if (type == "null") return value.is_null();
  if (type == "boolean") return value.is_boolean();
  if (type == "string") {
    if (!value.is_string()) return false;
    const std::string text = value;
    const auto length = std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; });
    if (length < schema.value("minLength", 0) || length > schema.value("maxLength", 1 << 30)) return false;
    return !schema.contains("pattern") || std::regex_search(text, std::regex(schema["pattern"].get<std::string>()));
  }
  if (type == "integer" || type == "number") {
    // Digits without end read back as a float.
    if (!value.is_number()) return false;
    const double number = value;
    if (type == "integer" && std::isfinite(number) && number != std::floor(number)) return false;
    return number >= schema.value("minimum", -HUGE_VAL) && number <= schema.value("maximum", HUGE_VAL);
  }
  if (type == "array") {
    if (!value.is_array()) return false;
    const auto size = static_cast<int>(value.size());
    if (size < schema.value("minItems", 0) || size > schema.value("maxItems", 1 << 30)) return false;
    return !schema.contains("items") ||
           std::all_of(value.begin(), value.end(), [&](const Json& item) { return Fits(item, schema["items"], root); });
  }
  if (!value.is_object()) return false;
  for (const Json& name : schema.value("required", Json::array())) {
    if (!value.contains(name.get<std::string>())) return false;
  }
  for (const auto& [name, member] : value.items()) {
    const Json properties = schema.value("properties", Json::object());
    const Json additional = schema.value("additionalProperties", Json(true));
    if (properties.contains(name)) {
      if (!Fits(member, properties[name], root)) return false;
    } else if (!Fits(member, additional, root)) {
      return false;
    }
  }
  return true;
}

// Whether some object in the text names a member twice.
bool NamesTwice(const std::string& text) {
  std::vector<std::set<std::string>> open;
  bool twice = false;
  const Json value = Json::parse(
      text,
      [&](int, Json::parse_event_t event, const Json& parsed) {
        if (event == Json::parse_event_t::object_start) open.emplace_back();
        if (event == Json::parse_event_t::object_end) open.pop_back();
        if (event == Json::parse_event_t::key) twice = !open.back().insert(parsed.get<std::string>()).second || twice;
        return true;
      },
      /*allow_exceptions=*/false);
  return twice;
}

void ExpectFits(const std::string& text, const Json& schema) {
  ASSERT_TRUE(ParseJson(text).ok()) << text;
  try {
    EXPECT_TRUE(Fits(Json::parse(text), schema, schema)) << schema.dump() << "\n" << text;
  } catch (const Json::out_of_range&) {
    // Legal JSON that this library does not take: a number beyond a double.
  }
}

class SchemaMaker {
 public:
  explicit SchemaMaker(uint32_t seed) : random_(seed) {}

  Json Object(int depth) {
    static const char* const kNames[] = {"city", "größe", "a-b", "名前", "x\"y", "n", "tab\tle", "a&b"};
    Json schema = {{"type", "object"}, {"properties", Json::object()}, {"required", Json::array()}};
    const int count = depth == 0 ? 1 + Below(4) : Below(3);
    for (int i = 0; i < count; ++i) {
      const std::string name = kNames[Below(8)];
      if (schema["properties"].contains(name)) continue;
      schema["properties"][name] = Value(depth + 1);
      if (Below(3) > 0) schema["required"].push_back(name);
    }
    if (Below(3) == 0) schema["additionalProperties"] = Below(2) == 0 ? Json(false) : Value(depth + 1);
    if (depth == 0) schema["$defs"] = {{"small", {{"type", "integer"}, {"minimum", 1}, {"maximum", 9}}}};
    return schema;
  }

 private:
  int Below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }

  Json Value(int depth) {
    switch (Below(depth < 3 ? 13 : 9)) {
      case 0:
        return {{"type", "string"}};
      case 1:
        return {{"type", "string"}, {"minLength", 2}, {"maxLength", 6}};
      case 2:
        return {{"type", "string"}, {"pattern", "^[a-f]{1,3}-[0-9]+$"}};
      case 3:
        return {{"type", "integer"}, {"minimum", -3}, {"maximum", 120}};
      case 4:
        return {{"type", "number"}};
      case 5:
        return {{"type", "boolean"}};
      case 6:
        return {{"enum", {"red", 7, nullptr, "two words", "<|close|>", ""}}};
      case 7:
        return {{"$ref", "#/$defs/small"}};
      case 8:
        return {{"type", {"string", "null", "integer"}}};
      case 9:
        return {{"type", "array"}, {"items", Value(depth + 1)}, {"minItems", 1}, {"maxItems", 3}};
      case 10:
        return {{"anyOf", {Value(depth + 1), {{"type", "null"}}}}};
      case 11:
        return {{"const", "fixed"}};
      default:
        return Object(depth);
    }
  }

  std::mt19937 random_;
};

struct Answer {
  bool finished = false;  // by a stop token
  ParsedOutput output;
  std::string text;
};

class AnswerGrammarTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (MakeGrammarEngine(*Tiny(), 64 + Tiny()->vocab_size(), Tiny()->stop_ids()) == nullptr) {
      GTEST_SKIP() << "built without structured output";
    }
  }

  static std::shared_ptr<const Tokenizer> Tiny() {
    static const auto tokenizer = Tokenizer::Load(testing::TinyK3()).value();
    return tokenizer;
  }
  static std::shared_ptr<const Tokenizer> K2() {
    static const auto tokenizer = testing::K2Tokenizer();
    return tokenizer;
  }

  static GenerationRequest Chat(const Json& tools, ToolChoice choice) {
    GenerationRequest request;
    ChatRequest chat;
    chat.messages.emplace_back();
    chat.messages[0].role = "user";
    chat.messages[0].content = ChatContent::Text("hi");
    if (!tools.is_null()) chat.tools = ParseJson(tools.dump()).value();
    chat.options.tool_choice = choice;
    request.input = std::move(chat);
    return request;
  }
  static Json Tool(const std::string& name, const Json& parameters, bool strict = true) {
    return {{"type", "function"}, {"function", {{"name", name}, {"parameters", parameters}, {"strict", strict}}}};
  }
  static void Constrain(GenerationRequest* request, RequestedConstraint::Kind kind, const std::string& text) {
    request->constraint.kind = kind;
    request->constraint.text = text;
  }

  static std::optional<AnswerGrammar> Build(const GenerationRequest& request, const Tokenizer& tokenizer,
                                            OpenChannel open) {
    ChatPrompt prompt;
    prompt.open_channel = open;
    auto grammar = BuildAnswerGrammar(request, tokenizer, DetectChatFormat(tokenizer), &prompt);
    EXPECT_TRUE(grammar.ok()) << grammar.status();
    return grammar.ok() ? *std::move(grammar) : std::nullopt;
  }

  static std::shared_ptr<const CompiledGrammar> Compile(const GrammarNode& root, const Tokenizer& tokenizer) {
    const auto engine = MakeGrammarEngine(tokenizer, tokenizer.vocab_size() + 64, tokenizer.stop_ids());
    auto compiled = engine->Compile(root, std::chrono::minutes(5));
    EXPECT_TRUE(compiled.ok()) << compiled.status();
    return compiled.ok() ? *compiled : nullptr;
  }

  // Tokens chosen at random among those allowed, with a taste for those that end things, or for those made of the
  // characters `favourites`.
  Answer Walk(const CompiledGrammar& grammar, std::shared_ptr<const Tokenizer> tokenizer, ChatFormat format,
              OpenChannel open, int limit = 400, std::string_view favourites = "") {
    const auto constraint = grammar.NewConstraint();
    const auto parser = MakeOutputParser(tokenizer, format, open, 0);
    const int32_t vocab_size = tokenizer->vocab_size() + 64;
    std::vector<uint32_t> mask(static_cast<size_t>(vocab_size + 31) / 32);
    std::vector<OutputEvent> events;
    Answer answer;
    for (int step = 0; step < limit && !answer.finished; ++step) {
      std::fill(mask.begin(), mask.end(), ~0u);
      constraint->FillMask(mask);
      std::vector<int32_t> allowed, ending;
      for (int32_t id = 0; id < vocab_size; ++id) {
        if ((mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) == 0) continue;
        if (id >= tokenizer->vocab_size()) {
          ADD_FAILURE() << "padding is allowed";
          return answer;
        }
        allowed.push_back(id);
        const std::string_view bytes = tokenizer->TokenBytes(id);
        const bool ends = tokenizer->IsSpecial(id) || bytes.find_first_of("\"}],") != std::string_view::npos;
        const bool liked = tokenizer->IsSpecial(id) || bytes.find_first_not_of(favourites) == std::string_view::npos;
        if (favourites.empty() ? ends : liked) ending.push_back(id);
      }
      if (allowed.empty()) {
        ADD_FAILURE() << "a dead end after " << answer.text;
        return answer;
      }
      const auto& from = !ending.empty() && (!favourites.empty() || random_() % 2 == 0) ? ending : allowed;
      const int32_t id = from[random_() % from.size()];
      EXPECT_TRUE(constraint->Accept(id));
      answer.text += tokenizer->TokenBytes(id);
      const auto& stops = tokenizer->stop_ids();
      answer.finished = std::find(stops.begin(), stops.end(), id) != stops.end();
      parser->Append(id, &events);
    }
    parser->Finish(&events, nullptr);
    for (const OutputEvent& event : events) answer.output.Add(event);
    return answer;
  }

  std::mt19937 random_{20261129};
};

TEST_F(AnswerGrammarTest, JsonAnswersParseAndFit) {
  int finished = 0;
  for (uint32_t seed = 0; seed < 40; ++seed) {
    const Json schema = SchemaMaker(seed).Object(0);
    GenerationRequest request = Chat(nullptr, ToolChoice::kAuto);
    Constrain(&request, RequestedConstraint::Kind::kJsonSchema, schema.dump());
    const OpenChannel open = seed % 2 == 0 ? OpenChannel::kReasoning : OpenChannel::kContent;
    const auto grammar = Build(request, *Tiny(), open);
    ASSERT_TRUE(grammar.has_value());
    const auto compiled = Compile(grammar->root, *Tiny());
    ASSERT_NE(compiled, nullptr) << schema.dump();
    for (int i = 0; i < 5; ++i) {
      const Answer answer = Walk(*compiled, Tiny(), ChatFormat::kXtml, open);
      if (!answer.finished) continue;
      ++finished;
      ExpectFits(answer.output.content, schema);
      EXPECT_TRUE(answer.output.calls.empty());
      EXPECT_TRUE(answer.text.ends_with("<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>") ||
                  answer.text.ends_with("<|close|>message<|sep|>[EOS]"))
          << answer.text;
    }
  }
  EXPECT_GT(finished, 100);
}

TEST_F(AnswerGrammarTest, ToolCallsParseAndFit) {
  for (const bool k3 : {true, false}) {
    const auto tokenizer = k3 ? Tiny() : K2();
    const ChatFormat format = k3 ? ChatFormat::kXtml : ChatFormat::kK2;
    int calls = 0;
    for (uint32_t seed = 100; seed < 130; ++seed) {
      const Json first = SchemaMaker(seed).Object(0), second = SchemaMaker(seed + 1000).Object(0);
      GenerationRequest request = Chat({Tool("first", first), Tool("second-2", second)}, ToolChoice::kRequired);
      const OpenChannel open = k3 && seed % 2 == 0 ? OpenChannel::kReasoning : OpenChannel::kContent;
      request.parallel_tool_calls = seed % 3 != 0;
      const auto grammar = Build(request, *tokenizer, open);
      ASSERT_TRUE(grammar.has_value());
      const auto compiled = Compile(grammar->root, *tokenizer);
      ASSERT_NE(compiled, nullptr) << first.dump();
      for (int i = 0; i < 4; ++i) {
        const Answer answer = Walk(*compiled, tokenizer, format, open, 800);
        if (!answer.finished) continue;
        ASSERT_FALSE(answer.output.calls.empty()) << answer.text;
        EXPECT_LE(answer.output.calls.size(), request.parallel_tool_calls ? 100u : 1u) << answer.text;
        for (const ParsedOutput::Call& call : answer.output.calls) {
          ++calls;
          EXPECT_TRUE(call.complete);
          const Json& schema = call.name == "first" ? first : second;
          EXPECT_TRUE(call.name == "first" || call.name == "second-2") << call.name;
          ExpectFits(call.arguments, schema);
        }
      }
    }
    EXPECT_GT(calls, 50);
  }
}

TEST_F(AnswerGrammarTest, MembersAreNamedOnce) {
  const Json schemas[] = {
      Json::parse(R"({"type":"object","additionalProperties":{"type":"integer"},"maxProperties":6})"),
      Json::parse(R"({"type":"object","additionalProperties":{"type":"boolean"},"minProperties":4,"maxProperties":4})"),
      Json::parse(R"({"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":
          {"type":"integer"},"maxProperties":6})"),
      Json::parse(R"({"type":"object","patternProperties":{"^a{1,9}$":{"type":"integer"}},
          "maxProperties":6})"),
      Json::parse(R"({"type":"object","propertyNames":{"maxLength":3},"additionalProperties":{"type":"integer"},
          "maxProperties":4})"),
      Json::parse(
          R"({"type":"object","propertyNames":{"enum":["a","aa","aaa"]},"additionalProperties":{"type":"integer"}})"),
      Json::parse(R"({"type":"array","items":{"type":"object"},"minItems":2,"maxItems":3})"),
  };
  for (const bool tool : {false, true}) {
    int finished = 0, members = 0;
    for (const Json& schema : schemas) {
      const Json parameters = {{"type", "object"}, {"properties", {{"x", schema}}}, {"required", {"x"}}};
      GenerationRequest request =
          Chat(tool ? Json::array({Tool("f", parameters)}) : Json(), tool ? ToolChoice::kRequired : ToolChoice::kAuto);
      request.parallel_tool_calls = false;
      if (!tool) Constrain(&request, RequestedConstraint::Kind::kJsonSchema, schema.dump());
      const auto grammar = Build(request, *Tiny(), OpenChannel::kContent);
      ASSERT_TRUE(grammar.has_value()) << schema;
      const auto compiled = Compile(grammar->root, *Tiny());
      ASSERT_NE(compiled, nullptr) << schema;
      for (int i = 0; i < 12; ++i) {
        const Answer answer = Walk(*compiled, Tiny(), ChatFormat::kXtml, OpenChannel::kContent, 500, "{\":a1,}]t");
        if (!answer.finished) continue;
        const std::string text = tool ? answer.output.calls.at(0).arguments : answer.output.content;
        ++finished;
        members += static_cast<int>(std::count(text.begin(), text.end(), ':'));
        EXPECT_FALSE(NamesTwice(text)) << schema << text;
        const Json value = Json::parse(text);
        EXPECT_TRUE(Fits(tool ? value["x"] : value, schema, schema)) << schema << text;
      }
    }
    EXPECT_GT(finished, 20);
    EXPECT_GT(members, 60);
  }
}

// The keys of argument elements too, and where all names that there are have been used the answer still ends.
TEST_F(AnswerGrammarTest, ArgumentsAreNamedOnce) {
  GenerationRequest request = Chat(Json::array({Tool("f", Json::parse(R"({"type":"object","additionalProperties":
      {"type":"boolean"}})"))}),
                                   ToolChoice::kRequired);
  const auto grammar = Build(request, *Tiny(), OpenChannel::kContent);
  const auto compiled = Compile(grammar->root, *Tiny());
  int arguments = 0;
  for (int i = 0; i < 30; ++i) {
    const Answer answer =
        Walk(*compiled, Tiny(), ChatFormat::kXtml, OpenChannel::kContent, 300, "\"abcrgumentkylse= to");
    for (const auto& call : answer.output.calls) {
      if (!call.complete) continue;
      EXPECT_FALSE(NamesTwice(call.arguments)) << call.arguments;
      arguments += static_cast<int>(Json::parse(call.arguments).size());
    }
  }
  EXPECT_GT(arguments, 4);
  GenerationRequest few = Chat(nullptr, ToolChoice::kAuto);
  Constrain(&few, RequestedConstraint::Kind::kJsonSchema,
            R"({"type":"object","patternProperties":{"^[ab]$":{"type":"integer"}},"minProperties":1})");
  const auto compiled_few = Compile(Build(few, *Tiny(), OpenChannel::kContent)->root, *Tiny());
  for (int i = 0; i < 20; ++i) Walk(*compiled_few, Tiny(), ChatFormat::kXtml, OpenChannel::kContent, 200, "{\":ab1,");
}

TEST_F(AnswerGrammarTest, StringsOfDifferentLengthsAtOnePlaceNeverEndInNothing) {
  const Json schemas[] = {
      Json::parse(R"({"anyOf":[{"type":"string","maxLength":2},{"type":"string","minLength":5,"maxLength":7}]})"),
      Json::parse(R"({"anyOf":[{"const":"N/A"},{"type":"string","minLength":10,"maxLength":12}]})"),
      Json::parse(R"({"anyOf":[{"type":"string","maxLength":30},{"type":"string","minLength":5,"maxLength":40}]})"),
      Json::parse(
          R"({"anyOf":[{"type":"object","properties":{"kind":{"const":"x"},"v":{"type":"string","maxLength":20}},
          "required":["kind","v"],"additionalProperties":false},{"type":"object","properties":{"kind":{"const":"y"},
          "v":{"type":"string","minLength":30,"maxLength":60}},"required":["kind","v"],"additionalProperties":false}]})"),
      Json::parse(R"({"anyOf":[{"type":"object","properties":{"v":{"type":"string","maxLength":2},"a":{"type":"null"}},
          "required":["v","a"],"additionalProperties":false},{"type":"object","properties":{"v":{"type":"string","minLength":5,
          "maxLength":9},"b":{"type":"null"}},"required":["v","b"],"additionalProperties":false}]})"),
  };
  for (const bool tool : {false, true}) {
    for (const Json& schema : schemas) {
      const Json parameters = {{"type", "object"}, {"properties", {{"x", schema}}}, {"required", {"x"}}};
      GenerationRequest request =
          Chat(tool ? Json::array({Tool("f", parameters)}) : Json(), tool ? ToolChoice::kRequired : ToolChoice::kAuto);
      request.parallel_tool_calls = false;
      if (!tool) Constrain(&request, RequestedConstraint::Kind::kJsonSchema, schema.dump());
      const auto grammar = Build(request, *Tiny(), OpenChannel::kContent);
      ASSERT_TRUE(grammar.has_value()) << schema;
      const auto compiled = Compile(grammar->root, *Tiny());
      ASSERT_NE(compiled, nullptr) << schema;
      std::set<size_t> lengths;
      for (int i = 0; i < 40; ++i) {
        const Answer answer = Walk(*compiled, Tiny(), ChatFormat::kXtml, OpenChannel::kContent, 600);
        if (!answer.finished) continue;
        const Json value = Json::parse(tool ? answer.output.calls.at(0).arguments : answer.output.content);
        EXPECT_TRUE(Fits(tool ? value["x"] : value, schema, schema)) << schema << value;
        lengths.insert(value.dump().size());
      }
      EXPECT_GT(lengths.size(), 1u) << schema;
    }
  }
}

// What came to mean something else on the way to the library before.
TEST_F(AnswerGrammarTest, RewrittenSchemasStillHold) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"type":"object","properties":{"a":false,"b":{"enum":[1]}}})", R"(\{("b":1)?\})"},
      {R"({"type":"string","minLength":2.0,"maxLength":3e0})", R"(".{2,12}")"},
      {R"({"type":"integer","minimum":0.5,"exclusiveMaximum":3.5})", "[123]"},
      {R"({"type":"array","prefixItems":[{"const":1},false]})", R"(\[1?\])"},
      {R"({"type":"string","format":"date"})", R"("[0-9]{4}-[0-9]{2}-[0-9]{2}")"},
      {R"({"type":"string","format":"ipv6"})", R"("[0-9a-fA-F:.]{2,45}")"},
      {R"({"type":"string","pattern":"^.{3,200}$"})", R"("[^"]{3,200}")"},
      {R"({"type":"string","pattern":"^{a}(?P<n>b)$"})", R"("\{a\}b")"},
      {R"({"$ref":"#/$defs/a~1b","$defs":{"a/b":{"enum":["x"]}}})", R"("x")"},
      {R"({"type":"array","prefixItems":[{"const":2},{"$ref":"#/prefixItems/0"}],"minItems":2})", R"(\[2,2\])"},
      {R"({"type":"array","items":{"enum":[[1,2]]},"minItems":2,"maxItems":2})", R"(\[\[1,2\],\[1,2\]\])"},
  };
  for (const auto& [schema, expected] : cases) {
    GenerationRequest request = Chat(nullptr, ToolChoice::kAuto);
    Constrain(&request, RequestedConstraint::Kind::kJsonSchema, schema);
    const auto grammar = Build(request, *Tiny(), OpenChannel::kContent);
    ASSERT_TRUE(grammar.has_value()) << schema;
    const auto compiled = Compile(grammar->root, *Tiny());
    ASSERT_NE(compiled, nullptr) << schema;
    int finished = 0;
    for (int i = 0; i < 20; ++i) {
      const Answer answer = Walk(*compiled, Tiny(), ChatFormat::kXtml, OpenChannel::kContent, 600);
      if (!answer.finished) continue;
      ++finished;
      EXPECT_TRUE(std::regex_match(answer.output.content, std::regex(expected))) << schema << answer.output.content;
    }
    EXPECT_GT(finished, 0) << schema;
  }
}

// What a grammar lets through of a pattern is what fits it: in JSON and alone, which the library reads in two ways.
TEST_F(AnswerGrammarTest, PatternsMeanWhatTheySay) {
  std::mt19937 random(20261130);
  const auto below = [&](uint32_t n) { return random() % n; };
  std::function<std::string(int)> make = [&](int depth) -> std::string {
    std::string out;
    for (uint32_t parts = 1 + below(3); parts > 0; --parts) {
      static const char* const kAtoms[] = {"a", "b", "c", "[ab]", "[^a]", "\\w", "."};
      const bool group = depth < 2 && below(2) == 0;
      out += group
                 ? (below(2) == 0 ? "(" : "(?:") + make(depth + 1) + (below(3) == 0 ? "|" + make(depth + 1) : "") + ")"
                 : kAtoms[below(7)];
      static const char* const kRepeats[] = {"", "", "", "?", "*", "+", "{1,3}", "{0,2}", "{2,}", "??", "+?"};
      out += kRepeats[below(11)];
    }
    return out;
  };
  const auto engine = MakeGrammarEngine(*Tiny(), Tiny()->vocab_size(), Tiny()->stop_ids());
  // The state after a text, one character a token.
  const auto accepts = [&](const CompiledGrammar& grammar, const std::string& text, const std::string& end) {
    const auto constraint = grammar.NewConstraint();
    for (const char c : text) {
      if (!constraint->Accept(Tiny()->Encode(std::string(1, c)).value()[0])) return false;
    }
    if (!end.empty()) return constraint->Accept(Tiny()->Encode(end).value()[0]);
    return constraint->Accept(Tiny()->stop_ids()[0]);
  };
  int fitting = 0, checked = 0;
  for (int i = 0; i < 60; ++i) {
    const std::string pattern = "^(" + make(0) + ")$";
    const std::regex expected(pattern);
    GenerationRequest plain, json;
    Constrain(&plain, RequestedConstraint::Kind::kRegex, pattern);
    Constrain(&json, RequestedConstraint::Kind::kJsonSchema, Json({{"type", "string"}, {"pattern", pattern}}).dump());
    const auto format = DetectChatFormat(*Tiny());
    const auto plain_answer = BuildAnswerGrammar(plain, *Tiny(), format, nullptr);
    const auto json_answer = BuildAnswerGrammar(json, *Tiny(), format, nullptr);
    if (!plain_answer.ok() || !json_answer.ok()) continue;  // too many repetitions
    const auto alone = engine->Compile((*plain_answer)->root, std::chrono::minutes(5));
    const auto inside = engine->Compile((*json_answer)->root, std::chrono::minutes(5));
    if (!alone.ok() || !inside.ok()) continue;  // too ambiguous to be followed
    for (int k = 0; k < 25; ++k) {
      std::string text;
      for (uint32_t n = below(7); n > 0; --n) text += "abc"[below(3)];
      const bool fits = std::regex_match(text, expected);
      fitting += fits ? 1 : 0;
      ++checked;
      EXPECT_EQ(accepts(**alone, text, ""), fits) << pattern << " " << text;
      EXPECT_EQ(accepts(**inside, "\"" + text, "\""), fits) << pattern << " in JSON " << text;
    }
  }
  EXPECT_GT(fitting, 100);
  EXPECT_GT(checked, 800);
}

// No white space outside strings, whatever is inside.
TEST_F(AnswerGrammarTest, AnythingIsCompactToo) {
  GenerationRequest request = Chat(nullptr, ToolChoice::kAuto);
  Constrain(&request, RequestedConstraint::Kind::kJsonObject, "");
  const auto compiled = Compile(Build(request, *Tiny(), OpenChannel::kContent)->root, *Tiny());
  int commas = 0;
  for (int i = 0; i < 40; ++i) {
    const Answer answer = Walk(*compiled, Tiny(), ChatFormat::kXtml, OpenChannel::kContent, 300, "{\":[1,]}");
    if (!answer.finished) continue;
    const std::string& text = answer.output.content;
    EXPECT_EQ(text.find(' '), std::string::npos) << text;
    commas += static_cast<int>(std::count(text.begin(), text.end(), ','));
  }
  EXPECT_GT(commas, 20);
}

TEST_F(AnswerGrammarTest, ANamedToolIsTheOnlyOne) {
  const Json any = {{"type", "object"}};
  GenerationRequest request = Chat({Tool("one", any, false), Tool("two", any, false)}, ToolChoice::kNamed);
  std::get<ChatRequest>(request.input).options.tool_choice_name = "two";
  const auto grammar = Build(request, *Tiny(), OpenChannel::kReasoning);
  ASSERT_TRUE(grammar.has_value());
  EXPECT_TRUE(grammar->relaxed.has_value());
  const auto compiled = Compile(grammar->root, *Tiny());
  int finished = 0;
  for (int i = 0; i < 20; ++i) {
    const Answer answer = Walk(*compiled, Tiny(), ChatFormat::kXtml, OpenChannel::kReasoning);
    if (!answer.finished) continue;
    ++finished;
    ASSERT_FALSE(answer.output.calls.empty());
    for (const auto& call : answer.output.calls) {
      EXPECT_EQ(call.name, "two");
      EXPECT_TRUE(Json::accept(call.arguments)) << call.arguments;
    }
  }
  EXPECT_GT(finished, 5);
}

TEST_F(AnswerGrammarTest, WithToolsTheAnswerIsEitherTheFormatOrACall) {
  const Json schema = {{"type", "object"},
                       {"properties", {{"n", {{"type", "integer"}, {"maximum", 9}, {"minimum", 0}}}}},
                       {"required", {"n"}}};
  GenerationRequest request = Chat(Json::array({Tool("f", schema)}), ToolChoice::kAuto);
  Constrain(&request, RequestedConstraint::Kind::kJsonSchema, schema.dump());
  const auto grammar = Build(request, *Tiny(), OpenChannel::kContent);
  const auto compiled = Compile(grammar->root, *Tiny());
  int with_content = 0, with_calls = 0;
  for (int i = 0; i < 40; ++i) {
    const Answer answer = Walk(*compiled, Tiny(), ChatFormat::kXtml, OpenChannel::kContent);
    if (!answer.finished) continue;
    if (answer.output.content.empty()) {
      EXPECT_FALSE(answer.output.calls.empty());
    } else {
      ++with_content;
      EXPECT_TRUE(Fits(Json::parse(answer.output.content), schema, schema));
    }
    if (!answer.output.calls.empty()) ++with_calls;
  }
  EXPECT_GT(with_content, 3);
  EXPECT_GT(with_calls, 3);
}

TEST_F(AnswerGrammarTest, ForbiddenToolsLeaveNoWayToACall) {
  GenerationRequest request = Chat(Json::array({Tool("f", {{"type", "object"}})}), ToolChoice::kNone);
  const auto grammar = Build(request, *Tiny(), OpenChannel::kContent);
  ASSERT_TRUE(grammar.has_value());
  const auto compiled = Compile(grammar->root, *Tiny());
  for (int i = 0; i < 20; ++i) {
    const Answer answer = Walk(*compiled, Tiny(), ChatFormat::kXtml, OpenChannel::kContent);
    EXPECT_TRUE(answer.output.calls.empty()) << answer.text;
    EXPECT_EQ(answer.text.find("<|open|>"), std::string::npos) << answer.text;
  }
}

// Each level doubles the ways through the references below it.
TEST_F(AnswerGrammarTest, ParametersThatGrowWithoutBoundAreRefused) {
  Json schema = {{"type", "object"}, {"properties", {{"a", {{"$ref", "#/$defs/n0"}}}}}, {"$defs", Json::object()}};
  for (int i = 0; i < 28; ++i) {
    const Json next = {{"$ref", "#/$defs/n" + std::to_string(i + 1)}};
    schema["$defs"]["n" + std::to_string(i)] = {{"anyOf", Json::array({next, next})}};
  }
  schema["$defs"]["n28"] = {{"type", "integer"}};
  ChatPrompt prompt;
  prompt.open_channel = OpenChannel::kContent;
  const auto strict = BuildAnswerGrammar(Chat(Json::array({Tool("f", schema)}), ToolChoice::kAuto), *Tiny(),
                                         ChatFormat::kXtml, &prompt);
  EXPECT_EQ(FieldErrorPath(strict.status()), "tools[0].function.parameters") << strict.status();
  EXPECT_TRUE(BuildAnswerGrammar(Chat(Json::array({Tool("f", schema, false)}), ToolChoice::kRequired), *Tiny(),
                                 ChatFormat::kXtml, &prompt)
                  .ok());
}

TEST_F(AnswerGrammarTest, NothingIsBuiltWhereAnythingGoes) {
  EXPECT_FALSE(Build(Chat(nullptr, ToolChoice::kAuto), *Tiny(), OpenChannel::kReasoning).has_value());
  EXPECT_FALSE(Build(Chat(Json::array({Tool("f", {{"type", "object"}}, false)}), ToolChoice::kAuto), *Tiny(),
                     OpenChannel::kReasoning)
                   .has_value());
  EXPECT_FALSE(Build(Chat(nullptr, ToolChoice::kNone), *Tiny(), OpenChannel::kReasoning).has_value());
}

TEST_F(AnswerGrammarTest, RawAnswersFollowPatternsAndGrammars) {
  using Kind = RequestedConstraint::Kind;
  const std::tuple<Kind, const char*, const char*> cases[] = {
      {Kind::kRegex, "[a-c]{2}-(x|yy)", "^[a-c]{2}-(x|yy)$"},
      {Kind::kEbnf, "root ::= \"<\" [0-9]{1,3} \">\" tail?\ntail ::= \"\\u00e9\"", "^<[0-9]{1,3}>(\xc3\xa9)?$"},
      {Kind::kStructuralTag,
       R"({"type":"structural_tag","format":{"type":"sequence","elements":[{"type":"const_string","value":"A"},
           {"type":"regex","pattern":"[0-9]"}]}})",
       "^A[0-9]$"},
      {Kind::kJsonObject, "", R"(^\{[^\n\t]*\}$)"},
  };
  for (const auto& [kind, text, expected] : cases) {
    GenerationRequest request;
    request.input = std::vector<uint32_t>{1};
    Constrain(&request, kind, text);
    const auto grammar = BuildAnswerGrammar(request, *Tiny(), ChatFormat::kXtml, nullptr).value();
    const auto compiled = Compile(grammar->root, *Tiny());
    ASSERT_NE(compiled, nullptr) << text;
    int finished = 0;
    for (int i = 0; i < 10; ++i) {
      Answer answer = Walk(*compiled, Tiny(), ChatFormat::kNone, OpenChannel::kNone);
      if (!answer.finished) continue;
      ++finished;
      EXPECT_TRUE(std::regex_match(answer.output.content, std::regex(expected))) << answer.output.content;
    }
    EXPECT_GT(finished, 2) << text;
  }
}

// ignore_eos: the constrained text is complete, and whatever follows adds nothing to it.
TEST_F(AnswerGrammarTest, AfterTheEndOnlyEndsFollow) {
  const auto compiled = Compile(GrammarNode::Literal("ok"), *Tiny());
  const auto constraint = compiled->NewConstraint();
  const std::vector<int32_t> ids = Tiny()->Encode("ok").value();
  for (const int32_t id : ids) ASSERT_TRUE(constraint->Accept(id));
  const int32_t stop = Tiny()->stop_ids()[0];
  std::vector<uint32_t> mask(static_cast<size_t>(Tiny()->vocab_size() + 64 + 31) / 32);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(constraint->FillMask(mask));
    for (int32_t id = 0; id < Tiny()->vocab_size(); ++id) {
      const auto& stops = Tiny()->stop_ids();
      EXPECT_EQ(mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1,
                std::find(stops.begin(), stops.end(), id) != stops.end() ? 1u : 0u);
    }
    ASSERT_TRUE(constraint->Accept(stop));
  }
  EXPECT_FALSE(constraint->Accept(0));
}

TEST_F(AnswerGrammarTest, ContinuesTextThatThePromptHolds) {
  const Json schema = {{"type", "object"}, {"properties", {{"n", {{"type", "boolean"}}}}}, {"required", {"n"}}};
  GenerationRequest request = Chat(nullptr, ToolChoice::kAuto);
  Constrain(&request, RequestedConstraint::Kind::kJsonSchema, schema.dump());
  auto& messages = std::get<ChatRequest>(request.input).messages;
  messages.emplace_back();
  messages.back().role = "assistant";
  messages.back().content = ChatContent::Text("{\"n\":t");
  messages.back().partial = true;
  const auto grammar = Build(request, *Tiny(), OpenChannel::kContent);
  ASSERT_TRUE(grammar.has_value());
  EXPECT_EQ(grammar->begun, "{\"n\":t");
  const auto compiled = Compile(grammar->root, *Tiny());
  EXPECT_EQ(compiled->NewConstraint("{\"m"), nullptr);
  const auto constraint = compiled->NewConstraint(grammar->begun);
  ASSERT_NE(constraint, nullptr);
  const std::vector<int32_t> rest = Tiny()->Encode("rue}").value();
  const auto fork = constraint->Fork();
  for (const int32_t id : rest) EXPECT_TRUE(fork->Accept(id));
  for (const int32_t id : rest) EXPECT_TRUE(constraint->Accept(id));
}

TEST_F(AnswerGrammarTest, AForkBeginsAgain) {
  const auto compiled = Compile(GrammarNode::Literal("ab"), *Tiny());
  const auto constraint = compiled->NewConstraint();
  const std::vector<int32_t> ids = Tiny()->Encode("ab").value();
  ASSERT_TRUE(constraint->Accept(ids[0]));
  const auto fork = constraint->Fork();
  for (const int32_t id : ids) EXPECT_TRUE(fork->Accept(id));
}

TEST_F(AnswerGrammarTest, WhatDoesNotCompileIsAnError) {
  const auto engine = MakeGrammarEngine(*Tiny(), Tiny()->vocab_size(), Tiny()->stop_ids());
  using Kind = GrammarNode::Kind;
  for (const GrammarNode& node :
       {GrammarNode::Of(Kind::kRegex, "(a"), GrammarNode::Of(Kind::kRegex, "a{2"), GrammarNode::Of(Kind::kEbnf, "x"),
        GrammarNode::Of(Kind::kEbnf, "root ::= other"), GrammarNode::Of(Kind::kEbnf, ""),
        GrammarNode::Of(Kind::kEbnf, "root ::= root"), GrammarNode::Of(Kind::kStructuralTag, "{}"),
        GrammarNode::Of(Kind::kStructuralTag, R"({"format":{"type":"nothing"}})"),
        GrammarNode::JsonSchema(R"({"type":"integer","minimum":5,"maximum":4})", true)}) {
    const auto compiled = engine->Compile(node, std::chrono::minutes(5));
    EXPECT_EQ(compiled.status().code(), absl::StatusCode::kInvalidArgument) << node.text;
    EXPECT_THAT(std::string(compiled.status().message()), ::testing::Not(::testing::HasSubstr(".cc"))) << node.text;
  }
}

}  // namespace
}  // namespace k3
