#include <gtest/gtest.h>

#include <ctime>
#include <string>

#include "server/text/field_error.h"
#include "server/text/json_parser.h"
#include "server/text/json_value.h"
#include "server/text/json_writer.h"

namespace k3 {
namespace {

std::string Python(const std::string& text) {
  return WriteJson(ParseJson(text, {.python = true}).value(), {.spaces = true});
}

TEST(JsonWriter, NumbersAsPythonPrintsThem) {
  const std::pair<const char*, const char*> cases[] = {
      {"1e3", "1000.0"},
      {"1.50", "1.5"},
      {"1e-7", "1e-07"},
      {"0.0001", "0.0001"},
      {"0.00001", "1e-05"},
      {"-0", "0"},
      {"-0.0", "-0.0"},
      {"1E400", "Infinity"},
      {"-1e400", "-Infinity"},
      {"NaN", "NaN"},
      {"1e16", "1e+16"},
      {"1e15", "1000000000000000.0"},
      {"123456789012345678", "123456789012345678"},
      {"123456789012345678901234567890", "123456789012345678901234567890"},
      {"1.7976931348623157e308", "1.7976931348623157e+308"},
      {"5e-324", "5e-324"},
      {"0.1", "0.1"},
      {"100.0", "100.0"},
      {"12.75e1", "127.5"},
      {"3.14159", "3.14159"},
      {"1e100", "1e+100"},
      {"-2.5E-3", "-0.0025"},
      {"0", "0"},
      {"0.30000000000000004", "0.30000000000000004"},
      {"9007199254740993.0", "9007199254740992.0"}};
  for (const auto& [literal, printed] : cases) {
    EXPECT_EQ(Python(literal), printed);
    EXPECT_EQ(WriteJson(ParseJson(literal, {.python = true}).value(), {.number_as_written = true}), literal);
  }
}

TEST(JsonWriter, StylesAndOrder) {
  const JsonValue value = ParseJson(R"({"b": [1, {"z": 0, "a": null}], "a": "x", "é": true, "Z": {}})").value();
  EXPECT_EQ(WriteJson(value, {}), R"({"b":[1,{"z":0,"a":null}],"a":"x","é":true,"Z":{}})");
  EXPECT_EQ(WriteJson(value, {.sort_keys = true}), R"({"Z":{},"a":"x","b":[1,{"a":null,"z":0}],"é":true})");
  EXPECT_EQ(WriteJson(value, {.spaces = true}), R"({"b": [1, {"z": 0, "a": null}], "a": "x", "é": true, "Z": {}})");
}

TEST(JsonWriter, Strings) {
  EXPECT_EQ(Python(R"("q\" b\\ s\/ \b\f\n\r\t \u0000\u001f\u007f é😀")"),
            "\"q\\\" b\\\\ s/ \\b\\f\\n\\r\\t \\u0000\\u001f\x7f é😀\"");
  EXPECT_EQ(Python(R"("\ud83d\ude00\u4e2d")"), "\"😀中\"");
}

TEST(JsonParser, DuplicateKeysKeepTheFirstPlaceAndTheLastValue) {
  EXPECT_EQ(Python(R"({"a": 1, "b": 2, "a": 3})"), R"({"a": 3, "b": 2})");
  std::string wide = "{";
  for (int i = 0; i < 100; ++i)
    wide += "\"k" + std::to_string(i % 50) + "\":" + std::to_string(i) + (i < 99 ? "," : "}");
  const JsonValue value = ParseJson(wide).value();
  ASSERT_EQ(value.keys.size(), 50u);
  EXPECT_EQ(value.keys[7], "k7");
  EXPECT_EQ(value.Find("k7")->text, "57");
}

TEST(JsonParser, Errors) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[1,]",
                           "{\"a\":1,}",
                           "{a:1}",
                           "01",
                           "1.",
                           ".5",
                           "1e",
                           "+1",
                           "-",
                           "nul",
                           "tru",
                           "[1 2]",
                           "\"a",
                           "\"\\x\"",
                           "\"\\u12\"",
                           "\"\t\"",
                           "1 2",
                           "{\"a\" 1}",
                           "NaN",
                           "Infinity",
                           "'a'",
                           "[\"\xff\"]",
                           "\xEF\xBB\xBF{}",
                           "\"\\",
                           "\"\\ud83d\"",
                           "\"\\ude00\"",
                           "\"\\ud83d\\ud83d\\ude00\""}) {
    const auto value = ParseJson(text);
    EXPECT_EQ(value.status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_EQ(ParseJson("[1,]").status().message(), "[1]: expected a value at byte 3");
  EXPECT_EQ(ParseJson("{").status().message(), "expected a key at byte 1");
}

TEST(JsonParser, HalfASurrogatePairNamesItsField) {
  const auto value = ParseJson(R"({"messages": [{"content": "ok"}, {"content": [{"text": "a \ud83d"}]}]})");
  EXPECT_EQ(FieldErrorPath(value.status()), "messages[1].content[0].text");
  EXPECT_EQ(value.status().message(), "messages[1].content[0].text: half a surrogate pair at byte 64");
  EXPECT_EQ(Python(R"("a \ud83d b \ude00\ud83d\ude00")"), "\"a \uFFFD b \uFFFD😀\"");
}

TEST(JsonParser, DepthIsBounded) {
  for (const size_t depth : {129, 1000, 100000}) {
    for (const std::string open : {"[", "{\"a\":"}) {
      std::string text;
      for (size_t i = 0; i < depth; ++i) text += open;
      EXPECT_EQ(ParseJson(text).status().code(), absl::StatusCode::kInvalidArgument);
    }
  }
  EXPECT_TRUE(ParseJson(std::string(128, '[') + std::string(128, ']')).ok());
  EXPECT_FALSE(ParseJson("[[0]]", {.max_depth = 1}).ok());
  EXPECT_FALSE(ParseJson("[0,0,0]", {.max_values = 3}).ok());
  EXPECT_TRUE(ParseJson("[0,0,0]", {.max_values = 4}).ok());
}

TEST(JsonParser, WideObjectsTakeLinearTime) {
  std::string text = "{";
  for (int i = 0; i < 200000; ++i) text += "\"key" + std::to_string(i) + "\":0,";
  text += "\"last\":1}";
  const std::clock_t begin = std::clock();
  EXPECT_EQ(ParseJson(text).value().keys.size(), 200001u);
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 5.0);  // quadratic: minutes
}

TEST(JsonValue, SetAndFind) {
  JsonValue value = JsonValue::Object();
  value.Set("a", JsonValue::Integer(1));
  value.Set("b", JsonValue::Float(2.5));
  value.Set("a", JsonValue::Array({JsonValue::Bool(true), JsonValue()}));
  EXPECT_EQ(WriteJson(value, {}), R"({"a":[true,null],"b":2.5})");
  EXPECT_EQ(value.Find("c"), nullptr);
  EXPECT_EQ(value.Find("b")->AsDouble(), 2.5);
}

}  // namespace
}  // namespace k3
