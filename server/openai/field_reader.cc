#include "server/openai/field_reader.h"

#include <charconv>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/text/field_error.h"

namespace k3 {

std::string_view KindName(const JsonValue& value) {
  switch (value.kind) {
    case JsonValue::Kind::kNull:
      return "null";
    case JsonValue::Kind::kBool:
      return "a boolean";
    case JsonValue::Kind::kInteger:
    case JsonValue::Kind::kFloat:
      return "a number";
    case JsonValue::Kind::kString:
      return "a string";
    case JsonValue::Kind::kArray:
      return "an array";
    case JsonValue::Kind::kObject:
      return "an object";
  }
  return "";
}

std::string Described(const JsonValue& value) {
  switch (value.kind) {
    case JsonValue::Kind::kBool:
      return value.boolean ? "true" : "false";
    case JsonValue::Kind::kInteger:
    case JsonValue::Kind::kFloat:
      return Excerpt(value.text, 40);
    case JsonValue::Kind::kString:
      return absl::StrCat("the string \"", Excerpt(value.text, 60), "\"");
    default:
      return std::string(KindName(value));
  }
}

std::optional<int64_t> WholeNumber(const JsonValue& value, int* overflow) {
  if (overflow != nullptr) *overflow = 0;
  if (value.kind == JsonValue::Kind::kInteger) {
    int64_t number = 0;
    const char* const end = value.text.data() + value.text.size();
    if (std::from_chars(value.text.data(), end, number).ec == std::errc()) return number;
    if (overflow != nullptr) *overflow = value.text[0] == '-' ? -1 : 1;
    return std::nullopt;
  }
  if (value.kind != JsonValue::Kind::kFloat) return std::nullopt;
  const double number = value.AsDouble();
  if (std::floor(number) != number) return std::nullopt;  // infinities pass and overflow below
  if (number >= -9223372036854775808.0 && number < 9223372036854775808.0) return static_cast<int64_t>(number);
  if (overflow != nullptr) *overflow = number < 0 ? -1 : 1;
  return std::nullopt;
}

FieldReader::FieldReader(const JsonValue& object, std::string path) : path_(std::move(path)) {
  if (!object.is_object()) {
    status_ = FieldError(path_, absl::StrCat("expected an object, not ", std::string(KindName(object))));
    return;
  }
  members_.reserve(object.keys.size());
  for (size_t i = 0; i < object.keys.size(); ++i) members_.emplace(object.keys[i], &object.items[i]);
}

const JsonValue* FieldReader::Get(std::string_view key) const {
  if (!status_.ok()) return nullptr;
  const auto it = members_.find(key);
  return it == members_.end() || it->second->is_null() ? nullptr : it->second;
}

std::string FieldReader::Path(std::string_view key) const {
  return path_.empty() ? std::string(key) : absl::StrCat(path_, ".", std::string(key));
}

void FieldReader::Fail(std::string_view key, std::string_view what) {
  if (status_.ok()) status_ = FieldError(key.empty() ? path_ : Path(key), what);
}

void FieldReader::Adopt(const absl::Status& status) {
  if (status_.ok()) status_ = status;
}

std::optional<std::string> FieldReader::String(std::string_view key) {
  const JsonValue* value = Get(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_string()) return value->text;
  Fail(key, absl::StrCat("expected a string, not ", std::string(KindName(*value))));
  return std::nullopt;
}

std::optional<bool> FieldReader::Bool(std::string_view key) {
  const JsonValue* value = Get(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_bool()) return value->boolean;
  Fail(key, absl::StrCat("expected true or false, not ", std::string(KindName(*value))));
  return std::nullopt;
}

std::optional<double> FieldReader::Number(std::string_view key, double low, double high) {
  const JsonValue* value = Get(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) {
    Fail(key, absl::StrCat("expected a number, not ", std::string(KindName(*value))));
    return std::nullopt;
  }
  const double number = value->AsDouble();
  if (number >= low && number <= high) return number;
  Fail(key, absl::StrCat("must be from ", low, " to ", high, ", not ", Described(*value)));
  return std::nullopt;
}

std::optional<int64_t> FieldReader::Integer(std::string_view key, int64_t low, int64_t high) {
  int overflow = 0;
  const JsonValue* value = nullptr;
  const std::optional<int64_t> number = WholeValue(key, &value, &overflow);
  if (number && *number >= low && *number <= high) return number;
  if (number || overflow != 0) Fail(key, absl::StrCat("must be from ", low, " to ", high, ", not ", Described(*value)));
  return std::nullopt;
}

std::optional<int64_t> FieldReader::CappedInteger(std::string_view key, int64_t low, int64_t cap) {
  int overflow = 0;
  const JsonValue* value = nullptr;
  const std::optional<int64_t> number = WholeValue(key, &value, &overflow);
  if (overflow > 0 || (number && *number > cap)) return cap;
  if (number && *number >= low) return number;
  if (number || overflow < 0) Fail(key, absl::StrCat("must be at least ", low, ", not ", Described(*value)));
  return std::nullopt;
}

std::optional<int64_t> FieldReader::WholeValue(std::string_view key, const JsonValue** value, int* overflow) {
  *value = Get(key);
  if (*value == nullptr) return std::nullopt;
  const std::optional<int64_t> number = WholeNumber(**value, overflow);
  if (number || *overflow != 0) return number;
  Fail(key, absl::StrCat("expected an integer, not ",
                         (*value)->is_number() ? Described(**value) : std::string(KindName(**value))));
  return std::nullopt;
}

const JsonValue* FieldReader::Object(std::string_view key) {
  const JsonValue* value = Get(key);
  if (value == nullptr || value->is_object()) return value;
  Fail(key, absl::StrCat("expected an object, not ", std::string(KindName(*value))));
  return nullptr;
}

const JsonValue* FieldReader::Array(std::string_view key) {
  const JsonValue* value = Get(key);
  if (value == nullptr || value->is_array()) return value;
  Fail(key, absl::StrCat("expected an array, not ", std::string(KindName(*value))));
  return nullptr;
}

}  // namespace k3
