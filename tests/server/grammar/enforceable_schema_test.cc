#include "server/grammar/enforceable_schema.h"

#include <gtest/gtest.h>

#include <string>

#include "nlohmann/json.hpp"
#include "server/grammar/schema_check.h"
#include "server/text/field_error.h"
#include "server/text/json_parser.h"
#include "server/text/json_writer.h"

namespace k3 {
namespace {

using Json = nlohmann::json;

Json Rewritten(const std::string& schema, bool strict = true) {
  const JsonValue value = ParseJson(schema).value();
  EXPECT_TRUE(CheckSchema(value, "s", strict).ok()) << schema << CheckSchema(value, "s", strict);
  const auto result = EnforceableSchema(value, "s", strict);
  EXPECT_TRUE(result.ok()) << schema << result.status();
  return result.ok() ? Json::parse(WriteJson(*result, {.number_as_written = true})) : Json();
}

std::string RefusedAt(const std::string& schema) {
  const auto result = EnforceableSchema(ParseJson(schema).value(), "s", /*strict=*/true);
  return result.ok() ? "" : FieldErrorPath(result.status());
}

TEST(EnforceableSchemaTest, EqualOrNarrowerSchemas) {
  const std::pair<const char*, const char*> cases[] = {
      // What no value may have.
      {R"({"type":"object","properties":{"a":false,"b":{"type":"null"}}})",
       R"({"type":"object","properties":{"b":{"type":"null"}}})"},
      {R"({"type":"object","properties":{"a":false}})",
       R"({"type":"object","properties":{},"additionalProperties":false})"},
      {R"({"anyOf":[false,{"type":"null"}]})", R"({"anyOf":[{"type":"null"}]})"},
      {R"({"type":"array","prefixItems":[{"type":"null"},false,{}]})",
       R"({"type":"array","prefixItems":[{"type":"null"}],"items":false})"},
      {R"({"type":"array","prefixItems":[true,{}],"items":{},"maxItems":1})",
       R"({"type":"array","prefixItems":[{}],"items":{},"maxItems":1})"},
      {R"({"type":"object","propertyNames":false})",
       R"({"type":"object","maxProperties":0,"additionalProperties":true})"},
      // Numbers.
      {R"({"type":"string","minLength":2.0,"maxLength":1e1})", R"({"type":"string","minLength":2,"maxLength":10})"},
      {R"({"type":"integer","minimum":0.5,"exclusiveMaximum":7.5})", R"({"type":"integer","minimum":1,"maximum":7})"},
      {R"({"type":"integer","exclusiveMinimum":-1.5,"maximum":1e30})",
       R"({"type":"integer","minimum":-1,"maximum":9200000000000000000})"},
      {R"({"type":"integer","minimum":3})", R"({"type":"integer","minimum":3})"},
      {R"({"type":"number","minimum":0.5,"maximum":1e30})", R"({"type":"number","minimum":0.5,"maximum":1e30})"},
      // Names out of a list come once each.
      {R"({"type":"object","propertyNames":{"enum":["a","b"]},"additionalProperties":{"type":"null"}})",
       R"({"type":"object","properties":{"a":{"type":"null"},"b":{"type":"null"}},"additionalProperties":false})"},
      {R"({"type":"object","properties":{},"propertyNames":{"const":"a"}})",
       R"({"type":"object","properties":{"a":{}},"additionalProperties":false})"},
      {R"({"type":"object","patternProperties":{"^a-b$":{"type":"null"}}})",
       R"({"type":"object","properties":{"a-b":{"type":"null"}},"additionalProperties":false})"},
      {R"({"type":"object","properties":{}})", R"({"type":"object","properties":{},"additionalProperties":true})"},
      {R"({"type":"object","properties":{"a":false},"required":["b"]})",
       R"({"type":"object","properties":{"b":{}},"required":["b"]})"},
      // Patterns.
      {R"({"type":"string","pattern":"^.{1,2000}$"})", R"({"type":"string","minLength":1,"maxLength":2000})"},
      {R"({"type":"string","pattern":"^{a}$"})", R"({"type":"string","pattern":"^\\{a}$"})"},
      // References.
      {R"({"$ref":"#/$defs/a~1b","$defs":{"a/b":{"type":"null"}}})",
       R"({"$ref":"#/$defs/k3serve_place_0","$defs":{"a/b":{"type":"null"},"k3serve_place_0":{"type":"null"}}})"},
      {R"({"type":"array","prefixItems":[{"type":"array","items":{"$ref":"#/prefixItems/0"}}]})",
       R"({"type":"array","prefixItems":[{"type":"array","items":{"$ref":"#/$defs/k3serve_place_0"}}],
           "$defs":{"k3serve_place_0":{"type":"array","items":{"$ref":"#/$defs/k3serve_place_0"}}}})"},
      {R"({"type":"array","items":{"$ref":"#/$defs/a"},"$defs":{"a":{"type":"null"}}})",
       R"({"type":"array","items":{"$ref":"#/$defs/a"},"$defs":{"a":{"type":"null"}}})"},
  };
  for (const auto& [schema, expected] : cases) EXPECT_EQ(Rewritten(schema), Json::parse(expected)) << schema;
}

TEST(EnforceableSchemaTest, WithoutStrictWhatCannotBeEnforcedIsLeftOut) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"type":"string","pattern":"(a)\\1"})", R"({"type":"string"})"},
      {R"({"type":"string","pattern":"\\p{L}+"})", R"({"type":"string"})"},
      {R"({"type":"string","pattern":"\\bword\\b"})", R"({"type":"string"})"},
      {R"({"type":"string","pattern":"^(?!no)x"})", R"({"type":"string"})"},
      {R"({"type":"string","pattern":"x.{1,2000}"})", R"({"type":"string"})"},
      {R"({"type":"integer","minimum":1e30})", R"({"type":"integer"})"},
      {R"({"type":"integer","minimum":1.5})", R"({"type":"integer","minimum":2})"},
      {R"({"type":"object","patternProperties":{"\\p{L}":{},"^x":false,"^y+$":{}},"additionalProperties":true})",
       R"({"type":"object","patternProperties":{"^y+$":{}},"additionalProperties":true})"},
      {R"({"anyOf":[{"type":"string","maxLength":20},{"type":"string","minLength":50}]})",
       R"({"anyOf":[{"type":"string"},{"type":"string"}]})"},
  };
  for (const auto& [schema, expected] : cases) {
    EXPECT_EQ(Rewritten(schema, /*strict=*/false), Json::parse(expected)) << schema;
  }
}

