#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/grammar/json_names.h"
#include "server/grammar/length_limits.h"
#include "xgrammar/xgrammar.h"

namespace k3 {

// Control tokens take part by id only: in the vocabulary they begin with a byte that no text has.
inline constexpr char kControlByte = '\xff';

// A grammar with the strings that are counted beside it.
struct AnswerRules {
  AnswerRules(xgrammar::CompiledGrammar grammar_in, std::vector<int32_t> stop_ids_in,
              std::shared_ptr<const TokenLengths> lengths_in, std::shared_ptr<const NameTokens> names_in);

  size_t mask_words() const { return (static_cast<size_t>(tokens.GetVocabSize()) + 31) / 32; }

  xgrammar::CompiledGrammar grammar;
  std::vector<int32_t> stop_ids;
  std::shared_ptr<const TokenLengths> lengths;
  std::shared_ptr<const NameTokens> names;  // null where no object has free names
  xgrammar::TokenizerInfo tokens;
  const std::vector<std::string>& words;           // of `tokens`, control tokens with their first byte
  std::vector<std::optional<LengthLimit>> limits;  // per rule
  bool any = false;
  bool json = false;
  std::vector<uint32_t> crossing;  // where there are any in JSON: the tokens that may be chosen at all
};

// Where one answer stands in its grammar. Not thread-safe.
class AnswerState {
 public:
  // `begun` is the answer's first text, which the prompt holds already.
  AnswerState(std::shared_ptr<const AnswerRules> rules, const std::string& begun);

  bool fits() const { return fits_; }          // `begun` does
  bool given_up() const { return given_up_; }  // a step took too long
  bool over() const { return matcher_.IsTerminated(); }

  // As TokenConstraint's.
  bool FillMask(std::span<uint32_t> mask);
  bool Accept(int32_t token);

 private:
  bool FillNow(std::span<uint32_t> mask);
  bool AcceptNow(int32_t token);
  void Spend(double begin);
  // The limit of the string that the answer is in, and the characters that it has. Of several ways to read the answer
  // the strictest: what it leaves fits all of them, and SeparateStrings sees to it that something is left.
  std::pair<std::optional<LengthLimit>, int32_t> Limit();

  const std::shared_ptr<const AnswerRules> rules_;
  std::string text_;  // accepted so far, without control tokens; only where strings are counted
  JsonNames names_;
  xgrammar::GrammarMatcher matcher_;
  bool fits_;
  bool given_up_ = false;
  double spent_ = 0;  // seconds above the usual, lately
};

}  // namespace k3
