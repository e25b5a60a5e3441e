#include "engine/model/json_cursor.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;

TEST(JsonCursorTest, ReadsStringsWithEscapes) {
  JsonCursor json(R"( "plain" "a\"\\\/\b\f\n\r\tz" "\u00e9\u20ac\ud83d\ude00" "")");
  std::string_view text;
  ASSERT_TRUE(json.String(&text));
  EXPECT_EQ(text, "plain");
  ASSERT_TRUE(json.String(&text));
  EXPECT_EQ(text, "a\"\\/\b\f\n\r\tz");
  ASSERT_TRUE(json.String(&text));
  EXPECT_EQ(text, "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
  ASSERT_TRUE(json.String(&text));
  EXPECT_EQ(text, "");
  EXPECT_TRUE(json.AtEnd());
}

TEST(JsonCursorTest, RefusesBrokenStrings) {
  for (const char* text : {"", "x", "\"", "\"abc", "\"a\nb\"", R"("\)", R"("\x")", R"("\u12")", R"("\u12g4")",
                           R"("\ud800")", R"("\ud800\u0041")", R"("\udc00")"}) {
    JsonCursor json(text);
    std::string_view out;
    EXPECT_FALSE(json.String(&out)) << text;
    EXPECT_THAT(json.error(), HasSubstr("expected")) << text;
  }
}

TEST(JsonCursorTest, ReadsUnsigned) {
  JsonCursor json(" 0 7 18446744073709551615");
  uint64_t value = 1;
  ASSERT_TRUE(json.Unsigned(&value));
  EXPECT_EQ(value, 0u);
  ASSERT_TRUE(json.Unsigned(&value));
  EXPECT_EQ(value, 7u);
  ASSERT_TRUE(json.Unsigned(&value));
  EXPECT_EQ(value, UINT64_MAX);
  for (const char* text : {"", "-1", "01", "1.0", "1e3", "18446744073709551616", "99999999999999999999999", "true"}) {
    JsonCursor wrong(text);
    EXPECT_FALSE(wrong.Unsigned(&value)) << text;
  }
}

TEST(JsonCursorTest, SkipsValuesWithoutRecursion) {
  for (const char* text : {"1", "-1.5e+3", "true", "null", "\"a]b\"", "[]", "{}", "[1, {\"a\": [2, \"]\"]}]"}) {
    JsonCursor json(text);
    EXPECT_TRUE(json.SkipValue(8)) << text << ": " << json.error();
    EXPECT_TRUE(json.AtEnd()) << text;
  }
  for (const char* text : {"", "]", ",", ":", "[", "{\"a\"", "@"}) {
    JsonCursor json(text);
    EXPECT_FALSE(json.SkipValue(8)) << text;
  }
  const std::string deep(5'000'000, '[');
  JsonCursor json(deep);
  EXPECT_FALSE(json.SkipValue(8));
  EXPECT_THAT(json.error(), HasSubstr("at most 8 nested brackets"));
}

TEST(JsonCursorTest, ErrorsSayWhere) {
  JsonCursor json("  {x");
  ASSERT_TRUE(json.Expect('{'));
  EXPECT_FALSE(json.Expect('}'));
  EXPECT_EQ(json.error(), "expected '}' at byte 3, found 'x'");
}

}  // namespace
}  // namespace k3
