#include "server/grammar/schema_check.h"

#include <gtest/gtest.h>

#include <string>

#include "server/grammar/schema_strict.h"
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
           R"({"type":"integer","minimum":1,"maximum":30,"multipleOf":3})",
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

// What the grammar library would leave out, or let come out differently, has its place named; the fix is another
// schema.
TEST(SchemaCheckTest, KeywordsThatWorkOnlyTogetherAreRefusedApart) {
  const std::pair<const char*, const char*> cases[] = {
      // Without a type beside them they are not looked at.
      {R"({"pattern":"^a"})", "s.pattern"},
      {R"({"minLength":2})", "s.minLength"},
      {R"({"maximum":3})", "s.maximum"},
      {R"({"exclusiveMinimum":3})", "s.exclusiveMinimum"},
      {R"({"minItems":2})", "s.minItems"},
      {R"({"required":["a"]})", "s.required"},
      {R"({"minProperties":1})", "s.minProperties"},
      {R"({"patternProperties":{"^a":{}}})", "s.patternProperties"},
      {R"({"propertyNames":{"pattern":"^a"}})", "s.propertyNames"},
      {R"({"type":"array","items":{"pattern":"^a"}})", "s.items.pattern"},
      // A type beside what decides alone.
      {R"({"type":"string","const":5})", "s.const"},
      {R"({"type":"integer","enum":[1,2.5]})", "s.enum[1]"},
      {R"({"type":["string","null"],"enum":["a",null,5]})", "s.enum[2]"},
      {R"({"type":"object","anyOf":[{"type":"object"},{"type":"null"}]})", "s.anyOf[1]"},
      {R"({"type":"integer","allOf":[{"type":"number"}]})", "s.allOf[0]"},
      {R"({"type":"string","oneOf":[{"$ref":"#/$defs/a"}],"$defs":{"a":{"type":"array"}}})", "s.oneOf[0]"},
      // One of, where more than one may fit.
      {R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", "s.oneOf"},
      {R"({"oneOf":[{"enum":[1,2]},{"const":2.0}]})", "s.oneOf"},
      {R"({"oneOf":[{"type":"string","pattern":"^a"},{"type":"string","pattern":"^b"}]})", "s.oneOf"},
      {R"({"oneOf":[{"type":"object","properties":{"a":{}}},{"type":"object","properties":{"b":{}}}]})", "s.oneOf"},
      {R"({"oneOf":[{"type":"string"},{"minLength":3}]})", "s.oneOf[1].minLength"},
      // Numbers.
      {R"({"type":"integer","multipleOf":2.5})", "s.multipleOf"},
      {R"({"type":"integer","multipleOf":2000})", "s.multipleOf"},
      {R"({"type":"integer","multipleOf":3,"minimum":0})", "s.multipleOf"},
      {R"({"type":"integer","multipleOf":3,"minimum":0,"maximum":100000})", "s.multipleOf"},
      {R"({"type":["integer","null"],"multipleOf":3})", "s.multipleOf"},
      {R"({"type":"integer","minimum":1e30})", "s.minimum"},
      {R"({"type":"integer","maximum":-1e30})", "s.maximum"},
      {R"({"type":"object","properties":{"a":false},"additionalProperties":true})", "s.properties.a"},
      {R"({"type":"object","patternProperties":{"^x":false}})", "s.patternProperties.^x"},
      {R"({"type":"number","exclusiveMinimum":0,"maximum":1e-7})", "s.exclusiveMinimum"},
      // Objects.
      {R"({"type":"object","required":["a"],"additionalProperties":false})", "s.required[0]"},
      {R"({"type":"object","properties":{"a":{}},"required":["a","b"],"additionalProperties":false})", "s.required[1]"},
      {R"({"type":"object","properties":{"a":{}},"patternProperties":{"^x":{}}})", "s.patternProperties"},
      {R"({"type":"object","required":["x"],"patternProperties":{"^x":{}}})", "s.required[0]"},
      {R"({"type":"object","patternProperties":{"^x":{},"^xy":{}}})", "s.patternProperties"},
      {R"({"type":"object","patternProperties":{"^x":{}},"propertyNames":{"maxLength":3}})", "s.patternProperties"},
      {R"({"type":"object","patternProperties":{"^x":{}},"propertyNames":{"type":"string","maxLength":3}})",
       "s.patternProperties"},
      {R"({"type":"object","properties":{"a":{}},"propertyNames":{"type":"string"}})", "s.propertyNames"},
      {R"({"type":"object","propertyNames":{"type":"string"},"additionalProperties":false})", "s.propertyNames"},
      {R"({"type":"object","propertyNames":{"enum":["a",1]}})", "s.propertyNames"},
      {R"({"type":"object","patternProperties":{"^x":{}},"minProperties":2})", "s.minProperties"},
      {R"({"type":"object","dependentRequired":{"a":["b"]}})", "s.dependentRequired"},
      {R"({"type":"object","dependentSchemas":{"a":{}}})", "s.dependentSchemas"},
      {R"({"type":"object","dependencies":{"a":["b"]}})", "s.dependencies"},
      // Lists.
      {R"({"type":"array","items":{"type":"integer"},"contains":{"const":1}})", "s.contains"},
      {R"({"type":"array","minContains":1})", "s.minContains"},
      // Patterns.
      {R"({"type":"string","pattern":"^(?!no).*$"})", "s.pattern"},
      {R"({"type":"string","pattern":"a^b"})", "s.pattern"},
      {R"({"type":"object","patternProperties":{"(a$|b)c":{}}})", "s.patternProperties.(a$|b)c"},
      // References.
      {R"({"$ref":"#/x-shared","x-shared":{"not":{}}})", "s.$ref.not"},
      {R"({"type":"array","items":{"$id":"http://x/y","$ref":"#/$defs/a"},"$defs":{"a":{}}})", "s.items.$id"},
      {R"({"then":{}})", "s.then"},
      {R"({"$dynamicRef":"#x"})", "s.$dynamicRef"},
  };
  for (const auto& [schema, path] : cases) {
    EXPECT_EQ(PathOf(schema), path) << schema;
    EXPECT_EQ(PathOf(schema, /*strict=*/false), "") << schema;
  }
}

TEST(SchemaCheckTest, BoundsThatLeaveNothingAreNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"type":"string","minLength":3,"maxLength":2})", "s.minLength"},
      {R"({"type":"array","minItems":3,"maxItems":2})", "s.minItems"},
      {R"({"type":"array","prefixItems":[{}],"items":false,"minItems":2})", "s.minItems"},
      {R"({"type":"array","prefixItems":[{},false],"minItems":2})", "s.minItems"},
      {R"({"type":"object","properties":{"a":{}},"minProperties":2})", "s.minProperties"},
      {R"({"type":"object","properties":{"a":{},"b":{}},"required":["a","b"],"maxProperties":1})", "s.maxProperties"},
      {R"({"type":"object","properties":{"a":false},"required":["a"]})", "s.required"},
      {R"({"type":"object","additionalProperties":false,"minProperties":1})", "s.minProperties"},
      {R"({"type":"integer","minimum":9,"maximum":1})", "s.minimum"},
      {R"({"type":"integer","minimum":0.2,"maximum":0.8})", "s.minimum"},
      {R"({"type":"integer","exclusiveMinimum":3,"exclusiveMaximum":4})", "s.exclusiveMinimum"},
      {R"({"type":"integer","minimum":8,"maximum":13,"multipleOf":7})", "s.multipleOf"},
      {R"({"type":"number","exclusiveMinimum":3,"maximum":3})", "s.exclusiveMinimum"},
      {R"({"type":"integer","multipleOf":0})", "s.multipleOf"},
      {R"({"type":"string","minLength":1.5})", "s.minLength"},
      {R"({"type":"string","minLength":"2"})", "s.minLength"},
      {R"({"anyOf":[false,false]})", "s.anyOf[0]"},
      {R"({"allOf":[false]})", "s.allOf[0]"},
  };
  for (const auto& [schema, path] : cases) {
    EXPECT_EQ(PathOf(schema), path) << schema;
    EXPECT_EQ(PathOf(schema, /*strict=*/false), path) << schema;
  }
}

TEST(SchemaCheckTest, FixedNumbersKeepTheirValue) {
  EXPECT_EQ(PathOf(R"({"const":18446744073709551615})"), "s.const");
  EXPECT_EQ(PathOf(R"({"const":[1,{"a":-9223372036854775809}]})"), "s.const");
  EXPECT_EQ(PathOf(R"({"type":"integer","enum":[1,12345678901234567890123456789]})"), "s.enum[1]");
  EXPECT_EQ(PathOf(R"({"enum":[9223372036854775807,-9223372036854775808,1.5]})"), "");
  EXPECT_EQ(PathOf(R"({"const":18446744073709551615})", /*strict=*/false), "");
}

TEST(SchemaCheckTest, WhatIsEnforcedPasses) {
  for (const char* schema : {
           R"({"type":"string","enum":["a","b"]})",
           R"({"type":"number","enum":[1,2.5]})",
           R"({"type":"integer","const":3.0})",
           R"({"type":["object","null"],"anyOf":[{"type":"object","properties":{}},{"type":"null"}]})",
           R"({"oneOf":[{"type":"string"},{"type":"integer"},{"type":"null"}]})",
           R"({"oneOf":[{"const":"a"},{"enum":["b","c"]},{"type":"boolean"}]})",
           R"({"discriminator":{"propertyName":"kind"},"oneOf":[{"$ref":"#/$defs/cat"},{"$ref":"#/$defs/dog"}],"$defs":{
               "cat":{"type":"object","properties":{"kind":{"const":"cat"},"lives":{"type":"integer"}},"required":["kind"]},
               "dog":{"type":"object","properties":{"kind":{"const":"dog"}},"required":["kind"]}}})",
           R"({"oneOf":[{"type":"object","properties":{"a":{"type":"string"}},"required":["a"]},
                        {"type":"object","properties":{"b":{"type":"string"}},"required":["b"]}]})",
           R"({"type":"integer","multipleOf":5,"minimum":0,"maximum":1000})",
           R"({"type":"number","minimum":0.5,"maximum":0.5})",
           R"({"type":"string","format":"date","maxLength":10})",
           R"({"type":"string","pattern":"^(a|b$)|c$"})",
           R"({"type":"array","minItems":2})",
           R"({"type":"array","prefixItems":[true,{"type":"string"}]})",
           R"({"type":"object","required":["a"],"additionalProperties":{"type":"integer"}})",
           R"({"type":"object","patternProperties":{"^x-[a-z]+$":{"type":"integer"}},"additionalProperties":false})",
           R"({"type":"object","propertyNames":{"enum":["a","b"]},"additionalProperties":{"type":"boolean"}})",
           R"({"type":"object","propertyNames":{"maxLength":3}})",
           R"({"type":"object","properties":{"a":{},"b":{},"c":{}},"minProperties":2,"maxProperties":2})",
           R"({"type":"object","additionalProperties":true,"minProperties":2,"maxProperties":3})",
           R"({"$ref":"#/x-shared","x-shared":{"type":"string"}})",
           R"({"type":"object","properties":{"a":false,"b":{"type":"string"}}})",
           R"({"anyOf":[false,{"type":"string"}]})",
           R"({"type":"array","prefixItems":[{"type":"string"},false]})",
           R"({"type":"string","minLength":2.0,"maxLength":1e1})",
           R"({"type":"integer","minimum":0.5,"maximum":1e30})",
           R"({"type":"integer","exclusiveMinimum":-1e30})",
           R"({"$ref":"#/$defs/a~1b~0c","$defs":{"a/b~c":{"type":"string"}}})",
           R"({"$ref":"#/$defs/a%20b%C3%BC","$defs":{"a b\u00fc":{"type":"string"}}})",
           R"({"type":"array","prefixItems":[{"type":"string"},{"$ref":"#/prefixItems/0"}]})",
           R"({"anyOf":[{"type":"null"},{"type":"array","items":{"$ref":"#/anyOf/1"}}]})",
           R"({"$ref":"#/$defs//x","$defs":{"":{"x":{"type":"string"}}}})",
       }) {
    EXPECT_EQ(PathOf(schema), "") << schema;
  }
}

}  // namespace
}  // namespace k3
