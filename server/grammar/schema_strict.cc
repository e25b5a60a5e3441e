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
#include "server/grammar/schema_shapes.h"
#include "server/text/field_error.h"

namespace k3 {
namespace {

using schema::Further;
using schema::Has;
using schema::HasAny;
using schema::IsFalse;
using schema::IsOpen;
using schema::kAll;
using schema::kFraction;
using schema::kInteger;
using schema::kLists;
using schema::kNumber;
using schema::kObject;
using schema::kString;
using schema::Members;
using schema::RequiredCount;
using schema::Shapes;
using schema::TypeOfValue;
using schema::Types;

constexpr int kMaxNesting = 32;
constexpr double kMost64 = 9.2e18;  // whole numbers beyond it may not fit into 64 bits
// Up to here the grammar library enforces multiples; beyond it leaves them out without a word.
constexpr double kMaxMultiple = 1024;
constexpr double kMaxMultipleRange = 9'999;

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
  if ((types & kNumber) == kInteger) {
    for (const char* key : {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}) {
      const JsonValue* bound = schema.Find(key);
      const bool lower = std::string_view(key).find("inimum") != std::string_view::npos;
      if (bound == nullptr || (lower ? bound->AsDouble() : -bound->AsDouble()) < kMost64) continue;
      return Refused(path, key,
                     absl::StrCat("leaves whole numbers beyond 64 bits only, which cannot be enforced: ", bound->text));
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
  for (size_t i = 0; properties != nullptr && IsOpen(schema) && i < properties->items.size(); ++i) {
    if (!IsFalse(&properties->items[i])) continue;
    return Refused(path, absl::StrCat("properties.", Excerpt(properties->keys[i], 60)),
                   "a name that nothing may have can be enforced where no further properties are allowed only");
  }
  if (const JsonValue* patterns = schema.Find("patternProperties")) {
    for (size_t i = 0; i < patterns->items.size(); ++i) {
      if (!IsFalse(&patterns->items[i])) continue;
      return Refused(path, absl::StrCat("patternProperties.", Excerpt(patterns->keys[i], 60)),
                     "names that nothing may have cannot be enforced by a pattern");
    }
  }
  const JsonValue* least = schema.Find("minProperties");
  if (least != nullptr && least->AsDouble() > 1 && HasAny(schema, {"patternProperties", "propertyNames"})) {
    return Refused(path, "minProperties",
                   "above 1 cannot be enforced beside patternProperties or propertyNames: there may be too few names");
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

}  // namespace k3
