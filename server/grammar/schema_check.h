#pragma once

#include <string>

#include "absl/status/status.h"
#include "server/text/json_value.h"

namespace k3 {

// Whether a JSON schema can be enforced, before anything expensive looks at it: sizes, bounds and nesting within
// limits, references that lead somewhere, and a finite value that fits. A FieldError whose path begins with `path`,
// e.g. tools[0].function.parameters.properties.size.
//
// `strict`: also refuses keywords that no grammar enforces here (not, if, uniqueItems, ...), so that an answer is never
// called valid when it may not be. Without it such keywords are ignored.
absl::Status CheckSchema(const JsonValue& schema, const std::string& path, bool strict);

}  // namespace k3
