#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

// A JSON value that forgets nothing a prompt could show: object members stay in order and numbers keep their spelling.
// Depth is bounded by the parser, so recursive code over a value is safe.
struct JsonValue {
  enum class Kind : uint8_t { kNull, kBool, kInteger, kFloat, kString, kArray, kObject };

  Kind kind = Kind::kNull;
  bool boolean = false;
  std::string text;               // kString: the string, UTF-8; kInteger, kFloat: the number as written
  std::vector<std::string> keys;  // kObject: distinct
  std::vector<JsonValue> items;   // kArray; kObject: the value of each key

  static JsonValue Bool(bool value);
  static JsonValue Integer(int64_t value);
  static JsonValue Float(double value);
  static JsonValue String(std::string value);
  static JsonValue Array(std::vector<JsonValue> items = {});
  static JsonValue Object();

  bool is_null() const { return kind == Kind::kNull; }
  bool is_bool() const { return kind == Kind::kBool; }
  bool is_number() const { return kind == Kind::kInteger || kind == Kind::kFloat; }
  bool is_string() const { return kind == Kind::kString; }
  bool is_array() const { return kind == Kind::kArray; }
  bool is_object() const { return kind == Kind::kObject; }

  // The member of an object, or null when there is none or this is no object.
  const JsonValue* Find(std::string_view key) const;
  // Sets a member: in place when the key is there, else at the end.
  JsonValue& Set(std::string key, JsonValue value);

  // The number; infinite when it exceeds a double. For other kinds 0.
  double AsDouble() const;

  bool operator==(const JsonValue&) const = default;
};

}  // namespace k3
