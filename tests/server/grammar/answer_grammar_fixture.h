#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>

#include "server/grammar/answer_grammar.h"
#include "server/grammar/grammar_engine.h"
#include "server/text/json_parser.h"
#include "server/text/output_parser.h"
#include "tests/testing/k2_tokenizer.h"
#include "tests/testing/paths.h"
#include "tests/testing/schema_fit.h"

namespace k3 {

class AnswerGrammarTest : public ::testing::Test {
 protected:
  struct Answer {
    bool finished = false;  // by a stop token
    ParsedOutput output;
    std::string text;
  };

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

  static GenerationRequest Chat(const testing::Json& tools, ToolChoice choice) {
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
  static testing::Json Tool(const std::string& name, const testing::Json& parameters, bool strict = true) {
    return {{"type", "function"}, {"function", {{"name", name}, {"parameters", parameters}, {"strict", strict}}}};
  }
  static void Constrain(GenerationRequest* request, RequestedConstraint::Kind kind, const std::string& text) {
    request->constraint.kind = kind;
    request->constraint.text = text;
  }

  // An answer of this schema, or one call with it as argument x.
  static GenerationRequest AskFor(const testing::Json& schema, bool as_argument) {
    const testing::Json parameters = {{"type", "object"}, {"properties", {{"x", schema}}}, {"required", {"x"}}};
    GenerationRequest request = as_argument ? Chat(testing::Json::array({Tool("f", parameters)}), ToolChoice::kRequired)
                                            : Chat(nullptr, ToolChoice::kAuto);
    request.parallel_tool_calls = false;
    if (!as_argument) Constrain(&request, RequestedConstraint::Kind::kJsonSchema, schema.dump());
    return request;
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
              OpenChannel open, int limit = 400, std::string_view favourites = "");

 private:
  std::mt19937 random_{20261129};
};

}  // namespace k3
