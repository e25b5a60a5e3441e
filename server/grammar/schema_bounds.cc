#include "server/grammar/schema_bounds.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/grammar/schema_shapes.h"
#include "server/text/field_error.h"

namespace k3 {
namespace {

class BoundsChecker {
 public:
  BoundsChecker(const JsonValue& schema, const std::string& path) : schema_(schema), path_(path) {}

  absl::Status Check() const {
    absl::Status status = CheckPairs();
    if (status.ok()) status = CheckNumbers();
    if (status.ok()) status = CheckMembers();
    if (status.ok()) status = CheckItems();
    return status;
  }

 private:
  absl::Status Refused(const char* key, const std::string& why) const {
    return FieldError(absl::StrCat(path_, ".", key), absl::StrCat("no value fits: ", why));
  }

  double Bound(const char* key, double none) const {
    const JsonValue* value = schema_.Find(key);
    return value == nullptr || !value->is_number() ? none : value->AsDouble();
  }

  absl::Status CheckPairs() const {
    for (const auto& [least, most] : {std::pair{"minLength", "maxLength"}, std::pair{"minItems", "maxItems"},
                                      std::pair{"minProperties", "maxProperties"}, std::pair{"minimum", "maximum"}}) {
      if (Bound(least, -HUGE_VAL) <= Bound(most, HUGE_VAL)) continue;
      return Refused(least, absl::StrCat(Bound(least, 0), " is above ", most, ", ", Bound(most, 0)));
    }
    return absl::OkStatus();
  }

  absl::Status CheckNumbers() const {
    const double above = Bound("exclusiveMinimum", -HUGE_VAL), below = Bound("exclusiveMaximum", HUGE_VAL);
    const double low = std::max(Bound("minimum", -HUGE_VAL), above);
    const double high = std::min(Bound("maximum", HUGE_VAL), below);
    if (low > high || (low == high && (above == low || below == high))) {
      return Refused(schema_.Find("exclusiveMinimum") != nullptr ? "exclusiveMinimum" : "exclusiveMaximum",
                     "the bounds leave no number");
    }
    const JsonValue* type = schema_.Find("type");
    const bool whole = type != nullptr && type->is_string() && type->text == "integer";
    if (!whole || !std::isfinite(low) || !std::isfinite(high)) return absl::OkStatus();
    const double step = std::max(1.0, std::floor(Bound("multipleOf", 1)));
    double first = std::ceil(low / step) * step;
    if (first == above) first += step;
    if (first <= high && first != below) return absl::OkStatus();
    return Refused(schema_.Find("multipleOf") != nullptr ? "multipleOf"
                   : schema_.Find("minimum") != nullptr  ? "minimum"
                                                         : "exclusiveMinimum",
                   "the bounds leave no such whole number");
  }

  absl::Status CheckMembers() const {
    const JsonValue* required = schema_.Find("required");
    const JsonValue* properties = schema_.Find("properties");
    if (required != nullptr && required->is_array()) {
      for (const JsonValue& name : required->items) {
        if (properties == nullptr || !schema::IsFalse(properties->Find(name.text))) continue;
        return Refused("required", absl::StrCat("\"", Excerpt(name.text, 60), "\" is false among the properties"));
      }
    }
    if (required != nullptr && static_cast<double>(schema::RequiredCount(schema_)) > Bound("maxProperties", HUGE_VAL)) {
      return Refused("maxProperties", absl::StrCat(schema::RequiredCount(schema_), " are required"));
    }
    if (schema::IsOpen(schema_)) return absl::OkStatus();
    const JsonValue* members = schema::Members(schema_);
    const auto count = members == nullptr ? 0
                                          : std::count_if(members->items.begin(), members->items.end(),
                                                          [](auto& item) { return !schema::IsFalse(&item); });
    if (Bound("minProperties", 0) <= static_cast<double>(count)) return absl::OkStatus();
    return Refused("minProperties", absl::StrCat("there are ", count, " properties and no others are allowed"));
  }

  absl::Status CheckItems() const {
    const JsonValue* prefix = schema_.Find("prefixItems");
    size_t most = prefix == nullptr ? 0 : prefix->items.size();
    bool ends = schema::IsFalse(schema_.Find("items"));
    for (size_t i = 0; i < most; ++i) {
      if (!schema::IsFalse(&prefix->items[i])) continue;
      most = i;
      ends = true;
    }
    if (!ends || Bound("minItems", 0) <= static_cast<double>(most)) return absl::OkStatus();
    return Refused("minItems", absl::StrCat("at most ", most, " items are allowed"));
  }

  const JsonValue& schema_;
  const std::string& path_;
};

}  // namespace

absl::Status CheckSchemaBounds(const JsonValue& schema, const std::string& path) {
  return BoundsChecker(schema, path).Check();
}

}  // namespace k3
