#include "server/grammar/argument_grammar.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/grammar/length_limits.h"
#include "server/grammar/schema_reference.h"
#include "server/grammar/string_alternatives.h"
#include "server/text/json_writer.h"
#include "server/text/xtml_markup.h"

namespace k3 {
namespace {

constexpr JsonStyle kValueStyle = {.spaces = true};  // as K3's history is rendered
constexpr char kRootName[] = "k3serve_root";
constexpr int kMaxNesting = 32;
constexpr int64_t kMaxBytes = 16 << 20;  // of all values' schemas together

// A value's grammar and the word for its type in the markup.
struct Typed {
  std::string type;
  GrammarNode node;
};

// References in a copy of the root, which lies below kRootName in the schema of one value.
void MoveReferences(JsonValue* value) {
  for (size_t i = 0; i < value->items.size(); ++i) {
    JsonValue& item = value->items[i];
    if (value->is_object() && value->keys[i] == "$ref" && item.is_string() && item.text.starts_with("#")) {
      item.text = absl::StrCat("#/", kRootName, item.text.substr(1));
    } else {
      MoveReferences(&item);
    }
  }
}

bool HasReference(const JsonValue& value) {
  for (size_t i = 0; i < value.items.size(); ++i) {
    if (value.is_object() && value.keys[i] == "$ref") return true;
    if (HasReference(value.items[i])) return true;
  }
  return false;
}

// Characters of an EBNF class or literal, by code point.
void AppendCodePoint(uint32_t code_point, std::string* out) {
  static constexpr char kHex[] = "0123456789abcdef";
  out->append("\\U");
  for (int shift = 28; shift >= 0; shift -= 4) out->push_back(kHex[code_point >> shift & 15]);
}

// Valid UTF-8 to code points.
std::vector<uint32_t> CodePoints(const std::string& text) {
  std::vector<uint32_t> points;
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const size_t length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    uint32_t point = length == 1 ? first : first & (0xffu >> (length + 1));
    for (size_t k = 1; k < length && i + k < text.size(); ++k) {
      point = point << 6 | (static_cast<unsigned char>(text[i + k]) & 0x3f);
    }
    points.push_back(point);
    i += length;
  }
  return points;
}

// A key that is none of `names`: walks their trie and leaves it.
class OtherKey {
 public:
  explicit OtherKey(const std::vector<std::string>& names) {
    nodes_.emplace_back();
    for (const std::string& name : names) {
      size_t node = 0;
      for (const uint32_t point : CodePoints(name)) {
        const auto [place, fresh] = nodes_[node].next.try_emplace(point, nodes_.size());
        const size_t next = place->second;
        if (fresh) nodes_.emplace_back();
        node = next;
      }
      nodes_[node].is_name = true;
    }
  }

  // What an attribute may hold without escapes.
  std::string Ebnf() const {
    std::string out;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      absl::StrAppend(&out, i == 0 ? "root" : absl::StrCat("n", i), " ::= [^\"&\\n\\r");
      for (const auto& [point, next] : nodes_[i].next) AppendCodePoint(point, &out);
      out.append("] rest");
      for (const auto& [point, next] : nodes_[i].next) {
        out.append(" | \"");
        AppendCodePoint(point, &out);
        absl::StrAppend(&out, "\" n", next);
      }
      if (i > 0 && !nodes_[i].is_name) out.append(" | \"\"");
      out.push_back('\n');
    }
    out.append("rest ::= [^\"&\\n\\r]{0,64}\n");
    return out;
  }

 private:
  struct Node {
    std::map<uint32_t, size_t> next;
    bool is_name = false;
  };
  std::vector<Node> nodes_;
};

class ArgumentGrammar {
 public:
  ArgumentGrammar(const XtmlTokens& tokens, const JsonValue& root) : tokens_(tokens), root_(root) {
    if (!HasReference(root)) return;
    moved_root_ = root;
    MoveReferences(&moved_root_);
  }

  bool overflowed() const { return left_ < 0; }

