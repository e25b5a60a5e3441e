#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/text/tokenizer.h"

namespace k3 {

// A string whose characters are counted beside the grammar: in a grammar each count would be a state of its own, whose
// masks take seconds to prepare and milliseconds to fill. The grammar holds the string without its limits, in a rule
// with this name; the masks are narrowed afterwards.
struct LengthLimit {
  int32_t least = 0;
  int32_t most = -1;  // -1: no limit
  bool json = true;   // ends with a quote; else with a control token

  std::string RuleName() const;
  // A grammar of its own for a text of such a length; `characters` is the class of what it may hold, as [^\\n].
  std::string Grammar(std::string_view characters) const;
  // Also of a name that the grammar library has lengthened. Nullopt for any other rule.
  static std::optional<LengthLimit> FromRuleName(std::string_view name);
};

// How many characters each token adds to such a string. Made once for a vocabulary; immutable.
class TokenLengths {
 public:
  TokenLengths(const Tokenizer& tokenizer, int32_t vocab_size);

  // Takes out of `mask` what would make a string of `length` characters too long, or end it too early.
  void Narrow(const LengthLimit& limit, int32_t length, std::span<uint32_t> mask) const;
  bool Fits(const LengthLimit& limit, int32_t length, int32_t token) const;

  // Tokens that may stand anywhere in an answer whose JSON strings have these limits: no token both opens a string and
  // fills it beyond the shortest of its maxima, nor both opens and closes one with fewer characters than the largest of
  // its minima.
  std::vector<uint32_t> Crossing(int32_t smallest_most, int32_t largest_least) const;

 private:
  struct Lengths {
    int32_t first = 0;    // characters before the first quote, or all
    int32_t all = 0;      // characters
    int32_t opened = 0;   // the longest run of characters after a quote
    int32_t closed = -1;  // the shortest run between two quotes; -1: there are no two
    bool quote = false;
    bool control = false;
  };
  using Bits = std::vector<uint32_t>;

  int32_t vocab_size_;
  std::vector<Lengths> lengths_;
  int32_t longest_ = 0;
  // Per number of characters up to longest_: tokens that add at most so many, in JSON and in text.
  std::vector<Bits> json_up_to_;
  std::vector<Bits> text_up_to_;
  // Tokens that end a JSON string after fewer characters; all that end one for longest_ + 1.
  std::vector<Bits> ends_before_;
  Bits controls_;
};

// Characters, counting those that begin in `bytes`.
int32_t CountCharacters(std::string_view bytes);

}  // namespace k3
