#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace k3 {

// INVALID_ARGUMENT about one field of a request: the message is "PATH: WHAT" with a path such as
// messages[3].tool_calls[0].function.arguments, which also travels by itself, so that a front end can put it in its own
// place (an OpenAI error's param, a google.rpc.BadRequest's field).
absl::Status FieldError(std::string_view path, std::string_view what);

// The path of a FieldError; empty for any other status.
std::string FieldErrorPath(const absl::Status& status);

}  // namespace k3