  GrammarNode Arguments(const JsonValue& schema, int nesting) const {
    const JsonValue& object = Follow(schema);
    left_ -= 64;
    for (const char* key : {"anyOf", "oneOf", "allOf"}) {
      const JsonValue* list = object.Find(key);
      if (list == nullptr || list->items.empty()) continue;
      if (nesting > kMaxNesting) left_ = -1;
      if (key == std::string_view("allOf") && list->items.size() > 1) return Anything({});
      std::vector<GrammarNode> branches;
      for (const JsonValue& branch : list->items) {
        if (overflowed()) break;
        branches.push_back(Arguments(branch, nesting + 1));
      }
      return branches.size() == 1 ? std::move(branches[0]) : GrammarNode::Choice(std::move(branches));
    }
    const JsonValue* properties = object.Find("properties");
    std::vector<Argument> declared;
    std::vector<std::string> names;
    if (properties != nullptr && properties->is_object()) {
      const JsonValue* required = object.Find("required");
      std::unordered_set<std::string_view> needed;
      for (size_t i = 0; required != nullptr && i < required->items.size(); ++i) needed.insert(required->items[i].text);
      for (size_t i = 0; i < properties->keys.size(); ++i) {
        const std::string& name = properties->keys[i];
        names.push_back(name);
        const int64_t before = left_;
        GrammarNode element = Element(GrammarNode::Literal(XtmlAttribute(name)), properties->items[i]);
        declared.push_back({std::move(element), needed.contains(name), before - left_ + 64});
      }
    }
    const JsonValue* further = object.Find("additionalProperties");
    if (further == nullptr) further = object.Find("unevaluatedProperties");
    const bool open = further == nullptr ? names.empty() : !further->is_bool() || further->boolean;
    if (!open) {
      const auto bound = [&](const char* key, double none) {
        const JsonValue* value = object.Find(key);
        return value == nullptr ? none : value->AsDouble();
      };
      const auto count = static_cast<double>(declared.size());
      return Counted(declared, 0, static_cast<int>(std::min(bound("minProperties", 0), count + 1)),
                     static_cast<int>(std::min(bound("maxProperties", count), count)));
    }
    std::vector<GrammarNode> elements;
    for (Argument& argument : declared) {
      elements.push_back(argument.needed ? std::move(argument.element)
                                         : GrammarNode::Optional(std::move(argument.element)));
    }
    elements.push_back(Anything(names, further));
    return GrammarNode::Sequence(std::move(elements));
  }

  GrammarNode Anything(const std::vector<std::string>& except, const JsonValue* schema = nullptr) const {
    GrammarNode key = GrammarNode::Of(GrammarNode::Kind::kEbnf, OtherKey(except).Ebnf());
    const JsonValue any = JsonValue::Bool(true);
    return GrammarNode::Optional(GrammarNode::OneOrMore(Element(std::move(key), schema == nullptr ? any : *schema)));
  }

 private:
  struct Argument {
    GrammarNode element;
    bool needed;
    int64_t bytes;  // what the element costs, each time that it is written
  };

  // The arguments from `begin` on, of which at least `least` and at most `most` are given. Where only the number
  // decides, each way to reach it is written out.
  GrammarNode Counted(const std::vector<Argument>& arguments, size_t begin, int least, int most) const {
    const auto left = arguments.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto needed = static_cast<int>(std::count_if(left, arguments.end(), [](auto& a) { return a.needed; }));
    const auto count = static_cast<int>(arguments.end() - left);
    std::vector<GrammarNode> elements;
    left_ -= 64;
    if (overflowed() || needed > most || count < least) {
      left_ = -1;
      return GrammarNode::Literal("");
    }
    if (least <= needed && most >= count) {
      for (auto argument = left; argument != arguments.end(); ++argument) {
        left_ -= argument->bytes;
        elements.push_back(argument->needed ? argument->element : GrammarNode::Optional(argument->element));
      }
      return elements.empty() ? GrammarNode::Literal("") : GrammarNode::Sequence(std::move(elements));
    }
    if (count == 0) return GrammarNode::Literal("");
    std::vector<GrammarNode> ways;
    if (needed - (left->needed ? 1 : 0) < most) {
      left_ -= left->bytes;
      ways.push_back(
          GrammarNode::Sequence({left->element, Counted(arguments, begin + 1, std::max(0, least - 1), most - 1)}));
    }
    if (!left->needed && count > least) ways.push_back(Counted(arguments, begin + 1, least, most));
    return ways.size() == 1 ? std::move(ways[0]) : GrammarNode::Choice(std::move(ways));
  }

  GrammarNode Element(GrammarNode key, const JsonValue& schema) const {
    std::vector<Typed> values;
    AppendValues(schema, 0, &values);
    std::vector<GrammarNode> alternatives;
    for (Typed& value : values) {
      alternatives.push_back(GrammarNode::Sequence({GrammarNode::Literal(absl::StrCat("\" type=\"", value.type, "\"")),
                                                    GrammarNode::Token(tokens_.separator), std::move(value.node)}));
    }
    return GrammarNode::Sequence({GrammarNode::Token(tokens_.open), GrammarNode::Literal("argument key=\""),
                                  std::move(key), GrammarNode::Choice(std::move(alternatives)),
                                  XtmlClose(tokens_, "argument")});
  }

