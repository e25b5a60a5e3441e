#pragma once

#include "server/grammar/grammar_node.h"
#include "server/text/json_value.h"

namespace k3 {

// A grammar in the library's own language of structural tags: the "format" of one. Throws std::exception where a
// schema, pattern or grammar is wrong.
JsonValue ToXgrammarFormat(const GrammarNode& node);

}  // namespace k3
