#pragma once

#include <cstddef>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/text/json_value.h"

namespace k3 {

struct JsonParseOptions {
  // Nested arrays and objects beyond this are refused before anything recursive sees them.
  int max_depth = 128;
  // Values in all, so that a text of two-byte values cannot take fifty times its size.
  size_t max_values = 2'500'000;
  // What Python's json.loads lets through: NaN and infinities, and half a surrogate pair in an escape, which becomes
  // U+FFFD as it does on its way into the tokenizer. Otherwise both are errors.
  bool python = false;
};

// Parses one JSON text. A key that occurs twice keeps its first place and its last value, as in Python. The error is a
// FieldError whose path is that of the member being read (empty for the outermost) and whose text tells the byte
// offset.
absl::StatusOr<JsonValue> ParseJson(std::string_view text, const JsonParseOptions& options = {});

}  // namespace k3
