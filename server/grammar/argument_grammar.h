#pragma once

#include <cstdint>

#include "server/grammar/grammar_node.h"
#include "server/text/json_value.h"

namespace k3 {

// The control tokens of K3's markup.
struct XtmlTokens {
  int32_t open;
  int32_t close;
  int32_t separator;
};

// <|open|>TAG ATTRIBUTES<|sep|> and <|close|>TAG<|sep|>.
GrammarNode XtmlOpen(const XtmlTokens& tokens, const std::string& tag_and_attributes);
GrammarNode XtmlClose(const XtmlTokens& tokens, const std::string& tag);

// The arguments of a K3 tool call, one element each, as the schema of its parameters says: declared properties in their
// order, those not required may be missing, others only where the schema allows them by itself. Strings are raw text,
// all else is JSON. `parameters` is null for a tool that declares none: then anything goes. Of a schema that
// CheckSchema passed.
// Only of parameters for which XtmlArgumentsFit.
GrammarNode XtmlArguments(const XtmlTokens& tokens, const JsonValue& parameters);

// Whether the arguments' grammar stays within a few megabytes. References make it grow faster than its schema: each
// value is written with all that it may refer to, and each way through a choice of references is one.
bool XtmlArgumentsFit(const JsonValue& parameters);

}  // namespace k3
