#include "server/grammar/xgrammar_format.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/grammar/length_limits.h"
#include "server/text/json_parser.h"
#include "server/text/json_writer.h"
#include "xgrammar/xgrammar.h"

namespace k3 {
namespace {

JsonValue Format(const char* type) {
  JsonValue value = JsonValue::Object();
  value.Set("type", JsonValue::String(type));
  return value;
}

JsonValue Ids(const std::vector<int32_t>& ids) {
  JsonValue list = JsonValue::Array();
  for (const int32_t id : ids) list.items.push_back(JsonValue::Integer(id));
  return list;
}

JsonValue EbnfFormat(std::string ebnf) {
  JsonValue value = Format("grammar");
  value.Set("grammar", JsonValue::String(std::move(ebnf)));
  return value;
}

// Strings of limited length, printed as NAME_characters{LEAST, MOST}, are counted beside the grammar (LengthLimit):
// they refer to a rule of that name instead.
std::string CountStrings(const std::string& printed) {
  static constexpr std::string_view kSuffix = "_characters{";
  std::string out;
  std::set<std::string> rules;
  size_t begin = 0;
  while (true) {
    const size_t brace = printed.find(kSuffix, begin);
    if (brace == std::string::npos) break;
    size_t name = printed.find_last_of(" (\n", brace);
    name = name == std::string::npos ? 0 : name + 1;
    LengthLimit limit;
    int end = 0;
    const char* bounds = printed.c_str() + brace + kSuffix.size();
    if (std::sscanf(bounds, "%d, %d}%n", &limit.least, &limit.most, &end) != 2 || end == 0) {
      throw std::runtime_error("a string's limits cannot be read");
    }
    out.append(printed, begin, name - begin);
    out += limit.RuleName();
    rules.insert(limit.RuleName());
    begin = brace + kSuffix.size() + static_cast<size_t>(end);
  }
  out.append(printed, begin);
  for (const std::string& rule : rules) absl::StrAppend(&out, rule, R"( ::= Regex("[^\"\\\\\\x00-\\x1f]*"))", "\n");
  return out;
}

// Free names are written without escapes, so that those that are equal look equal, to the grammar and to JsonNames.
void KeepNamesPlain(std::string* grammar) {
  static constexpr std::string_view kString = "basic_string";
  std::string out;
  bool used = false;
  for (size_t line = 0; line < grammar->size();) {
    const size_t end = std::min(grammar->find('\n', line), grammar->size() - 1) + 1;
    const std::string_view text = std::string_view(*grammar).substr(line, end - line);
    const bool further = text.substr(0, text.find(" ::= ")).find("_addl_key") != std::string_view::npos;
    size_t from = 0;
    for (size_t at = text.find(kString); at != std::string_view::npos; at = text.find(kString, from)) {
      out += text.substr(from, at - from);
      from = at + kString.size();
      const bool whole = at > 0 && (text[at - 1] == ' ' || text[at - 1] == '(');
      std::string_view behind = text.substr(from);
      if (further && whole && behind.starts_with("_sub ")) {
        out += "k3serve_name_sub";
        from += 4;
        used = true;
        continue;
      }
      if (further && whole && behind.starts_with("_sub)")) {
        out += "k3serve_name_sub";
        from += 4;
        used = true;
        continue;
      }
      // A name is followed by a colon, perhaps with a rule for white space between.
      bool name = whole && behind.starts_with(' ');
      if (name) {
        behind.remove_prefix(1);
        const size_t word = behind.find(' ');
        name = behind.starts_with("\":\"") ||
               (word != std::string_view::npos && behind[0] != '"' && behind.substr(word + 1).starts_with("\":\""));
      }
      out += name ? "k3serve_name" : kString;
      used = used || name;
    }
    out += text.substr(from);
    line = end;
  }
  if (used) {
    out +=
        "k3serve_name ::= \"\\\"\" k3serve_name_sub\n"
        "k3serve_name_sub ::= ((\"\\\"\") | ([^\\0-\\u001f\\\"\\\\] k3serve_name_sub)) (=([ \\n\\r\\t]* \":\"))\n";
  }
  *grammar = std::move(out);
}

// A grammar's printed form, made fit to be read again: it writes code points up to 255 as \xHH, but reads as many hex
// digits as follow. And names of further properties may be written with escapes, which makes them equal to declared
// ones. `compact`: the lists and objects of anything have white space of their own, whatever was asked for.
std::string Reprint(const std::string& printed, bool compact) {
  std::string out;
  out.reserve(printed.size() + printed.size() / 8);
  for (size_t i = 0; i < printed.size(); ++i) {
    out.push_back(printed[i]);
    if (printed[i] != '\\' || i + 1 == printed.size()) continue;
    ++i;
    if (printed[i] == 'x') {
      out.append("u00");
    } else {
      out.push_back(printed[i]);
    }
  }
  // In the rules that name further properties, until the name has left those of the declared ones.
  static constexpr std::string_view kEscape = R"( | ("\\" basic_escape basic_string_sub))";
  for (size_t line = 0; line < out.size();) {
    size_t end = std::min(out.find('\n', line), out.size());
    const size_t body = out.find(" ::= ", line);
    if (body < end && out.substr(line, body - line).find("_addl_key") != std::string::npos) {
      for (size_t at = out.find(kEscape, body); at < end; at = out.find(kEscape, at)) {
        out.erase(at, kEscape.size());
        end -= kEscape.size();
      }
    }
    line = end + 1;
  }
  KeepNamesPlain(&out);
  for (const char* rule : {"basic_array_items ::= ((", "basic_object_properties ::= (("}) {
    const size_t at = out.find(absl::StrCat(rule, "\", \""));
    if (compact && at != std::string::npos) out.erase(at + std::string_view(rule).size() + 2, 1);
  }
  return CountStrings(out);
}

// The tree inside a client's document: {"format": ...}, or the older form of begins and triggers.
JsonValue ClientFormat(const std::string& text) {
  absl::StatusOr<JsonValue> tag = ParseJson(text, {.max_depth = 64});
  if (!tag.ok()) throw std::runtime_error(std::string(tag.status().message()));
  if (const JsonValue* format = tag->Find("format")) return *format;
  const JsonValue* structures = tag->Find("structures");
  const JsonValue* triggers = tag->Find("triggers");
  if (structures == nullptr || !structures->is_array() || triggers == nullptr) {
    throw std::runtime_error("a structural tag needs a format, or structures and triggers");
  }
  JsonValue tags = JsonValue::Array();
  for (const JsonValue& structure : structures->items) {
    JsonValue schema = Format("json_schema");
    JsonValue item = Format("tag");
    for (const char* key : {"begin", "end", "schema"}) {
      const JsonValue* member = structure.Find(key);
      if (member == nullptr) throw std::runtime_error(absl::StrCat("a structure needs a member ", key));
      if (key == std::string_view("schema")) {
        schema.Set("json_schema", *member);
        item.Set("content", schema);
      } else {
        item.Set(key, *member);
      }
    }
    tags.items.push_back(std::move(item));
  }
  JsonValue value = Format("triggered_tags");
  value.Set("triggers", *triggers);
  value.Set("tags", std::move(tags));
  return value;
}

JsonValue ToFormats(const std::vector<GrammarNode>& nodes) {
  JsonValue list = JsonValue::Array();
  for (const GrammarNode& node : nodes) list.items.push_back(ToXgrammarFormat(node));
  return list;
}

}  // namespace

JsonValue ToXgrammarFormat(const GrammarNode& node) {
  using Kind = GrammarNode::Kind;
  JsonValue value;
  switch (node.kind) {
    case Kind::kLiteral:
      value = Format("const_string");
      value.Set("value", JsonValue::String(node.text));
      break;
    case Kind::kText:
      value = EbnfFormat("root ::= [^]*");
      break;
    case Kind::kToken:
      value = Format("token");
      value.Set("token", JsonValue::Integer(node.ids[0]));
      break;
    case Kind::kAnyTokens:
      value = Format("any_tokens");
      value.Set("exclude_tokens", Ids(node.ids));
      break;
    case Kind::kJsonSchema: {
      // The library's own tags allow white space without end, in which weak models get lost.
      const xgrammar::Grammar grammar =
          xgrammar::Grammar::FromJSONSchema(node.text, /*any_whitespace=*/!node.compact, /*indent=*/std::nullopt,
                                            std::pair<std::string, std::string>(",", ":"),
                                            /*strict_mode=*/true, node.compact ? std::nullopt : std::optional<int>(1));
      value = EbnfFormat(Reprint(grammar.ToString(), node.compact));
      break;
    }
    case Kind::kRegex:
      value = Format("regex");
      value.Set("pattern", JsonValue::String(node.text));
      break;
    case Kind::kEbnf:
      value = EbnfFormat(node.text);
      break;
    case Kind::kStructuralTag:
      value = ClientFormat(node.text);
      break;
    case Kind::kSequence:
    case Kind::kChoice:
      value = Format(node.kind == Kind::kSequence ? "sequence" : "or");
      value.Set("elements", ToFormats(node.children));
      break;
    case Kind::kOptional:
    case Kind::kOneOrMore:
      value = Format(node.kind == Kind::kOptional ? "optional" : "plus");
      value.Set("content", ToXgrammarFormat(node.children[0]));
      break;
  }
  return value;
}

}  // namespace k3
