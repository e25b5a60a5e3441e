#pragma once

#include <string>

#include "absl/status/status.h"
#include "server/text/json_value.h"

namespace k3 {

// Whether all that `schema` says about a value is enforced by the grammar made from it: not by each keyword alone,
// which CheckSchema looks at, but by keywords beside one another. Of one schema inside `root`, not of the schemas
// inside it, except where they decide. A FieldError at `path` or one of its members otherwise.
absl::Status CheckEnforced(const JsonValue& root, const JsonValue& schema, const std::string& path);

// The same for the parameters of a tool, which are an object whatever their schema says. `elements`: each argument is
// an element of markup (K3), for which fewer keywords can be enforced than inside JSON.
absl::Status CheckArgumentsEnforced(const JsonValue& parameters, const std::string& path, bool elements);

}  // namespace k3
