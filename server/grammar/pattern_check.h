#pragma once

#include <string>

#include "absl/status/status.h"

namespace k3 {

// Whether a regular expression can be enforced: length and repetition within limits. `strict`: also that nothing in it
// is ignored by the grammar library (assertions about what follows, anchors in the middle, escapes that it does not
// know). A FieldError at `path` otherwise. Whether it is well formed the library says later.
absl::Status CheckPattern(const std::string& pattern, const std::string& path, bool strict);

// Whether a pattern can be enforced inside a JSON string, where the library matches the text as it is written: a
// character that JSON writes with an escape (quotation mark, backslash, below U+0020) can not stand there for itself. A
// class may hold some beside others; the library leaves them out. A FieldError at `path` otherwise.
absl::Status CheckPatternInString(const std::string& pattern, const std::string& path);

// The same pattern in printable ASCII: other characters are escaped by number.
std::string AsciiPattern(const std::string& pattern);

}  // namespace k3
