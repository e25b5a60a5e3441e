#include "server/grammar/schema_check.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <initializer_list>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/grammar/pattern_check.h"
#include "server/grammar/schema_bounds.h"
#include "server/grammar/schema_reference.h"
#include "server/grammar/schema_shapes.h"
#include "server/grammar/schema_strict.h"
#include "server/text/field_error.h"

namespace k3 {
namespace {

constexpr int kMaxDepth = 48;
constexpr size_t kMaxValues = 50'000;
constexpr size_t kMaxText = 512 << 10;
constexpr size_t kMaxEnum = 5'000;
constexpr double kMaxRepeats = 100'000;
constexpr double kMaxLeast = 10'000;  // minLength, minItems, minProperties

bool IsOneOf(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// Keywords whose member values are schemas by name, lists of schemas, and one schema.
bool HoldsSchemas(std::string_view key) {
  return IsOneOf(key, {"properties", "patternProperties", "$defs", "definitions"});
}
bool HoldsSchemaList(std::string_view key) { return IsOneOf(key, {"anyOf", "oneOf", "allOf", "prefixItems"}); }
bool HoldsSchema(std::string_view key) {
  return IsOneOf(key, {"items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems",
                       "propertyNames"});
}

// Says nothing about the value.
bool IsAnnotation(std::string_view key) {
  return IsOneOf(key, {"$schema",
                       "$id",
                       "id",
                       "$anchor",
                       "$comment",
                       "title",
                       "description",
                       "default",
                       "examples",
                       "example",
                       "deprecated",
                       "readOnly",
                       "writeOnly",
                       "$defs",
                       "definitions",
                       "format",
                       "strict",
                       "nullable",
                       "discriminator",
                       "contentEncoding",
                       "contentMediaType",
                       "x-order"}) ||
         key.starts_with("x-");
}

bool HasReference(const JsonValue& value) {
  if (value.Find("$ref") != nullptr) return true;
  return std::any_of(value.items.begin(), value.items.end(), HasReference);
}

// Decides alone: what stands beside it would not be looked at.
bool IsDecisive(std::string_view key) { return IsOneOf(key, {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"}); }

class Checker {
 public:
  Checker(const JsonValue& root, bool strict) : root_(root), strict_(strict) {}

  absl::Status Check(const JsonValue& schema, const std::string& path, int depth) {
    if (depth > kMaxDepth) return FieldError(path, absl::StrCat("is nested more than ", kMaxDepth, " deep"));
    if (schema.is_bool()) {
      return schema.boolean ? absl::OkStatus() : FieldError(path, "no value fits the schema false");
    }
    if (!schema.is_object()) return FieldError(path, "expected a JSON schema: an object, true or false");
    std::string decisive;
    for (size_t i = 0; i < schema.keys.size(); ++i) {
      const std::string& key = schema.keys[i];
      const std::string place = absl::StrCat(path, ".", Excerpt(key, 60));
      const absl::Status status = CheckMember(key, schema.items[i], place, depth);
      if (!status.ok()) return status;
      if (strict_ && depth > 0 && key == "$id" && HasReference(schema)) {
        return FieldError(place, "inside a schema would change what its references mean, which is not followed");
      }
      if (IsDecisive(key)) decisive = key;
    }
    checked_.insert(&schema);
    if (decisive.empty()) {
      const absl::Status status = CheckSchemaBounds(schema, path);
      if (!status.ok()) return status;
    }
    if (!strict_) return absl::OkStatus();
    if (decisive.empty()) {
      const absl::Status status = CheckString(schema, path);
      return status.ok() ? CheckEnforced(root_, schema, path) : status;
    }
    for (const std::string& key : schema.keys) {
      if (key == decisive || IsAnnotation(key)) continue;
      if (key == "type" && IsOneOf(decisive, {"const", "enum", "anyOf", "oneOf", "allOf"})) continue;
      return FieldError(absl::StrCat(path, ".", Excerpt(key, 60)),
                        absl::StrCat("cannot be enforced beside ", decisive, "; without strict it is ignored"));
    }
    return CheckEnforced(root_, schema, path);
  }

  // Whatever references lead to outside the places where schemas are looked for.
  absl::Status CheckTargets() {
    while (!targets_.empty()) {
      const auto [target, path] = std::move(targets_.back());
      targets_.pop_back();
      if (checked_.contains(target)) continue;
      checked_.insert(target);
      const absl::Status status = Check(*target, path, 0);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status CheckSizes(const JsonValue& value, const std::string& path, int depth) {
    ++values_;
    text_ += value.text.size();
    if (values_ > kMaxValues) return FieldError(path, absl::StrCat("has more than ", kMaxValues, " values"));
    if (depth > 4 * kMaxDepth) return FieldError(path, "is nested too deeply");
    for (const std::string& key : value.keys) text_ += key.size();
    if (text_ > kMaxText) return FieldError(path, absl::StrCat("has more than ", kMaxText, " bytes of text"));
    for (const JsonValue& item : value.items) {
      const absl::Status status = CheckSizes(item, path, depth + 1);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Whether some finite value fits. A schema met again on the way to itself contributes nothing.
  bool Finite(const JsonValue& schema) {
    if (!schema.is_object() || ++steps_ > 100'000) return !schema::IsFalse(&schema);
    const auto [place, fresh] = finite_.try_emplace(&schema, State::kOpen);
    if (!fresh) return place->second == State::kFinite;
    const bool finite = FiniteInside(schema);
    // "No" may rest on a schema still open, so only "yes" is kept.
    if (finite) {
      finite_[&schema] = State::kFinite;
    } else {
      finite_.erase(&schema);
    }
    return finite;
  }

 private:
  enum class State : uint8_t { kOpen, kFinite };

  // Also without `strict`: an answer that is no JSON helps nobody.
  absl::Status CheckJsonPattern(const std::string& pattern, const std::string& path) const {
    absl::Status status = CheckPattern(pattern, path, strict_);
    return status.ok() ? CheckPatternInString(pattern, path) : status;
  }

  absl::Status CheckNamedSchemas(const std::string& key, const JsonValue& value, const std::string& path, int depth) {
    if (!value.is_object()) return FieldError(path, "expected an object of schemas");
    for (size_t i = 0; i < value.keys.size(); ++i) {
      const std::string place = absl::StrCat(path, ".", Excerpt(value.keys[i], 60));
      if (key == "patternProperties") {
        const absl::Status status = CheckJsonPattern(value.keys[i], place);
        if (!status.ok()) return status;
      }
      // A definition that nobody uses may be anything.
      const bool definition = IsOneOf(key, {"$defs", "definitions"});
      if (definition && !value.items[i].is_object()) continue;
      if (schema::IsFalse(&value.items[i])) continue;  // no such member: see CheckSchemaBounds and CheckEnforced
      const absl::Status status = Check(value.items[i], place, depth + 1);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status CheckSchemaList(const std::string& key, const JsonValue& value, const std::string& path, int depth) {
    if (!value.is_array() || value.items.empty()) return FieldError(path, "expected a list of schemas");
    if (strict_ && key == "allOf" && value.items.size() > 1) {
      return FieldError(path, "of several schemas cannot be enforced: write one schema instead");
    }
    const bool some = std::any_of(value.items.begin(), value.items.end(),
                                  [](const JsonValue& item) { return !schema::IsFalse(&item); });
    for (size_t i = 0; i < value.items.size(); ++i) {
      // One alternative less, or the end of a list.
      if (schema::IsFalse(&value.items[i]) && (key == "prefixItems" || (some && key != "allOf"))) continue;
      const absl::Status status = Check(value.items[i], absl::StrCat(path, "[", i, "]"), depth + 1);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status CheckMember(const std::string& key, const JsonValue& value, const std::string& path, int depth) {
    if (HoldsSchemas(key)) return CheckNamedSchemas(key, value, path, depth);
    if (HoldsSchemaList(key)) return CheckSchemaList(key, value, path, depth);
    if (key == "propertyNames" && value.is_object() && value.Find("type") == nullptr &&
        std::none_of(value.keys.begin(), value.keys.end(), IsDecisive)) {
      typed_.push_back(value);  // names are strings
      typed_.back().Set("type", JsonValue::String("string"));
      return Check(typed_.back(), path, depth + 1);
    }
    if (HoldsSchema(key)) return value.is_bool() ? absl::OkStatus() : Check(value, path, depth + 1);
    return CheckKeyword(key, value, path);
  }

  // A keyword that holds no schema.
  absl::Status CheckKeyword(const std::string& key, const JsonValue& value, const std::string& path) {
    if (key == "$ref") return CheckReference(value, path);
    if (key == "type") return CheckType(value, path);
    if (key == "required") {
      const bool names = value.is_array() && std::all_of(value.items.begin(), value.items.end(),
                                                         [](const JsonValue& item) { return item.is_string(); });
      return names ? absl::OkStatus() : FieldError(path, "expected a list of names");
    }
    if (key == "pattern") {
      return value.is_string() ? CheckJsonPattern(value.text, path) : FieldError(path, "expected a string");
    }
    if (key == "enum") {
      if (!value.is_array() || value.items.empty()) return FieldError(path, "expected a list of values");
      if (value.items.size() > kMaxEnum) {
        return FieldError(path, absl::StrCat("has ", value.items.size(), " values; at most ", kMaxEnum));
      }
      return absl::OkStatus();
    }
    if (IsOneOf(key, {"minLength", "minItems", "minProperties"})) return CheckBound(value, path, kMaxLeast);
    if (IsOneOf(key, {"maxLength", "maxItems", "maxProperties"})) return CheckBound(value, path, kMaxRepeats);
    if (IsOneOf(key, {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}) &&
        !value.is_number()) {
      return FieldError(path, absl::StrCat("expected a number, not ", Described(value)));
    }
    if (key == "multipleOf" && !(value.AsDouble() > 0)) {
      return FieldError(path, absl::StrCat("expected a number above 0, not ", value.text));
    }
    if (!strict_ || IsAnnotation(key)) return absl::OkStatus();
    const bool idle = key == "uniqueItems" && value.is_bool() && !value.boolean;
    if (idle || IsOneOf(key, {"const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})) {
      return absl::OkStatus();
    }
    if (IsOneOf(key, {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems",
                      "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"})) {
      return FieldError(path, "cannot be enforced; without strict it is ignored");
    }
    return absl::OkStatus();  // no keyword: any tool's own note
  }

  absl::Status CheckString(const JsonValue& schema, const std::string& path) const {
    if (!strict_) return absl::OkStatus();
    if (schema.Find("pattern") != nullptr) {
      for (const char* key : {"minLength", "maxLength"}) {
        if (schema.Find(key) != nullptr) {
          return FieldError(absl::StrCat(path, ".", key), "cannot be enforced beside pattern");
        }
      }
    }
    const JsonValue* type = schema.Find("type");
    if (schema.Find("multipleOf") != nullptr && !(type != nullptr && type->is_string() && type->text == "integer")) {
      return FieldError(absl::StrCat(path, ".multipleOf"), "can be enforced for integers only");
    }
    return absl::OkStatus();
  }

  static absl::Status CheckBound(const JsonValue& value, const std::string& path, double most) {
    const double number = value.AsDouble();
    if (!value.is_number() || number < 0 || number != std::floor(number)) {
      return FieldError(path, absl::StrCat("expected a whole number of at least 0, not ", Described(value)));
    }
    if (number <= most) return absl::OkStatus();
    return FieldError(path, absl::StrCat("must be at most ", most, ", not ", Excerpt(value.text, 40)));
  }

  static std::string Described(const JsonValue& value) {
    if (value.is_number()) return Excerpt(value.text, 40);
    if (value.is_string()) return absl::StrCat("\"", Excerpt(value.text, 40), "\"");
    return value.is_bool()    ? value.boolean ? "true" : "false"
           : value.is_array() ? "a list"
           : value.is_null()  ? "null"
                              : "an object";
  }

  static absl::Status CheckType(const JsonValue& value, const std::string& path) {
    const auto known = [](const JsonValue& type) {
      return type.is_string() &&
             IsOneOf(type.text, {"string", "number", "integer", "boolean", "null", "array", "object"});
    };
    const bool list = value.is_array() && !value.items.empty();
    if (known(value) || (list && std::all_of(value.items.begin(), value.items.end(), known))) return absl::OkStatus();
    return FieldError(path, "expected string, number, integer, boolean, null, array, object or a list of these");
  }

  absl::Status CheckReference(const JsonValue& value, const std::string& path) {
    if (!value.is_string()) return FieldError(path, "expected a string");
    const JsonValue* target = ResolveSchemaReference(root_, value.text);
    if (target != nullptr && !checked_.contains(target)) targets_.emplace_back(target, path);
    if (target == nullptr) {
      return FieldError(path, absl::StrCat("\"", Excerpt(value.text), "\" names no place in this schema"));
    }
    // A reference to a reference must come to an end.
    std::unordered_set<const JsonValue*> seen;
    while (target != nullptr && target->is_object() && target->Find("$ref") != nullptr) {
      if (!seen.insert(target).second) return FieldError(path, "leads to itself in a circle");
      const JsonValue* next = target->Find("$ref");
      if (!next->is_string()) return absl::OkStatus();  // reported where it stands
      target = ResolveSchemaReference(root_, next->text);
    }
    return absl::OkStatus();
  }

  bool FiniteInside(const JsonValue& schema) {
    const auto any = [&](const JsonValue& list) {
      return std::any_of(list.items.begin(), list.items.end(), [&](const JsonValue& item) { return Finite(item); });
    };
    const auto all = [&](const JsonValue& list) {
      return std::all_of(list.items.begin(), list.items.end(), [&](const JsonValue& item) { return Finite(item); });
    };
    if (const JsonValue* reference = schema.Find("$ref")) {
      const JsonValue* target = reference->is_string() ? ResolveSchemaReference(root_, reference->text) : nullptr;
      return target == nullptr || Finite(*target);
    }
    if (schema.Find("const") != nullptr || schema.Find("enum") != nullptr) return true;
    for (const char* key : {"anyOf", "oneOf"}) {
      if (const JsonValue* list = schema.Find(key)) return any(*list);
    }
    if (const JsonValue* list = schema.Find("allOf")) return all(*list);
    const JsonValue* type = schema.Find("type");
    if (type != nullptr && type->is_array() && type->items.size() > 1) return true;
    const JsonValue* properties = schema.Find("properties");
    const JsonValue* required = schema.Find("required");
    if (properties != nullptr && required != nullptr && required->is_array()) {
      std::unordered_set<std::string_view> names;
      for (const JsonValue& name : required->items) names.insert(name.text);
      for (size_t i = 0; i < properties->keys.size(); ++i) {
        if (names.contains(properties->keys[i]) && !Finite(properties->items[i])) return false;
      }
    }
    // False ends the list.
    const JsonValue* prefix = schema.Find("prefixItems");
    if (prefix != nullptr && std::any_of(prefix->items.begin(), prefix->items.end(), [&](const JsonValue& item) {
          return !schema::IsFalse(&item) && !Finite(item);
        })) {
      return false;
    }
    const JsonValue* least = schema.Find("minItems");
    const JsonValue* items = schema.Find("items");
    return least == nullptr || least->AsDouble() <= 0 || items == nullptr || Finite(*items);
  }

  const JsonValue& root_;
  const bool strict_;
  std::deque<JsonValue> typed_;  // copies of schemas, with a type
  std::unordered_set<const JsonValue*> checked_;
  std::vector<std::pair<const JsonValue*, std::string>> targets_;  // of references, with their places
  size_t values_ = 0;
  size_t text_ = 0;
  int steps_ = 0;
  std::unordered_map<const JsonValue*, State> finite_;
};

}  // namespace

absl::Status CheckSchema(const JsonValue& schema, const std::string& path, bool strict) {
  Checker checker(schema, strict);
  absl::Status status = checker.CheckSizes(schema, path, 0);
  if (status.ok()) status = checker.Check(schema, path, 0);
  if (status.ok()) status = checker.CheckTargets();
  if (status.ok() && !checker.Finite(schema)) {
    status = FieldError(path, "only endless values fit: what it requires contains itself");
  }
  return status;
}

}  // namespace k3
