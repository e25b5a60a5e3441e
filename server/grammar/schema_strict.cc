#include "server/grammar/schema_strict.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/grammar/pattern_check.h"
#include "server/grammar/schema_check.h"
#include "server/text/field_error.h"

namespace k3 {
namespace {

constexpr int kMaxNesting = 32;
// Up to here the grammar library enforces multiples; beyond it leaves them out without a word.
constexpr double kMaxMultiple = 1024;
constexpr double kMaxMultipleRange = 9'999;

using Types = uint8_t;
constexpr Types kString = 1, kFraction = 2, kInteger = 4, kBoolean = 8, kNull = 16, kArray = 32, kObject = 64;
constexpr Types kNumber = kFraction | kInteger;
constexpr Types kAll = 127;

Types TypeOfWord(std::string_view word) {
  if (word == "string") return kString;
  if (word == "number") return kNumber;
  if (word == "integer") return kInteger;
  if (word == "boolean") return kBoolean;
  if (word == "null") return kNull;
  return word == "array" ? kArray : word == "object" ? kObject : 0;
}

Types TypeOfValue(const JsonValue& value) {
  switch (value.kind) {
    case JsonValue::Kind::kNull:
      return kNull;
    case JsonValue::Kind::kBool:
      return kBoolean;
    case JsonValue::Kind::kInteger:
    case JsonValue::Kind::kFloat:
      return std::floor(value.AsDouble()) == value.AsDouble() ? kInteger : kFraction;
    case JsonValue::Kind::kString:
      return kString;
    case JsonValue::Kind::kArray:
      return kArray;
    case JsonValue::Kind::kObject:
      break;
  }
  return kObject;
}

bool Equal(const JsonValue& a, const JsonValue& b) {
  if (a.is_number() && b.is_number()) return a.AsDouble() == b.AsDouble();
  if (a.kind != b.kind || a.items.size() != b.items.size()) return false;
  if (a.is_object()) {
    for (size_t i = 0; i < a.keys.size(); ++i) {
      const JsonValue* other = b.Find(a.keys[i]);
      if (other == nullptr || !Equal(a.items[i], *other)) return false;
    }
    return true;
  }
  if (a.is_array()) return std::equal(a.items.begin(), a.items.end(), b.items.begin(), Equal);
  return a.text == b.text && a.boolean == b.boolean;
}

bool Has(const JsonValue& schema, const char* key) { return schema.Find(key) != nullptr; }

bool HasAny(const JsonValue& schema, std::initializer_list<const char*> keys) {
  return std::any_of(keys.begin(), keys.end(), [&](const char* key) { return Has(schema, key); });
}

bool IsFalse(const JsonValue* value) { return value != nullptr && value->is_bool() && !value->boolean; }

const JsonValue* Members(const JsonValue& schema) {
  const JsonValue* properties = schema.Find("properties");
  return properties != nullptr && properties->is_object() && !properties->keys.empty() ? properties : nullptr;
}

size_t RequiredCount(const JsonValue& schema) {
  const JsonValue* required = schema.Find("required");
  return required == nullptr ? 0 : required->items.size();
}

bool Requires(const JsonValue& schema, const std::string& name) {
  const JsonValue* required = schema.Find("required");
  return required != nullptr && std::any_of(required->items.begin(), required->items.end(),
                                            [&](const JsonValue& item) { return item.text == name; });
}

// What further members an object may have: the schema that decides, or null.
const JsonValue* Further(const JsonValue& schema) {
  const JsonValue* further = schema.Find("additionalProperties");
  return further != nullptr ? further : schema.Find("unevaluatedProperties");
}

// Whether the grammar lets an object have members that are not declared.
bool IsOpen(const JsonValue& schema) {
  if (HasAny(schema, {"patternProperties", "propertyNames"})) return true;
  const JsonValue* further = Further(schema);
  return further == nullptr ? Members(schema) == nullptr : !IsFalse(further);
}

const char* const kLists[] = {"anyOf", "oneOf", "allOf"};

class Shapes {
 public:
  explicit Shapes(const JsonValue& root) : root_(root) {}

