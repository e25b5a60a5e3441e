#include "server/grammar/grammar_node.h"

#include <algorithm>
#include <cctype>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

// Each repetition of a pattern is a state of its own, which costs as much as a kilobyte of schema.
constexpr double kBytesPerRepeat = 1024;

// A client's own grammar comes after all schemas of usual size.
constexpr double kForeignCost = 64 << 10;

// The numbers behind opening braces: what {m,n} repeat.
double Repeats(const std::string& text) {
  double total = 0;
  for (size_t i = text.find('{'); i != std::string::npos; i = text.find('{', i + 1)) {
    double number = 0, most = 0;
    for (size_t k = i + 1;
         k < text.size() && (std::isdigit(static_cast<unsigned char>(text[k])) != 0 || text[k] == ','); ++k) {
      number = text[k] == ',' ? 0 : number * 10 + (text[k] - '0');
      most = std::max(most, number);
    }
    total += most;
  }
  return total;
}

}  // namespace

double GrammarNode::Cost() const {
  if (foreign) return kForeignCost + 16 * static_cast<double>(text.size());
  double cost = static_cast<double>(text.size());
  if (kind == Kind::kJsonSchema || kind == Kind::kRegex) cost += kBytesPerRepeat * Repeats(text);
  if (kind == Kind::kRegex) cost += 15 * static_cast<double>(text.size());
  for (const GrammarNode& child : children) cost += child.Cost();
  return cost;
}

bool GrammarNode::HasForeign() const {
  return foreign || std::any_of(children.begin(), children.end(), [](const GrammarNode& c) { return c.HasForeign(); });
}

void GrammarNode::AppendKey(std::string* key) const {
  absl::StrAppend(key, static_cast<int>(kind), compact ? "c" : "-", text.size(), ":", text, ids.size(), "[");
  for (const int32_t id : ids) absl::StrAppend(key, id, ",");
  absl::StrAppend(key, "]", children.size(), "(");
  for (const GrammarNode& child : children) child.AppendKey(key);
  key->push_back(')');
}

}  // namespace k3
