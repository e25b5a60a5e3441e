#pragma once

#include <string>
#include <string_view>

namespace k3 {

// The pattern of a string format as narrow as its name: dates that a calendar has, addresses without leading zeros.
// Null for formats that are left to the grammar library, and unknown ones.
const std::string* FormatPattern(std::string_view format);

// Whether a format is enforced in a JSON string, by its pattern or by the library.
bool IsKnownFormat(std::string_view format);

}  // namespace k3
