#pragma once

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "server/text/json_value.h"

namespace k3 {

// Strings are counted beside the grammar (LengthLimit), which cannot tell which of several alternatives an answer is
// in: the narrowest limit holds for all of them. Where that would keep other strings out that fit, short limits are
// written into the grammar instead, as a pattern; where no length would be left the schema is refused at `path` or
// below, or without `strict` loses the limits.
absl::Status SeparateStrings(JsonValue* root, const std::string& path, bool strict);

// The lengths of a string whose limit has been written out, the greatest -1 for none. For where it is no JSON.
std::optional<std::pair<int, int>> WrittenLimit(const JsonValue& schema);

}  // namespace k3
