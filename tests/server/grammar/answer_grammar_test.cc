#include "server/grammar/answer_grammar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "server/text/field_error.h"
#include "tests/server/grammar/answer_grammar_fixture.h"
#include "tests/testing/schema_fit.h"

// Which grammar a request's tools, tool choice and constraint add up to.
namespace k3 {
namespace {

using testing::Fits;
using testing::Json;

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

}  // namespace
}  // namespace k3
