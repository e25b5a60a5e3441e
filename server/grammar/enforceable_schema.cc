#include "server/grammar/enforceable_schema.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/grammar/pattern_check.h"
#include "server/grammar/schema_reference.h"
#include "server/grammar/schema_shapes.h"
#include "server/grammar/string_alternatives.h"
#include "server/grammar/string_formats.h"
#include "server/text/field_error.h"

namespace k3 {
namespace {

using schema::Further;
using schema::Has;
using schema::HasAny;
using schema::IsFalse;
using schema::IsOpen;
using schema::Remove;
using schema::RequiredCount;

constexpr double kMost64 = 9.2e18;  // bounds beyond it may not fit into 64 bits
constexpr size_t kMaxListedNames = 200;

// References that the library would not find: it knows neither escapes nor places in lists nor empty names.
bool IsPlainReference(std::string_view reference) {
  if (reference == "#") return true;
  if (!reference.starts_with("#/") || reference.ends_with('/') || reference.find("//") != std::string_view::npos) {
    return false;
  }
  return std::all_of(reference.begin() + 2, reference.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           std::string_view("/_-.$").find(c) != std::string_view::npos;
  });
}

bool LeadsThroughList(const JsonValue& root, std::string_view reference) {
  const JsonValue* place = &root;
  for (size_t begin = 2; begin < reference.size();) {
    const size_t end = std::min(reference.find('/', begin), reference.size());
    if (!place->is_object()) return true;
    place = place->Find(reference.substr(begin, end - begin));
    if (place == nullptr) return true;
    begin = end + 1;
  }
  return false;
}

// Gives the places that such references name plain names in $defs.
class References {
 public:
  explicit References(const JsonValue& root) : root_(root) {}

  void Rewrite(JsonValue* value) {
    for (size_t i = 0; i < value->items.size(); ++i) {
      JsonValue& item = value->items[i];
      if (value->is_object() && value->keys[i] == "$ref" && item.is_string()) {
        const JsonValue* target = ResolveSchemaReference(root_, item.text);
        if (target == nullptr || (IsPlainReference(item.text) && !LeadsThroughList(root_, item.text))) continue;
        item.text = absl::StrCat("#/$defs/", NameOf(target));
      } else {
        Rewrite(&item);
      }
    }
  }

  void AddTargets(JsonValue* root) {
    if (targets_.empty()) return;
    JsonValue definitions = JsonValue::Object();
    if (const JsonValue* given = root->Find("$defs"); given != nullptr && given->is_object()) definitions = *given;
    for (const auto& [target, name] : targets_) {
      JsonValue copy = *target;
      Rewrite(&copy);  // finds no new ones: those in it have been seen in the root
      definitions.Set(name, std::move(copy));
    }
    root->Set("$defs", std::move(definitions));
  }

 private:
  const std::string& NameOf(const JsonValue* target) {
    const auto [place, fresh] = names_.try_emplace(target, "");
    if (fresh) {
      place->second = absl::StrCat("k3serve_place_", targets_.size());
      targets_.emplace_back(target, place->second);
    }
    return place->second;
  }

  const JsonValue& root_;
  std::map<const JsonValue*, std::string> names_;
  std::vector<std::pair<const JsonValue*, std::string>> targets_;
};

class Rewriter {
 public:
  explicit Rewriter(bool strict) : strict_(strict) {}

