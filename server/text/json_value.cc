#include "server/text/json_value.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "server/text/json_writer.h"

namespace k3 {

JsonValue JsonValue::Bool(bool value) {
  JsonValue result;
  result.kind = Kind::kBool;
  result.boolean = value;
  return result;
}

JsonValue JsonValue::Integer(int64_t value) {
  JsonValue result;
  result.kind = Kind::kInteger;
  result.text = std::to_string(value);
  return result;
}

JsonValue JsonValue::Float(double value) {
  JsonValue result;
  result.kind = Kind::kFloat;
  result.text = PythonFloat(value);
  return result;
}

JsonValue JsonValue::String(std::string value) {
  JsonValue result;
  result.kind = Kind::kString;
  result.text = std::move(value);
  return result;
}

JsonValue JsonValue::Array(std::vector<JsonValue> items) {
  JsonValue result;
  result.kind = Kind::kArray;
  result.items = std::move(items);
  return result;
}

JsonValue JsonValue::Object() {
  JsonValue result;
  result.kind = Kind::kObject;
  return result;
}

const JsonValue* JsonValue::Find(std::string_view key) const {
  if (kind != Kind::kObject) return nullptr;
  const auto it = std::find(keys.begin(), keys.end(), key);
  return it == keys.end() ? nullptr : &items[it - keys.begin()];
}

JsonValue& JsonValue::Set(std::string key, JsonValue value) {
  const auto it = std::find(keys.begin(), keys.end(), key);
  if (it != keys.end()) return items[it - keys.begin()] = std::move(value);
  keys.push_back(std::move(key));
  return items.emplace_back(std::move(value));
}

double JsonValue::AsDouble() const {
  if (!is_number()) return 0;
  double value = 0;
  if (text == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (text == "Infinity") return std::numeric_limits<double>::infinity();
  if (text == "-Infinity") return -std::numeric_limits<double>::infinity();
  (void)absl::SimpleAtod(text, &value);  // the parser has checked the spelling; out of range gives an infinity
  return value;
}

}  // namespace k3
