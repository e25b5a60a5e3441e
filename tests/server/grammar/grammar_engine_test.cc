#include "server/grammar/grammar_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <random>
#include <regex>
#include <string>
#include <vector>

#include "tests/server/grammar/answer_grammar_fixture.h"

namespace k3 {
namespace {

using testing::Json;

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
