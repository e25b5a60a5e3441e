#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace k3 {

// Whether a regular expression is one, with length and repetition within limits. `strict`: also whether it can be
// enforced: no assertions about the text around, no anchors in the middle, no references to groups, no classes of
// Unicode, no long counts of any character. A FieldError at `path` otherwise.
absl::Status CheckPattern(const std::string& pattern, const std::string& path, bool strict);

// Whether a pattern can be enforced inside a JSON string, where the library matches the text as it is written: a
// character that JSON writes with an escape (quotation mark, backslash, below U+0020) can not stand there for itself. A
// class may hold some beside others; the library leaves them out. A FieldError at `path` otherwise.
absl::Status CheckPatternInString(const std::string& pattern, const std::string& path);

// A pattern that only counts characters, as ^.{1,200}$: it is followed as a string of that length, however long.
struct CharacterCount {
  int32_t least = 0;
  int32_t most = -1;  // -1: no limit
};
std::optional<CharacterCount> AnyCharacters(const std::string& pattern);

// The same pattern as the grammar library reads it, in printable ASCII: other characters are escaped by number, braces
// that repeat nothing are escaped, named groups are written (?<name>, optional ones {0,1}: behind ? it would let the
// rest of a group pass that ends in a repetition.
std::string AsciiPattern(const std::string& pattern);

}  // namespace k3
