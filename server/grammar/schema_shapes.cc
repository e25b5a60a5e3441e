#include "server/grammar/schema_shapes.h"

#include <algorithm>
#include <cmath>

#include "server/grammar/schema_reference.h"

namespace k3::schema {
namespace {

constexpr int kMaxNesting = 32;

template <typename F>
bool All(const JsonValue& list, const F& holds) {
  return std::all_of(list.items.begin(), list.items.end(), holds);
}

}  // namespace

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

void Remove(JsonValue* object, std::initializer_list<std::string_view> keys) {
  for (size_t i = object->keys.size(); i-- > 0;) {
    if (std::find(keys.begin(), keys.end(), object->keys[i]) == keys.end()) continue;
    object->keys.erase(object->keys.begin() + static_cast<std::ptrdiff_t>(i));
    object->items.erase(object->items.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

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

const JsonValue* Further(const JsonValue& schema) {
  const JsonValue* further = schema.Find("additionalProperties");
  return further != nullptr ? further : schema.Find("unevaluatedProperties");
}

bool IsOpen(const JsonValue& schema) {
  if (HasAny(schema, {"patternProperties", "propertyNames"})) return true;
  const JsonValue* further = Further(schema);
  return further == nullptr ? Members(schema) == nullptr : !IsFalse(further);
}

const JsonValue& Shapes::Follow(const JsonValue& schema) const { return FollowSchemaReferences(root_, schema); }

Types Shapes::TypesOf(const JsonValue& reference, bool valid, int depth) const {
  const JsonValue& schema = Follow(reference);
  if (IsFalse(&schema)) return 0;
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

bool Shapes::Exclusive(const JsonValue& a, const JsonValue& b, int depth) const {
  return Outside(a, b, depth) && Outside(b, a, depth);
}

bool Shapes::Outside(const JsonValue& made_reference, const JsonValue& other_reference, int depth) const {
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

std::optional<std::vector<const JsonValue*>> Shapes::Values(const JsonValue& schema) {
  if (const JsonValue* only = schema.Find("const")) return std::vector<const JsonValue*>{only};
  const JsonValue* list = schema.Find("enum");
  if (list == nullptr) return std::nullopt;
  std::vector<const JsonValue*> values;
  for (const JsonValue& value : list->items) values.push_back(&value);
  return values;
}

}  // namespace k3::schema
