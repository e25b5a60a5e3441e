#pragma once

#include <string>

#include "absl/status/status.h"
#include "server/text/json_value.h"

namespace k3 {

// Refuses a schema whose own bounds (lengths, numbers, counts of members and items) leave no value, as a FieldError
// with the keyword's path. What the bounds themselves look like has been checked before.
absl::Status CheckSchemaBounds(const JsonValue& schema, const std::string& path);

}  // namespace k3
