#pragma once

#include <string>
#include <string_view>

#include "server/text/json_value.h"

namespace k3 {

// The parts of K3's markup that the renderer writes and the grammar of an answer repeats.

// A value between the quotes of an attribute.
std::string XtmlAttribute(std::string_view value);

// The word for an argument's type.
const char* XtmlType(const JsonValue& value);

}  // namespace k3
