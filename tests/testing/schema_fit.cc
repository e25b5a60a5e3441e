#include "tests/testing/schema_fit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <regex>
#include <set>
#include <vector>

#include "server/text/json_parser.h"

namespace k3::testing {

bool Fits(const Json& value, const Json& schema, const Json& root) {
  if (schema.is_boolean()) return schema.get<bool>();
  if (schema.contains("$ref")) {
    return Fits(value, root.at(Json::json_pointer(schema["$ref"].get<std::string>().substr(1))), root);
  }
  if (schema.contains("const")) return value == schema["const"];
  if (schema.contains("enum")) {
    return std::find(schema["enum"].begin(), schema["enum"].end(), value) != schema["enum"].end();
  }
  if (schema.contains("anyOf")) {
    return std::any_of(schema["anyOf"].begin(), schema["anyOf"].end(),
                       [&](const Json& branch) { return Fits(value, branch, root); });
  }
  if (!schema.contains("type")) return true;
  if (schema["type"].is_array()) {
    return std::any_of(schema["type"].begin(), schema["type"].end(), [&](const Json& type) {
      Json one = schema;
      one["type"] = type;
      return Fits(value, one, root);
    });
  }
  const std::string type = schema["type"];
  if (type == "null") return value.is_null();
  if (type == "boolean") return value.is_boolean();
  if (type == "string") {
    if (!value.is_string()) return false;
    const std::string text = value;
    const auto length = std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; });
    if (length < schema.value("minLength", 0) || length > schema.value("maxLength", 1 << 30)) return false;
    return !schema.contains("pattern") || std::regex_search(text, std::regex(schema["pattern"].get<std::string>()));
  }
  if (type == "integer" || type == "number") {
    // Digits without end read back as a float.
    if (!value.is_number()) return false;
    const double number = value;
    if (type == "integer" && std::isfinite(number) && number != std::floor(number)) return false;
    return number >= schema.value("minimum", -HUGE_VAL) && number <= schema.value("maximum", HUGE_VAL);
  }
  if (type == "array") {
    if (!value.is_array()) return false;
    const auto size = static_cast<int>(value.size());
    if (size < schema.value("minItems", 0) || size > schema.value("maxItems", 1 << 30)) return false;
    return !schema.contains("items") ||
           std::all_of(value.begin(), value.end(), [&](const Json& item) { return Fits(item, schema["items"], root); });
  }
  if (!value.is_object()) return false;
  for (const Json& name : schema.value("required", Json::array())) {
    if (!value.contains(name.get<std::string>())) return false;
  }
  for (const auto& [name, member] : value.items()) {
    const Json properties = schema.value("properties", Json::object());
    const Json additional = schema.value("additionalProperties", Json(true));
    if (properties.contains(name)) {
      if (!Fits(member, properties[name], root)) return false;
    } else if (!Fits(member, additional, root)) {
      return false;
    }
  }
  return true;
}

bool NamesTwice(const std::string& text) {
  std::vector<std::set<std::string>> open;
  bool twice = false;
  const Json value = Json::parse(
      text,
      [&](int, Json::parse_event_t event, const Json& parsed) {
        if (event == Json::parse_event_t::object_start) open.emplace_back();
        if (event == Json::parse_event_t::object_end) open.pop_back();
        if (event == Json::parse_event_t::key) twice = !open.back().insert(parsed.get<std::string>()).second || twice;
        return true;
      },
      /*allow_exceptions=*/false);
  return twice;
}

void ExpectFits(const std::string& text, const Json& schema) {
  ASSERT_TRUE(ParseJson(text).ok()) << text;
  try {
    EXPECT_TRUE(Fits(Json::parse(text), schema, schema)) << schema.dump() << "\n" << text;
  } catch (const Json::out_of_range&) {
    // Legal JSON that this library does not take: a number beyond a double.
  }
}

}  // namespace k3::testing
