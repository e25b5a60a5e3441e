#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/text/tokenizer.h"

namespace k3 {

// The tokens that can end a name. Made once for a vocabulary; immutable.
class NameTokens {
 public:
  NameTokens(const Tokenizer& tokenizer, int32_t vocab_size);

  struct Token {
    int32_t id;
    std::string bytes;
  };

  // Those with this text before their first quotation mark; null when there are none.
  const std::vector<int32_t>* EndingWith(const std::string& text) const;
  // Those with at least two, or three, quotation marks.
  const std::vector<Token>& two() const { return two_; }
  const std::vector<Token>& three() const { return three_; }

 private:
  std::unordered_map<std::string, std::vector<int32_t>> ending_;
  std::vector<Token> two_, three_;
};

// Keeps a JSON object from naming a member twice, which a grammar cannot: follows the text of an answer from where its
// JSON begins and takes the tokens out of a mask that would complete a name for the second time. Names are compared as
// they are written; the grammar lets free names have no escapes. Likewise for the keys of K3's argument elements.
class JsonNames {
 public:
  // Text that was accepted.
  void Append(std::string_view bytes);
  // A control token: what comes is JSON from its beginning, or no JSON, or a tag when `opens_tag`.
  void Begin(bool opens_tag);

  // Whether the bytes would complete a name that is there already.
  bool Repeats(std::string_view bytes) const;
  // Leaves the mask alone where nothing else is allowed, so that there is always a way on.
  void Narrow(const NameTokens& tokens, std::span<uint32_t> mask) const;

 private:
  enum class Mode : uint8_t {
    kValue,  // one must come
    kScalar,
    kString,
    kStringEscape,
    kAfter,  // a value
    kNameOrEnd,
    kName,  // one must come
    kInName,
    kInNameEscape,
    kColon,
    kTag,    // after the token that opens one
    kInKey,  // of an argument element
    kOther,  // no JSON
  };
  // Where the text stands, without the names.
  struct Place {
    Mode mode = Mode::kValue;
    std::string open;  // '{' and '['
    std::string name;  // the bytes of the one that is being written; of a tag
  };
  // Names that the text adds, by the depth of their object; 0 for elements. What is as deep as `floor` or deeper in the
  // base has been closed.
  struct Added {
    std::vector<std::pair<size_t, std::string>> names;
    size_t floor = SIZE_MAX;
    bool elements_cleared = false;
    bool repeats = false;
  };

  void Step(char c, Place* place, Added* added) const;
  void AddName(size_t depth, Place* place, Added* added) const;
  bool IsUsed(size_t depth, const std::string& name, const Added& added) const;
  bool AnyNames() const;

  Place place_;
  std::vector<std::set<std::string>> names_ = std::vector<std::set<std::string>>(1);  // by depth; 0: elements
};

}  // namespace k3
