#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/text/json_value.h"

// What a JSON schema says, read as the grammar made from it does.
namespace k3::schema {

// A set of types. Whole numbers are apart from the others.
using Types = uint8_t;
inline constexpr Types kString = 1, kFraction = 2, kInteger = 4, kBoolean = 8, kNull = 16, kArray = 32, kObject = 64;
inline constexpr Types kNumber = kFraction | kInteger;
inline constexpr Types kAll = 127;
inline constexpr const char* kLists[] = {"anyOf", "oneOf", "allOf"};

Types TypeOfWord(std::string_view word);
Types TypeOfValue(const JsonValue& value);
bool Equal(const JsonValue& a, const JsonValue& b);

bool Has(const JsonValue& schema, const char* key);
bool HasAny(const JsonValue& schema, std::initializer_list<const char*> keys);
bool IsFalse(const JsonValue* value);
void Remove(JsonValue* object, std::initializer_list<std::string_view> keys);
// The declared members; null when there are none.
const JsonValue* Members(const JsonValue& schema);
size_t RequiredCount(const JsonValue& schema);
bool Requires(const JsonValue& schema, const std::string& name);
// What further members an object may have: the schema that decides, or null.
const JsonValue* Further(const JsonValue& schema);
// Whether the grammar lets an object have members that are not declared.
bool IsOpen(const JsonValue& schema);

// The schemas inside one root, which must outlive this.
class Shapes {
 public:
  explicit Shapes(const JsonValue& root) : root_(root) {}

  const JsonValue& Follow(const JsonValue& schema) const;
  // The types of values that the grammar of `reference` lets through; `valid`: of those that fit it.
  Types TypesOf(const JsonValue& reference, bool valid, int depth = 0) const;
  // Whether no value that the grammar of one lets through fits the other. False where that cannot be told.
  bool Exclusive(const JsonValue& a, const JsonValue& b, int depth = 0) const;

 private:
  // No value that the grammar of `made` lets through fits `other`.
  bool Outside(const JsonValue& made_reference, const JsonValue& other_reference, int depth) const;
  static std::optional<std::vector<const JsonValue*>> Values(const JsonValue& schema);

  const JsonValue& root_;
  mutable int steps_ = 0;
};

}  // namespace k3::schema