  void Rewrite(JsonValue* schema) const {
    if (!schema->is_object()) return;
    if (schema::Has(*schema, "properties")) DropForbiddenMembers(schema);
    for (size_t i = 0; i < schema->keys.size(); ++i) {
      const std::string_view key = schema->keys[i];
      JsonValue& value = schema->items[i];
      const auto is = [&](std::initializer_list<std::string_view> words) {
        return std::find(words.begin(), words.end(), key) != words.end();
      };
      if (is({"anyOf", "oneOf"})) std::erase_if(value.items, [](const JsonValue& item) { return IsFalse(&item); });
      if (is({"properties", "patternProperties", "$defs", "definitions", "anyOf", "oneOf", "allOf", "prefixItems"})) {
        for (JsonValue& item : value.items) Rewrite(&item);
      } else if (is({"items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames"})) {
        Rewrite(&value);
      }
    }
    if (HasAny(*schema, {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"})) return;
    RewriteNumbers(schema);
    RewriteString(schema);
    RewriteList(schema);
    RewriteObject(schema);
  }

 private:
  static bool MayBe(const JsonValue& schema, std::string_view word) {
    const JsonValue* type = schema.Find("type");
    if (type == nullptr) return false;
    return type->is_string() ? type->text == word
                             : std::any_of(type->items.begin(), type->items.end(),
                                           [&](const JsonValue& item) { return item.text == word; });
  }

  // Declared with the schema false: nothing may have that name. In a closed object the name is as good as unknown.
  static void DropForbiddenMembers(JsonValue* schema) {
    JsonValue properties = *schema->Find("properties");
    const bool open = IsOpen(*schema);
    JsonValue kept = JsonValue::Object();
    for (size_t i = 0; i < properties.keys.size(); ++i) {
      if (IsFalse(&properties.items[i])) continue;
      kept.keys.push_back(std::move(properties.keys[i]));
      kept.items.push_back(std::move(properties.items[i]));
    }
    if (kept.keys.size() == properties.keys.size()) return;
    const bool last = kept.keys.empty() && RequiredCount(*schema) == 0;
    schema->Set("properties", std::move(kept));
    if (!open && last && Further(*schema) == nullptr) schema->Set("additionalProperties", JsonValue::Bool(false));
  }

  void RewriteNumbers(JsonValue* schema) const {
    for (const char* key : {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}) {
      const JsonValue* value = schema->Find(key);
      if (value != nullptr) schema->Set(key, JsonValue::Integer(static_cast<int64_t>(value->AsDouble())));
    }
    if (!MayBe(*schema, "integer") || MayBe(*schema, "number")) return;
    std::optional<double> least, most;
    bool odd = false;
    for (const char* key : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}) {
      const JsonValue* value = schema->Find(key);
      if (value == nullptr) continue;
      const double bound = value->AsDouble();
      odd = odd || bound != std::floor(bound) || std::fabs(bound) >= kMost64;
      if (key == std::string_view("minimum")) least = std::max(least.value_or(-HUGE_VAL), std::ceil(bound));
      if (key == std::string_view("exclusiveMinimum"))
        least = std::max(least.value_or(-HUGE_VAL), std::floor(bound) + 1);
      if (key == std::string_view("maximum")) most = std::min(most.value_or(HUGE_VAL), std::floor(bound));
      if (key == std::string_view("exclusiveMaximum")) most = std::min(most.value_or(HUGE_VAL), std::ceil(bound) - 1);
    }
    if (!odd) return;
    Remove(schema, {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"});
    // What lies beyond 64 bits altogether is refused when strict.
    constexpr auto kLimit = static_cast<int64_t>(kMost64);
    const auto within = [](double bound) {
      return bound >= kMost64 ? kLimit : bound <= -kMost64 ? -kLimit : static_cast<int64_t>(bound);
    };
    if (least.has_value() && *least < kMost64) schema->Set("minimum", JsonValue::Integer(within(*least)));
    if (most.has_value() && *most > -kMost64) schema->Set("maximum", JsonValue::Integer(within(*most)));
  }

  void RewriteString(JsonValue* schema) const {
    const JsonValue* given = schema->Find("pattern");
    if (given != nullptr && given->is_string()) {
      const std::string pattern = given->text;
      const bool limited = HasAny(*schema, {"minLength", "maxLength"});
      if (!strict_ && !CheckPattern(pattern, "", /*strict=*/true).ok()) {
        Remove(schema, {"pattern"});
      } else if (const auto count = AnyCharacters(pattern); count.has_value() && !limited) {
        Remove(schema, {"pattern"});
        schema->Set("minLength", JsonValue::Integer(count->least));
        if (count->most >= 0) schema->Set("maxLength", JsonValue::Integer(count->most));
      } else {
        schema->Set("pattern", JsonValue::String(AsciiPattern(pattern)));
      }
    }
    if (HasAny(*schema, {"pattern", "minLength", "maxLength"})) return Remove(schema, {"format"});
    const JsonValue* format = schema->Find("format");
    if (format == nullptr || !format->is_string() || !MayBe(*schema, "string")) return;
    if (const std::string* pattern = FormatPattern(format->text)) {
      schema->Set("pattern", JsonValue::String(AsciiPattern(*pattern)));
      Remove(schema, {"format"});
    }
  }

  static void RewriteList(JsonValue* schema) {
    if (!MayBe(*schema, "array")) return;
    if (const JsonValue* given = schema->Find("prefixItems"); given != nullptr && given->is_array()) {
      JsonValue prefix = *given;
      for (size_t i = 0; i < prefix.items.size(); ++i) {
        JsonValue& item = prefix.items[i];
        if (IsFalse(&item)) {  // the list ends before it
          prefix.items.resize(i);
          Remove(schema, {"unevaluatedItems"});
          schema->Set("items", JsonValue::Bool(false));
          break;
        }
        if (item.is_bool()) item = JsonValue::Object();
      }
      const JsonValue* most = schema->Find("maxItems");
      if (most != nullptr && most->AsDouble() < static_cast<double>(prefix.items.size())) {
        prefix.items.resize(static_cast<size_t>(most->AsDouble()));
      }
      const JsonValue* least = schema->Find("minItems");
      const bool more = least != nullptr && least->AsDouble() > static_cast<double>(prefix.items.size());
      if (more && !HasAny(*schema, {"items", "unevaluatedItems"})) schema->Set("items", JsonValue::Bool(true));
      if (prefix.items.empty()) {
        Remove(schema, {"prefixItems"});
      } else {
        schema->Set("prefixItems", std::move(prefix));
      }
    }
    if (!HasAny(*schema, {"items", "prefixItems", "unevaluatedItems"})) schema->Set("items", JsonValue::Bool(true));
    Remove(schema, {"contains", "minContains", "maxContains"});
  }

  void RewriteObject(JsonValue* schema) const {
    if (const JsonValue* patterns = schema->Find("patternProperties"); patterns != nullptr && patterns->is_object()) {
      JsonValue kept = JsonValue::Object();
      for (size_t i = 0; i < patterns->keys.size(); ++i) {
        const bool enforced =
            strict_ || (CheckPattern(patterns->keys[i], "", /*strict=*/true).ok() && !IsFalse(&patterns->items[i]));
        if (enforced) kept.Set(AsciiPattern(patterns->keys[i]), patterns->items[i]);
      }
      const bool empty = kept.keys.empty();
      schema->Set("patternProperties", std::move(kept));
      if (empty) Remove(schema, {"patternProperties"});
    }
    if (const JsonValue* names = schema->Find("propertyNames"); names != nullptr && names->is_bool()) {
      if (!names->boolean) schema->Set("maxProperties", JsonValue::Integer(0));
      Remove(schema, {"propertyNames"});
    }
    const bool object = MayBe(*schema, "object") || (!Has(*schema, "type") && Has(*schema, "properties"));
    if (!object) return;
    ListNames(schema);
    const bool says = schema::Members(*schema) != nullptr || Further(*schema) != nullptr ||
                      HasAny(*schema, {"patternProperties", "propertyNames"});
    if (!says && RequiredCount(*schema) == 0) schema->Set("additionalProperties", JsonValue::Bool(true));
    DeclareRequired(schema);
  }

  // Names out of a short list are optional members, so that none comes twice.
  static void ListNames(JsonValue* schema) {
    if (schema::Members(*schema) != nullptr) return;
    if (const JsonValue* patterns = schema->Find("patternProperties")) {
      // A pattern that is one name.
      std::string_view name = patterns->keys.size() == 1 ? std::string_view(patterns->keys[0]) : std::string_view();
      if (name.starts_with('^')) name.remove_prefix(1);
      if (name.ends_with('$')) name.remove_suffix(1);
      const bool plain = !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
        return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-' || c == ' ';
      });
      if (!plain || Has(*schema, "propertyNames")) return;
      JsonValue properties = JsonValue::Object();
      properties.Set(std::string(name), patterns->items[0]);
      Remove(schema, {"patternProperties", "unevaluatedProperties"});
      schema->Set("properties", std::move(properties));
      schema->Set("additionalProperties", JsonValue::Bool(false));
      return;
    }
    const JsonValue* names = schema->Find("propertyNames");
    if (names == nullptr) return;
    std::vector<JsonValue> values;
    if (const JsonValue* only = names->Find("const")) values = {*only};
    if (const JsonValue* list = names->Find("enum")) values = list->items;
    if (values.empty() || values.size() > kMaxListedNames) return;
    const JsonValue* further = Further(*schema);
    const JsonValue member = further == nullptr || further->is_bool() ? JsonValue::Object() : *further;
    JsonValue properties = JsonValue::Object();
    for (const JsonValue& value : values) {
      if (value.is_string()) properties.Set(value.text, member);
    }
    Remove(schema, {"propertyNames", "unevaluatedProperties"});
    schema->Set("properties", std::move(properties));
    schema->Set("additionalProperties", JsonValue::Bool(false));
  }

  static void DeclareRequired(JsonValue* schema) {
    const JsonValue* required = schema->Find("required");
    const JsonValue* further = Further(*schema);
    if (required == nullptr || IsFalse(further) || HasAny(*schema, {"patternProperties", "propertyNames"})) return;
    JsonValue properties = JsonValue::Object();
    if (const JsonValue* declared = schema->Find("properties"); declared != nullptr && declared->is_object()) {
      properties = *declared;
    }
    std::unordered_set<std::string> declared_names(properties.keys.begin(), properties.keys.end());
    for (const JsonValue& name : required->items) {
      if (!name.is_string() || !declared_names.insert(name.text).second) continue;
      properties.keys.push_back(name.text);
      properties.items.push_back(further == nullptr || further->is_bool() ? JsonValue::Object() : *further);
    }
    schema->Set("properties", std::move(properties));
  }

  const bool strict_;
};

}  // namespace

absl::StatusOr<JsonValue> EnforceableSchema(const JsonValue& schema, const std::string& path, bool strict) {
  JsonValue result = schema;
  References references(schema);
  references.Rewrite(&result);
  references.AddTargets(&result);
  Rewriter(strict).Rewrite(&result);
  const absl::Status status = SeparateStrings(&result, path, strict);
  if (!status.ok()) return status;
  return result;
}

}  // namespace k3
