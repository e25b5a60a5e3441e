#pragma once

#include <string>

#include "server/text/json_value.h"

namespace k3 {

// What a local reference such as "#/$defs/node" names in `root`; null when there is no such place.
const JsonValue* ResolveSchemaReference(const JsonValue& root, const std::string& reference);

// Where the references of `schema`, each naming the next, lead in `root`. After 32 of them, or at one that leads
// nowhere, that place, which still has a $ref.
const JsonValue& FollowSchemaReferences(const JsonValue& root, const JsonValue& schema);

}  // namespace k3
