#pragma once

#include <string>

#include "absl/status/status.h"

namespace k3 {

// Whether a regular expression can be enforced: length and repetition within limits. `strict`: also that nothing in it
// is ignored by the grammar library (assertions about what follows, anchors in the middle, escapes that it does not
// know). A FieldError at `path` otherwise. Whether it is well formed the library says later.
absl::Status CheckPattern(const std::string& pattern, const std::string& path, bool strict);

// The same pattern in printable ASCII: other characters are escaped by number.
std::string AsciiPattern(const std::string& pattern);

}  // namespace k3
