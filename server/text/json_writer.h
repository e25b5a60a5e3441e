#pragma once

#include <string>
#include <string_view>

#include "server/text/json_value.h"

namespace k3 {

// How Python's json.dumps(ensure_ascii=False) prints, which is what the chat formats are defined by.
struct JsonStyle {
  bool spaces = false;             // ", " and ": " (Python's default) instead of "," and ":"
  bool sort_keys = false;          // in all depths, by code point
  bool number_as_written = false;  // keep 1e3 instead of printing what Python makes of it, 1000.0
};

std::string WriteJson(const JsonValue& value, const JsonStyle& style);

// Appends the inside of a JSON string, without its quotes. Escapes the quote, the backslash and control characters,
// nothing else. `text` may be a piece of a longer string, cut anywhere.
void AppendJsonEscaped(std::string_view text, std::string* out);

// repr(float): the shortest digits that give the value back; 1e+16 and 1e-05 where Python changes to exponents.
std::string PythonFloat(double value);

}  // namespace k3
