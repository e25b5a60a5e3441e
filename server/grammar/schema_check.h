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

// What a local reference such as "#/$defs/node" names in `root`; null when there is no such place.
const JsonValue* ResolveSchemaReference(const JsonValue& root, const std::string& reference);

// Where the references of `schema`, each naming the next, lead in `root`. After 32 of them, or at one that leads
// nowhere, that place, which still has a $ref.
const JsonValue& FollowSchemaReferences(const JsonValue& root, const JsonValue& schema);

}  // namespace k3
