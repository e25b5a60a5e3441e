#include "server/grammar/schema_check.h"

#include <gtest/gtest.h>

#include <string>

#include "server/text/field_error.h"
#include "server/text/json_parser.h"

namespace k3 {
namespace {

std::string PathOf(const std::string& schema, bool strict = true) {
  const JsonValue value = ParseJson(schema).value();
  const absl::Status status = CheckSchema(value, "s", strict);
  return status.ok() ? "" : FieldErrorPath(status);
}

std::string Repeat(const std::string& text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
}

TEST(SchemaCheckTest, OrdinarySchemasPass) {
  for (const char* schema : {
           R"({})",
           R"(true)",
           R"({"type":"object"})",
           R"({"type":"object","properties":{"a":{"type":["string","null"],"description":"x","default":null}},
               "required":["a"],"additionalProperties":false,"title":"T","$schema":"x"})",
           R"({"anyOf":[{"type":"string"},{"type":"null"}],"default":null,"title":"x"})",
           R"({"type":"string","enum":["a","b"]})",
           R"({"$ref":"#/$defs/node","$defs":{"node":{"type":"object","properties":
               {"next":{"anyOf":[{"$ref":"#/$defs/node"},{"type":"null"}]}},"required":["next"]}}})",
           R"({"type":"array","items":{"$ref":"#"}})",
           R"({"type":"object","properties":{"a/b~c":{"type":"integer"},"d":{"$ref":"#/properties/a~1b~0c"}}})",
           R"({"type":"integer","minimum":1,"multipleOf":3})",
           R"({"allOf":[{"type":"object"}]})",
       }) {
    EXPECT_EQ(PathOf(schema), "") << schema;
  }
}

TEST(SchemaCheckTest, WhatCannotBeEnforcedIsNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"type":"object","properties":{"a":{"not":{"type":"string"}}}})", "s.properties.a.not"},
      {R"({"type":"array","uniqueItems":true})", "s.uniqueItems"},
      {R"({"if":{"type":"string"},"then":{}})", "s.if"},
      {R"({"type":"number","multipleOf":0.5})", "s.multipleOf"},
      {R"({"type":"string","pattern":"a+","minLength":3})", "s.minLength"},
      {R"({"anyOf":[{"type":"string"}],"minLength":3})", "s.minLength"},
      {R"({"allOf":[{"type":"object"},{"type":"object"}]})", "s.allOf"},
      {R"({"type":"array","contains":{"type":"string"}})", "s.contains"},
  };
  for (const auto& [schema, path] : cases) {
    EXPECT_EQ(PathOf(schema), path) << schema;
    EXPECT_EQ(PathOf(schema, /*strict=*/false), "") << schema;
  }
}

TEST(SchemaCheckTest, WrongAndHostileSchemasAreRefusedEvenWhenNotStrict) {
  const std::string deep = Repeat(R"({"type":"array","items":)", 60) + R"({"type":"string"})" + Repeat("}", 60);
  std::string values = "0";
  for (int i = 1; i <= 5000; ++i) values += "," + std::to_string(i);
  const std::string wide = R"({"type":"object","properties":{"a":{"enum":[)" + values + "]}}}";
  std::string many = "{\"type\":\"object\",\"properties\":{";
  for (int i = 0; i < 20000; ++i) {
    many += (i > 0 ? "," : "") + std::string("\"p") + std::to_string(i) + "\":{\"type\":\"string\",\"minLength\":1}";
  }
  many += "}}";
  std::string below;  // the path where the nesting gets too deep
  for (int i = 0; i < 49; ++i) below += ".items";
  const std::pair<std::string, std::string> cases[] = {
      {deep, "s" + below},
      {wide, "s.properties.a.enum"},
      {many, "s"},
      {R"(false)", "s"},
      {R"(3)", "s"},
      {R"({"type":"text"})", "s.type"},
      {R"({"type":"object","properties":[1]})", "s.properties"},
      {R"({"type":"object","properties":{"a":3}})", "s.properties.a"},
      {R"({"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}})", "s.$ref"},
      {R"({"$ref":"#"})", "s.$ref"},
      {R"({"$ref":"#/$defs/missing"})", "s.$ref"},
      {R"({"$ref":"https://example.org/schema"})", "s.$ref"},
      {R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})", "s"},
      {R"({"type":"array","minItems":1,"items":{"$ref":"#"}})", "s"},
      {R"({"type":"string","maxLength":2000000000})", "s.maxLength"},
      {R"({"type":"string","minLength":50000})", "s.minLength"},
      {R"({"type":"array","maxItems":-1})", "s.maxItems"},
      {R"({"type":"string","pattern":"(a{1,5000}){1,5000}"})", "s.pattern"},
      {R"({"type":"object","patternProperties":{"a{999999}":{}}})", "s.patternProperties.a{999999}"},
      {R"({"enum":[]})", "s.enum"},
      {R"({"required":"a"})", "s.required"},
      {R"({"anyOf":[]})", "s.anyOf"},
  };
  for (const auto& [schema, path] : cases) {
    EXPECT_EQ(PathOf(schema), path) << schema.substr(0, 200);
    EXPECT_EQ(PathOf(schema, /*strict=*/false), path) << schema.substr(0, 200);
  }
}

// Branching references: the search for a finite value must not take every way through them.
TEST(SchemaCheckTest, ManyWaysThroughReferencesTakeNoTime) {
  std::string schema = R"({"$ref":"#/$defs/n0","$defs":{)";
  for (int i = 0; i < 40; ++i) {
    const std::string next = std::to_string((i + 1) % 40);
    schema += (i > 0 ? "," : "") + std::string("\"n") + std::to_string(i) +
              R"(":{"type":"object","required":["a","b"],"properties":{"a":{"$ref":"#/$defs/n)" + next +
              R"("},"b":{"$ref":"#/$defs/n)" + next + R"("}}})";
  }
  EXPECT_EQ(PathOf(schema + "}}"), "s");
}

TEST(SchemaCheckTest, PatternsHaveLimits) {
  EXPECT_TRUE(CheckPattern("^[a-z]{1,20}(-[0-9]{4})*$", "p").ok());
  EXPECT_TRUE(CheckPattern("a{b}", "p").ok());
  EXPECT_FALSE(CheckPattern(std::string(5000, 'a'), "p").ok());
  EXPECT_FALSE(CheckPattern("a{200000}", "p").ok());
  EXPECT_FALSE(CheckPattern("((a{1,100}){1,100}){1,1000}", "p").ok());
  EXPECT_FALSE(CheckPattern(std::string(200, '(') + std::string(200, ')'), "p").ok());
}

}  // namespace
}  // namespace k3
