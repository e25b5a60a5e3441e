#include "server/grammar/grammar_node.h"

#include "absl/strings/str_cat.h"

namespace k3 {

void GrammarNode::AppendKey(std::string* key) const {
  absl::StrAppend(key, static_cast<int>(kind), compact ? "c" : "-", text.size(), ":", text, ids.size(), "[");
  for (const int32_t id : ids) absl::StrAppend(key, id, ",");
  absl::StrAppend(key, "]", children.size(), "(");
  for (const GrammarNode& child : children) child.AppendKey(key);
  key->push_back(')');
}

}  // namespace k3
