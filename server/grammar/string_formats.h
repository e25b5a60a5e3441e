#pragma once

#include <string>
#include <string_view>

namespace k3 {

// The pattern of a string format as narrow as its name: dates that a calendar has, addresses without leading zeros.
// Null for unknown formats, which say nothing.
const std::string* FormatPattern(std::string_view format);

}  // namespace k3
