#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace k3 {

// What an answer may look like: a tree over text and control tokens, independent of the library that compiles it.
// Text never matches a control token, whatever it spells.
struct GrammarNode {
  enum class Kind : uint8_t {
    kLiteral,        // `text`, exactly
    kText,           // any UTF-8 text, also none
    kToken,          // the control token ids[0]
    kAnyTokens,      // any tokens but `ids`, also none
    kJsonSchema,     // JSON that fits the schema `text`
    kRegex,          // all of it matches the pattern `text`
    kEbnf,           // the rule "root" of the grammar `text`
    kStructuralTag,  // a client's own tree, in the library's language
    kSequence,       // children in order
    kChoice,         // one of the children
    kOptional,       // children[0] or nothing
    kOneOrMore,      // children[0], repeated
  };

  Kind kind = Kind::kSequence;
  std::string text;
  std::vector<int32_t> ids;
  bool compact = false;  // kJsonSchema: no white space between the tokens of the JSON; else at most one character
  std::vector<GrammarNode> children;
  bool foreign = false;  // kEbnf, kStructuralTag: a client's own grammar, of which nothing is known

  static GrammarNode Literal(std::string text) { return {Kind::kLiteral, std::move(text), {}, false, {}, false}; }
  static GrammarNode Text() { return {Kind::kText, "", {}, false, {}, false}; }
  static GrammarNode Token(int32_t id) { return {Kind::kToken, "", {id}, false, {}, false}; }
  static GrammarNode AnyTokens(std::vector<int32_t> except) {
    return {Kind::kAnyTokens, "", std::move(except), false, {}, false};
  }
  static GrammarNode JsonSchema(std::string schema, bool compact) {
    return {Kind::kJsonSchema, std::move(schema), {}, compact, {}, false};
  }
  static GrammarNode Of(Kind kind, std::string text) { return {kind, std::move(text), {}, false, {}, false}; }
  static GrammarNode Sequence(std::vector<GrammarNode> children) {
    return {Kind::kSequence, "", {}, false, std::move(children), false};
  }
  static GrammarNode Choice(std::vector<GrammarNode> children) {
    return {Kind::kChoice, "", {}, false, std::move(children), false};
  }
  static GrammarNode Optional(GrammarNode child) { return {Kind::kOptional, "", {}, false, {std::move(child)}, false}; }
  static GrammarNode OneOrMore(GrammarNode child) {
    return {Kind::kOneOrMore, "", {}, false, {std::move(child)}, false};
  }

  static GrammarNode Foreign(Kind kind, std::string text) { return {kind, std::move(text), {}, false, {}, true}; }

  // About how much there is to compile, in bytes of a schema.
  double Cost() const;
  bool HasForeign() const;

  // Equal for equal trees and only for them.
  void AppendKey(std::string* key) const;
};

}  // namespace k3