  void AppendValues(const JsonValue& reference, int nesting, std::vector<Typed>* values) const {
    const JsonValue& schema = Follow(reference);
    left_ -= 64;
    if (overflowed()) return;
    if (const JsonValue* only = schema.Find("const")) return values->push_back(Exactly(*only));
    if (const JsonValue* list = schema.Find("enum")) {
      for (const JsonValue& value : list->items) values->push_back(Exactly(value));
      return;
    }
    for (const char* key : {"anyOf", "oneOf", "allOf"}) {
      const JsonValue* list = schema.Find(key);
      if (list == nullptr || list->items.empty()) continue;
      if (nesting > kMaxNesting) {
        left_ = -1;
        return;
      }
      if (key == std::string_view("allOf") && list->items.size() > 1) break;
      for (const JsonValue& branch : list->items) AppendValues(branch, nesting + 1, values);
      return;
    }
    const JsonValue* type = schema.Find("type");
    if (type != nullptr && type->is_string()) {
      AppendType(schema, type->text, values);
    } else if (type != nullptr && type->is_array()) {
      for (const JsonValue& word : type->items) AppendType(schema, word.text, values);
    } else {
      for (const char* word : {"string", "number", "boolean", "null", "array", "object"}) {
        AppendType(schema, word, values);
      }
    }
  }

  void AppendType(const JsonValue& schema, const std::string& type, std::vector<Typed>* values) const {
    if (type == "string") return values->push_back({type, Text(schema)});
    if (overflowed()) return;
    JsonValue value = JsonValue::Object();
    if (schema.is_object()) value = schema;
    value.Set("type", JsonValue::String(type));
    if (!moved_root_.is_null()) {
      MoveReferences(&value);
      value.Set(kRootName, moved_root_);
    }
    std::string text = WriteJson(value, {.number_as_written = true});
    left_ -= static_cast<int64_t>(text.size());
    values->push_back(
        {type == "integer" ? "number" : type, GrammarNode::JsonSchema(std::move(text), /*compact=*/false)});
  }

  static GrammarNode Text(const JsonValue& schema) {
    if (const auto written = WrittenLimit(schema)) {
      const std::string most = written->second < 0 ? "" : std::to_string(written->second);
      return GrammarNode::Of(GrammarNode::Kind::kEbnf, absl::StrCat("root ::= [^]{", written->first, ",", most, "}\n"));
    }
    if (const JsonValue* pattern = schema.Find("pattern"); pattern != nullptr && pattern->is_string()) {
      return GrammarNode::Of(GrammarNode::Kind::kRegex, pattern->text);
    }
    const JsonValue* least = schema.Find("minLength");
    const JsonValue* most = schema.Find("maxLength");
    if (least == nullptr && most == nullptr) return GrammarNode::Text();
    LengthLimit limit;
    limit.json = false;
    if (least != nullptr) limit.least = static_cast<int32_t>(least->AsDouble());
    if (most != nullptr) limit.most = static_cast<int32_t>(most->AsDouble());
    return GrammarNode::Of(GrammarNode::Kind::kEbnf, limit.Grammar(R"([\\x00-\\u{10ffff}])"));
  }

  static Typed Exactly(const JsonValue& value) {
    return {XtmlType(value), GrammarNode::Literal(value.is_string() ? value.text : WriteJson(value, kValueStyle))};
  }

  const JsonValue& Follow(const JsonValue& schema) const {
    const JsonValue& place = FollowSchemaReferences(root_, schema);
    if (place.Find("$ref") != nullptr) left_ = -1;  // a longer way than is followed
    return place;
  }

  const XtmlTokens& tokens_;
  const JsonValue& root_;
  JsonValue moved_root_;  // null when the schema has no references
  mutable int64_t left_ = kMaxBytes;
};

}  // namespace

GrammarNode XtmlOpen(const XtmlTokens& tokens, const std::string& tag_and_attributes) {
  return GrammarNode::Sequence({GrammarNode::Token(tokens.open), GrammarNode::Literal(tag_and_attributes),
                                GrammarNode::Token(tokens.separator)});
}

GrammarNode XtmlClose(const XtmlTokens& tokens, const std::string& tag) {
  return GrammarNode::Sequence(
      {GrammarNode::Token(tokens.close), GrammarNode::Literal(tag), GrammarNode::Token(tokens.separator)});
}

bool XtmlArgumentsFit(const JsonValue& parameters) {
  if (!parameters.is_object()) return true;
  const XtmlTokens tokens{};
  const ArgumentGrammar grammar(tokens, parameters);
  grammar.Arguments(parameters, 0);
  return !grammar.overflowed();
}

GrammarNode XtmlArguments(const XtmlTokens& tokens, const JsonValue& parameters) {
  const ArgumentGrammar grammar(tokens, parameters);
  if (!parameters.is_object()) return grammar.Anything({});
  return grammar.Arguments(parameters, 0);
}

}  // namespace k3
