#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <regex>
#include <set>
#include <string>
#include <utility>

#include "tests/server/grammar/answer_grammar_fixture.h"
#include "tests/testing/schema_fit.h"

// Every answer to a schema that a grammar lets through, however improbable, reads back as what was asked for.
namespace k3 {
namespace {

using testing::ExpectFits;
using testing::Fits;
using testing::Json;
using testing::NamesTwice;

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
      const auto grammar = Build(AskFor(schema, tool), *Tiny(), OpenChannel::kContent);
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
      const auto grammar = Build(AskFor(schema, tool), *Tiny(), OpenChannel::kContent);
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

}  // namespace
}  // namespace k3
