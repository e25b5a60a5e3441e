#pragma once

#include <cstdint>
#include <string>
#include <string_view>

// Pieces of JSON for replies, appended to a buffer: replies are written once per token, so no tree is built.
namespace k3 {

// A JSON string with its quotes. Whatever `text` holds, the result is valid UTF-8 without control characters and
// without the characters at which some clients split lines (U+0085, U+2028, U+2029), so that an event stays one line.
void AppendJsonString(std::string_view text, std::string* out);
std::string JsonString(std::string_view text);

void AppendInteger(int64_t value, std::string* out);

// The shortest digits that give the float back. NaN and infinities have no place in JSON: NaN and -infinity become
// -9999, as clients expect of log-probabilities.
void AppendFloat(float value, std::string* out);

}  // namespace k3