  const JsonValue& Follow(const JsonValue& schema) const { return FollowSchemaReferences(root_, schema); }

  // The types of values that the grammar of `reference` lets through; `valid`: of those that fit it.
  Types TypesOf(const JsonValue& reference, bool valid, int depth = 0) const {
    const JsonValue& schema = Follow(reference);
    if (!schema.is_object() || Has(schema, "$ref") || depth > kMaxNesting || ++steps_ > 10'000) return kAll;
    if (const JsonValue* only = schema.Find("const")) return TypeOfValue(*only);
    Types types = 0;
    if (const JsonValue* values = schema.Find("enum")) {
      for (const JsonValue& value : values->items) types |= TypeOfValue(value);
      return types;
    }
    for (const char* key : kLists) {
      const JsonValue* list = schema.Find(key);
      if (list == nullptr) continue;
      if (key == std::string_view("allOf") && list->items.size() != 1) return kAll;
      for (const JsonValue& branch : list->items) types |= TypesOf(branch, valid, depth + 1);
      return types;
    }
    if (const JsonValue* type = schema.Find("type")) {
      if (type->is_string()) return TypeOfWord(type->text);
      for (const JsonValue& word : type->items) types |= TypeOfWord(word.text);
      return types;
    }
    if (valid) return kAll;
    if (HasAny(schema, {"properties", "additionalProperties", "unevaluatedProperties"})) return kObject;
    return HasAny(schema, {"items", "prefixItems", "unevaluatedItems"}) ? kArray : kAll;
  }

  // Whether no value that the grammar of one lets through fits the other.
  bool Exclusive(const JsonValue& a, const JsonValue& b, int depth = 0) const {
    return Outside(a, b, depth) && Outside(b, a, depth);
  }

 private:
  // No value that the grammar of `made` lets through fits `other`.
  bool Outside(const JsonValue& made_reference, const JsonValue& other_reference, int depth) const {
    const JsonValue& made = Follow(made_reference);
    const JsonValue& other = Follow(other_reference);
    if (depth > 8 || ++steps_ > 10'000) return false;
    if ((TypesOf(made, false) & TypesOf(other, true)) == 0) return true;
    for (const char* key : kLists) {
      if (const JsonValue* list = made.Find(key))
        return All(*list, [&](auto& one) { return Outside(one, other, depth + 1); });
      if (const JsonValue* list = other.Find(key))
        return All(*list, [&](auto& one) { return Outside(made, one, depth + 1); });
    }
    const std::optional<std::vector<const JsonValue*>> values = Values(made), others = Values(other);
    if (values.has_value() && others.has_value()) {
      return std::none_of(values->begin(), values->end(), [&](const JsonValue* value) {
        return std::any_of(others->begin(), others->end(), [&](const JsonValue* o) { return Equal(*value, *o); });
      });
    }
    if (values.has_value() || others.has_value() || TypesOf(made, false) != kObject) return false;
    const JsonValue* mine = made.Find("properties");
    const JsonValue* theirs = other.Find("properties");
    const JsonValue* required = made.Find("required");
    steps_ += static_cast<int>((RequiredCount(made) + RequiredCount(other)) / 16);  // each looks through a list
    for (size_t i = 0; required != nullptr && i < required->items.size(); ++i) {
      const std::string& name = required->items[i].text;
      const JsonValue* there = theirs == nullptr ? nullptr : theirs->Find(name);
      const JsonValue* here = mine == nullptr ? nullptr : mine->Find(name);
      if (there != nullptr && here != nullptr && Outside(*here, *there, depth + 1)) return true;
      if (there == nullptr && !Has(other, "patternProperties") && IsFalse(other.Find("additionalProperties")))
        return true;
    }
    const JsonValue* wanted = other.Find("required");
    for (size_t i = 0; wanted != nullptr && !IsOpen(made) && i < wanted->items.size(); ++i) {
      const std::string& name = wanted->items[i].text;
      if ((mine == nullptr || mine->Find(name) == nullptr) && !Requires(made, name)) return true;
    }
    return false;
  }

  template <typename F>
  static bool All(const JsonValue& list, const F& holds) {
    return std::all_of(list.items.begin(), list.items.end(), holds);
  }

  static std::optional<std::vector<const JsonValue*>> Values(const JsonValue& schema) {
    if (const JsonValue* only = schema.Find("const")) return std::vector<const JsonValue*>{only};
    const JsonValue* list = schema.Find("enum");
    if (list == nullptr) return std::nullopt;
    std::vector<const JsonValue*> values;
    for (const JsonValue& value : list->items) values.push_back(&value);
    return values;
  }

  const JsonValue& root_;
  mutable int steps_ = 0;
};

absl::Status Refused(const std::string& path, const std::string& member, const std::string& why) {
  return FieldError(absl::StrCat(path, ".", member), why);
}

// Keywords that say something about one type only; without that type beside them the library drops them.
constexpr const char* kOfOneType[] = {"pattern",       "minLength",         "maxLength",        "minimum",
                                      "maximum",       "exclusiveMinimum",  "exclusiveMaximum", "multipleOf",
                                      "minItems",      "maxItems",          "required",         "minProperties",
                                      "maxProperties", "patternProperties", "propertyNames"};

// The library reads whole numbers as 64 bits, or else as doubles, which write others.
bool HasWideInteger(const JsonValue& value) {
  int64_t number = 0;
  if (value.kind == JsonValue::Kind::kInteger) return !absl::SimpleAtoi(value.text, &number);
  return std::any_of(value.items.begin(), value.items.end(), HasWideInteger);
}

absl::Status CheckFixedValues(const JsonValue& schema, const std::string& path) {
  constexpr char kWhy[] = "holds a whole number beyond 64 bits, which cannot be enforced";
  if (const JsonValue* only = schema.Find("const"); only != nullptr && HasWideInteger(*only)) {
    return Refused(path, "const", kWhy);
  }
  const JsonValue* values = schema.Find("enum");
  for (size_t i = 0; values != nullptr && i < values->items.size(); ++i) {
    if (HasWideInteger(values->items[i])) return Refused(path, absl::StrCat("enum[", i, "]"), kWhy);
  }
  return absl::OkStatus();
}

absl::Status CheckValuesBesideType(const Shapes& shapes, const JsonValue& schema, const std::string& path) {
  const JsonValue* type = schema.Find("type");
  if (type == nullptr) return absl::OkStatus();
  JsonValue alone = JsonValue::Object();
  alone.Set("type", *type);
  const Types allowed = shapes.TypesOf(alone, true);
  if (const JsonValue* only = schema.Find("const"); only != nullptr && (TypeOfValue(*only) & ~allowed) != 0) {
    return Refused(path, "const", "is not of the type that stands beside it");
  }
  if (const JsonValue* values = schema.Find("enum")) {
    for (size_t i = 0; i < values->items.size(); ++i) {
      if ((TypeOfValue(values->items[i]) & ~allowed) == 0) continue;
      return Refused(path, absl::StrCat("enum[", i, "]"), "is not of the type that stands beside it");
    }
  }
  for (const char* key : kLists) {
    const JsonValue* list = schema.Find(key);
    if (list == nullptr) continue;
    for (size_t i = 0; i < list->items.size(); ++i) {
      if ((shapes.TypesOf(list->items[i], false) & ~allowed) == 0) continue;
      return Refused(path, absl::StrCat(key, "[", i, "]"), "needs a type within the one that stands beside it");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckNumbers(Types types, const JsonValue& schema, const std::string& path) {
  if ((types & kInteger) != 0) {
    for (const char* key : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}) {
      const JsonValue* bound = schema.Find(key);
      if (bound == nullptr || (types & kFraction) != 0) continue;
      if (bound->AsDouble() != std::floor(bound->AsDouble()) || std::fabs(bound->AsDouble()) >= 9.2e18) {
        return Refused(path, key, "expected a whole number of 64 bits beside type integer");
      }
    }
  }
  const auto bound = [&](const char* key, double none) {
    const JsonValue* value = schema.Find(key);
    return value == nullptr ? none : value->AsDouble();
  };
  const double least = std::max(bound("minimum", -HUGE_VAL), bound("exclusiveMinimum", -HUGE_VAL));
  const double most = std::min(bound("maximum", HUGE_VAL), bound("exclusiveMaximum", HUGE_VAL));
  if (const JsonValue* multiple = schema.Find("multipleOf")) {
    const double value = multiple->AsDouble();
    if (value < 1 || value > kMaxMultiple || value != std::floor(value)) {
      return Refused(path, "multipleOf", absl::StrCat("can be enforced for whole numbers from 1 to ", kMaxMultiple));
    }
    if (std::isfinite(least) != std::isfinite(most) || (std::isfinite(least) && most - least > kMaxMultipleRange)) {
      return Refused(path, "multipleOf",
                     absl::StrCat("can be enforced without bounds, or with both and at most ", kMaxMultipleRange,
                                  " numbers between them"));
    }
  }
  if ((types & kFraction) == 0 || most - least >= 2e-6) return absl::OkStatus();
  const bool one = bound("minimum", HUGE_VAL) == bound("maximum", -HUGE_VAL) && least * 1e6 == std::floor(least * 1e6);
  if (one) return absl::OkStatus();
  return Refused(path, Has(schema, "minimum") ? "minimum" : "exclusiveMinimum",
                 "leaves no number with six decimals below the upper bound");
}

absl::Status CheckObject(const Shapes& shapes, const JsonValue& schema, const std::string& path) {
  const JsonValue* required = schema.Find("required");
  const JsonValue* properties = schema.Find("properties");
  std::unordered_set<std::string_view> declared;
  if (properties != nullptr) declared.insert(properties->keys.begin(), properties->keys.end());
  for (size_t i = 0; required != nullptr && i < required->items.size(); ++i) {
    if (declared.contains(required->items[i].text)) continue;
    if (Has(schema, "patternProperties") || Has(schema, "propertyNames") || IsFalse(Further(schema))) {
      return Refused(path, absl::StrCat("required[", i, "]"), "is not among the properties");
    }
  }
  const bool named = Members(schema) != nullptr || RequiredCount(schema) > 0;
  if (const JsonValue* patterns = schema.Find("patternProperties")) {
    if (named) return Refused(path, "patternProperties", "cannot be enforced beside properties");
    if (patterns->keys.size() > 1) return Refused(path, "patternProperties", "of several patterns cannot be enforced");
    if (Has(schema, "propertyNames"))
      return Refused(path, "patternProperties", "cannot be enforced beside propertyNames");
  }
  if (const JsonValue* names = schema.Find("propertyNames");
      names != nullptr && !(names->is_bool() && names->boolean)) {
    if (named) return Refused(path, "propertyNames", "cannot be enforced beside properties");
    if (IsFalse(Further(schema)))
      return Refused(path, "propertyNames", "cannot be enforced where no property is allowed");
    const bool untyped = !HasAny(*names, {"type", "$ref", "const", "enum", "anyOf", "oneOf", "allOf"});
    if (!untyped && (shapes.TypesOf(*names, false) & ~kString) != 0) {
      return Refused(path, "propertyNames", "must be a schema of strings");
    }
  }
  const JsonValue* least = schema.Find("minProperties");
  if (least != nullptr && IsOpen(schema) && least->AsDouble() > 1 &&
      least->AsDouble() > static_cast<double>(RequiredCount(schema))) {
    return Refused(path, "minProperties",
                   "above 1 can be enforced for declared properties only: one name may come twice");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckEnforced(const JsonValue& root, const JsonValue& schema, const std::string& path) {
  const Shapes shapes(root);
  absl::Status status = CheckFixedValues(schema, path);
  if (status.ok()) status = CheckValuesBesideType(shapes, schema, path);
  if (!status.ok()) return status;
  if (const JsonValue* list = schema.Find("oneOf")) {
    for (size_t i = 0; i < list->items.size(); ++i) {
      for (size_t k = i + 1; k < list->items.size(); ++k) {
        if (shapes.Exclusive(list->items[i], list->items[k])) continue;
        return Refused(
            path, "oneOf",
            absl::StrCat("cannot be enforced: schemas ", i, " and ", k, " may fit the same value; use anyOf"));
      }
    }
  }
  if (HasAny(schema, {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"})) return absl::OkStatus();
  const Types types = shapes.TypesOf(schema, false);
  if (!Has(schema, "type") && types == kAll) {
    for (const char* key : kOfOneType) {
      if (Has(schema, key)) return Refused(path, key, "can be enforced beside a type only");
    }
  }
  status = CheckNumbers(types, schema, path);
  if (status.ok() && (types & kObject) != 0) status = CheckObject(shapes, schema, path);
  return status;
}

namespace {

// The formats that the library enforces in a JSON string.
bool IsKnownFormat(const JsonValue& format) {
  static const std::unordered_set<std::string_view> kKnown = {
      "email", "date",     "time", "date-time",     "duration",     "ipv4",         "ipv6",
      "uuid",  "hostname", "uri",  "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"};
  return format.is_string() && kKnown.contains(format.text);
}

// A string that is an element's text, without quotes, is free but for its pattern or length.
absl::Status CheckElementFormat(const Shapes& shapes, const JsonValue& reference, const std::string& path, int depth) {
  const JsonValue& schema = shapes.Follow(reference);
  if (!schema.is_object() || depth > kMaxNesting || HasAny(schema, {"const", "enum"})) return absl::OkStatus();
  for (const char* key : kLists) {
    const JsonValue* list = schema.Find(key);
    for (size_t i = 0; list != nullptr && i < list->items.size(); ++i) {
      const absl::Status status =
          CheckElementFormat(shapes, list->items[i], absl::StrCat(path, ".", key, "[", i, "]"), depth + 1);
      if (!status.ok()) return status;
    }
  }
  const JsonValue* format = schema.Find("format");
  if (format == nullptr || !IsKnownFormat(*format) || (shapes.TypesOf(schema, true) & kString) == 0) {
    return absl::OkStatus();
  }
  if (HasAny(schema, {"pattern", "minLength", "maxLength"})) return absl::OkStatus();  // it gives way to them
  return Refused(path, "format", "of an argument that is a string itself cannot be enforced: write a pattern");
}

}  // namespace

absl::Status CheckArgumentsEnforced(const JsonValue& parameters, const std::string& path, bool elements) {
  const Shapes shapes(parameters);
  struct Part {
    const JsonValue* schema;
    std::string path;
    int depth;
  };
  std::vector<Part> parts = {{&parameters, path, 0}};
  while (!parts.empty()) {
    const Part part = std::move(parts.back());
    parts.pop_back();
    const JsonValue& schema = shapes.Follow(*part.schema);
    if (!schema.is_object()) continue;
    if ((shapes.TypesOf(schema, true) & kObject) == 0) {
      return FieldError(part.path, "expected the schema of an object: arguments are one");
    }
    if (elements) {
      for (const char* key : {"const", "enum", "patternProperties", "propertyNames"}) {
        if (Has(schema, key)) return Refused(part.path, key, "of a tool's parameters cannot be enforced");
      }
      const JsonValue* properties = Members(schema);
      for (size_t i = 0; properties != nullptr && i < properties->items.size(); ++i) {
        const absl::Status status = CheckElementFormat(
            shapes, properties->items[i], absl::StrCat(part.path, ".properties.", Excerpt(properties->keys[i], 60)), 0);
        if (!status.ok()) return status;
      }
      for (const char* key : {"additionalProperties", "unevaluatedProperties"}) {
        const JsonValue* further = schema.Find(key);
        if (further == nullptr) continue;
        const absl::Status status = CheckElementFormat(shapes, *further, absl::StrCat(part.path, ".", key), 0);
        if (!status.ok()) return status;
      }
      const JsonValue* least = schema.Find("minProperties");
      const bool least_matters = least != nullptr && least->AsDouble() > static_cast<double>(RequiredCount(schema));
      for (const char* key : {"minProperties", "maxProperties"}) {
        const bool matters = key == std::string_view("maxProperties") ? Has(schema, key) : least_matters;
        if (matters && IsOpen(schema)) {
          return Refused(part.path, key, "of a tool's parameters can be enforced for declared properties only");
        }
      }
    }
    if (part.depth > kMaxNesting || parts.size() > 1'000) {
      return FieldError(part.path, "has too many alternatives");
    }
    for (const char* key : kLists) {
      const JsonValue* list = schema.Find(key);
      for (size_t i = 0; list != nullptr && i < list->items.size(); ++i) {
        parts.push_back({&list->items[i], absl::StrCat(part.path, ".", key, "[", i, "]"), part.depth + 1});
      }
    }
  }
  return absl::OkStatus();
}

namespace {

JsonValue Without(const JsonValue& object, std::string_view key) {
  JsonValue result = JsonValue::Object();
  for (size_t i = 0; i < object.keys.size(); ++i) {
    if (object.keys[i] == key) continue;
    result.keys.push_back(object.keys[i]);
    result.items.push_back(object.items[i]);
  }
  return result;
}

void MakeEnforceable(JsonValue* schema) {
  if (!schema->is_object()) return;
  for (size_t i = 0; i < schema->keys.size(); ++i) {
    const std::string_view key = schema->keys[i];
    JsonValue& value = schema->items[i];
    const auto is = [&](std::initializer_list<std::string_view> words) {
      return std::find(words.begin(), words.end(), key) != words.end();
    };
    if (is({"properties", "patternProperties", "$defs", "definitions", "anyOf", "oneOf", "allOf", "prefixItems"})) {
      for (JsonValue& item : value.items) MakeEnforceable(&item);
    } else if (is({"items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames"})) {
      MakeEnforceable(&value);
    }
  }
  if (HasAny(*schema, {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"})) return;
  if (const JsonValue* pattern = schema->Find("pattern"); pattern != nullptr && pattern->is_string()) {
    schema->Set("pattern", JsonValue::String(AsciiPattern(pattern->text)));
  }
  if (const JsonValue* patterns = schema->Find("patternProperties"); patterns != nullptr && patterns->is_object()) {
    JsonValue ascii = JsonValue::Object();
    for (size_t i = 0; i < patterns->keys.size(); ++i) ascii.Set(AsciiPattern(patterns->keys[i]), patterns->items[i]);
    schema->Set("patternProperties", std::move(ascii));
  }
  if (Has(*schema, "format") && HasAny(*schema, {"pattern", "minLength", "maxLength"}))
    *schema = Without(*schema, "format");
  if (const JsonValue* names = schema->Find("propertyNames"); names != nullptr && names->is_bool() && names->boolean) {
    *schema = Without(*schema, "propertyNames");
  }
  if (const JsonValue* prefix = schema->Find("prefixItems"); prefix != nullptr && prefix->is_array()) {
    JsonValue items = *prefix;
    for (JsonValue& item : items.items) {
      if (item.is_bool() && item.boolean) item = JsonValue::Object();
    }
    schema->Set("prefixItems", std::move(items));
  }
  const JsonValue* type = schema->Find("type");
  const auto may_be = [&](std::string_view word) {
    if (type == nullptr) return false;
    return type->is_string() ? type->text == word
                             : std::any_of(type->items.begin(), type->items.end(),
                                           [&](const JsonValue& item) { return item.text == word; });
  };
  const bool list = may_be("array"), object = may_be("object") || (type == nullptr && Has(*schema, "properties"));
  if (list && !HasAny(*schema, {"items", "prefixItems", "unevaluatedItems"}))
    schema->Set("items", JsonValue::Bool(true));
  if (!object) return;
  const bool says =
      HasAny(*schema, {"properties", "patternProperties", "propertyNames"}) || Further(*schema) != nullptr;
  if (!says && RequiredCount(*schema) == 0) schema->Set("additionalProperties", JsonValue::Bool(true));
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

}  // namespace

JsonValue EnforceableSchema(const JsonValue& schema) {
  JsonValue result = schema;
  MakeEnforceable(&result);
  return result;
}

}  // namespace k3
