#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "server/text/json_value.h"

namespace k3 {

// A schema that CheckSchema passed, in words that the grammar library follows, with the same meaning or a narrower one:
// references are plain, bounds are whole numbers of 64 bits, members that must not be there are gone, those that are
// required but not declared are declared, lists and objects of anything say so, formats are patterns or lengths.
//
// Without `strict` what cannot be enforced is left out. With it a FieldError at `path` or below remains possible:
// strings at the same place of an answer whose lengths exclude one another.
absl::StatusOr<JsonValue> EnforceableSchema(const JsonValue& schema, const std::string& path, bool strict);

}  // namespace k3