// Alternatives of strings: short limits are written out, long ones that exclude one another refused with their place.
TEST(EnforceableSchemaTest, StringsAtTheSamePlace) {
  const auto pattern = [](const char* schema, const char* place) {
    return Rewritten(schema).at(Json::json_pointer(place)).value("pattern", "");
  };
  const char* const kShort = R"({"anyOf":[{"type":"string","maxLength":2},{"type":"string","minLength":5}]})";
  EXPECT_EQ(pattern(kShort, "/anyOf/0"), R"(^[^"\\\x00-\x1f]{0,2}$)");
  EXPECT_EQ(pattern(kShort, "/anyOf/1"), R"(^[^"\\\x00-\x1f]{5,}$)");
  EXPECT_EQ(pattern(R"({"anyOf":[{"const":"N/A"},{"type":"string","minLength":10}]})", "/anyOf/1"),
            R"(^[^"\\\x00-\x1f]{10,}$)");
  // One string only, equal limits, or told apart before.
  for (
      const char* schema : {
          R"({"anyOf":[{"type":"string","maxLength":20},{"type":"null"}]})",
          R"({"anyOf":[{"type":"string","maxLength":20},{"type":"string","maxLength":20}]})",
          R"({"anyOf":[{"type":"object","properties":{"a":{"type":"string","maxLength":20}}},
                        {"type":"object","properties":{"b":{"type":"string","minLength":50}}}]})",
          R"({"anyOf":[{"type":"object","properties":{"kind":{"const":"x"},"a":{"type":"string","maxLength":20}},"required":["kind"]},
                        {"type":"object","properties":{"kind":{"const":"y"},"a":{"type":"string","minLength":50}},"required":["kind"]}]})",
          R"({"anyOf":[{"type":"object","properties":{"only":{},"a":{"type":"string","maxLength":20}},"required":["only"]},
                        {"type":"object","properties":{"a":{"type":"string","minLength":50}}}]})",
          R"({"type":"array","prefixItems":[{"type":"string","maxLength":20},{"type":"string","minLength":50}]})",
          R"({"anyOf":[{"type":"string","maxLength":100},{"type":"string","maxLength":200}]})",
      }) {
    EXPECT_EQ(Rewritten(schema), Rewritten(schema, /*strict=*/false)) << schema;
    EXPECT_EQ(Rewritten(schema).dump().find("pattern"), std::string::npos) << schema;
    EXPECT_NE(Rewritten(schema).dump().find("Length"), std::string::npos) << schema;
  }
  const std::pair<const char*, const char*> clashes[] = {
      {R"({"anyOf":[{"type":"string","maxLength":20},{"type":"string","minLength":50}]})", "s.anyOf[0]"},
      {R"({"anyOf":[{"type":"null"},{"anyOf":[{"type":["string","null"],"maxLength":20}]},{"$ref":"#/$defs/a"}],
          "$defs":{"a":{"type":"string","minLength":50}}})",
       "s.anyOf[1].anyOf[0]"},
      {R"({"anyOf":[{"type":"object","properties":{"a":{"type":"string","maxLength":20}}},
                    {"type":"object","properties":{"a":{"type":"string","minLength":50}}}]})",
       "s.anyOf[0].properties.a"},
      // What tells them apart comes too late.
      {R"({"anyOf":[{"type":"object","properties":{"a":{"type":"string","maxLength":20},"kind":{"const":"x"}},"required":["kind"]},
                    {"type":"object","properties":{"a":{"type":"string","minLength":50},"kind":{"const":"y"}},"required":["kind"]}]})",
       "s.anyOf[0].properties.a"},
      {R"({"anyOf":[{"type":"array","items":{"type":"string","maxLength":20}},
                    {"type":"array","items":{"type":"string","minLength":50}}]})",
       "s.anyOf[0].items"},
      {R"({"anyOf":[{"type":"object","propertyNames":{"type":"string","maxLength":20}},
                    {"type":"object","propertyNames":{"type":"string","minLength":50}}]})",
       "s.anyOf[0].propertyNames"},
  };
  for (const auto& [schema, path] : clashes) EXPECT_EQ(RefusedAt(schema), path) << schema;
}

// References make many ways; none is gone twice.
TEST(EnforceableSchemaTest, ManyAlternativesTakeNoTime) {
  std::string schema = R"({"$ref":"#/$defs/n0","$defs":{)";
  for (int i = 0; i < 40; ++i) {
    const std::string next = R"({"$ref":"#/$defs/n)" + std::to_string((i + 1) % 40) + "\"}";
    schema += (i > 0 ? "," : "") + std::string("\"n") + std::to_string(i) + R"(":{"anyOf":[)" + next + "," + next +
              R"(,{"type":"string","maxLength":)" + std::to_string(20 + i) + "}]}";
  }
  EXPECT_EQ(RefusedAt(schema + "}}"), "");
}

}  // namespace
}  // namespace k3
