#include "server/grammar/pattern_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace k3 {
namespace {

bool Passes(const std::string& pattern, bool strict = true) { return CheckPattern(pattern, "p", strict).ok(); }

TEST(PatternCheckTest, PatternsHaveLimits) {
  for (const bool strict : {true, false}) {
    EXPECT_TRUE(Passes("^[a-z]{1,20}(-[0-9]{4})*$", strict));
    EXPECT_TRUE(Passes("a{b}", strict));
    EXPECT_FALSE(Passes(std::string(5000, 'a'), strict));
    EXPECT_FALSE(Passes("a{200000}", strict));
    EXPECT_FALSE(Passes("((a{1,100}){1,100}){1,1000}", strict));
    EXPECT_FALSE(Passes(std::string(200, '(') + std::string(200, ')'), strict));
  }
}

TEST(PatternCheckTest, AnchorsHoldAtTheEndsOnly) {
  for (const char* pattern : {"^a$", "^(a|b)$", "(^a|^b)c", "^a|b$", "(^a)?b", "a(b$|c$)", "^(?:x(y$|z$))", "[$^]",
                              "\\^a\\$b", "(^)a", "^^a$$", "(?<name>^a)", "^$", ""}) {
    EXPECT_TRUE(Passes(pattern)) << pattern;
  }
  for (const char* pattern :
       {"a^b", "a$b", "(a$|b)c", "a(^b|c)", "a*^b", "a$b*", "(^a)+", "(^a){1,3}", "(a$)*", "(a|)^b", "a()$b"}) {
    EXPECT_FALSE(Passes(pattern)) << pattern;
    EXPECT_TRUE(Passes(pattern, /*strict=*/false)) << pattern;
  }
}

TEST(PatternCheckTest, WhatIsNoRegularExpressionSaysWhere) {
  const std::pair<const char*, const char*> cases[] = {
      {"(a", "character 3"},   {"a)", "character 2"},     {"[a", "character 1"},      {"[]", "character 1"},
      {"*a", "character 1"},   {"a**", "character 3"},    {"a{2}{3}", "character 5"}, {"a{3,1}", "below"},
      {"a{,3}", "{0,n}"},      {"[z-a]", "range"},        {"[a-\\d]", "range"},       {"\\u12", "hexadecimal"},
      {"\\x{41}", "\\u{...}"}, {"\\x4", "hexadecimal"},   {"a\\", "escape"},          {"(?i:a)", "unknown kind"},
      {"(?<n", "name"},        {"\\u{110000}", "number"}, {"\\p{L", "Unicode"}};
  for (const auto& [pattern, why] : cases) {
    for (const bool strict : {true, false}) {
      const absl::Status status = CheckPattern(pattern, "p", strict);
      EXPECT_THAT(std::string(status.message()), ::testing::StartsWith("p: no regular expression: ")) << pattern;
      EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(why)) << pattern;
    }
  }
  for (const char* pattern : {"a{b}", "a{", "}", "]", "[^]", "[\\]a]", "a+?", "a{2}?", "(?P<n>a)", "(|a)", "a|", "[a-]",
                              "[-a]", "[\\d-z]", "\\u{1f600}", "\\-\\_", "(?i)a", "\xc3\xbc*"}) {
    EXPECT_TRUE(Passes(pattern)) << pattern << " " << CheckPattern(pattern, "p", true);
  }
}

TEST(PatternCheckTest, ManyCharactersOfAnyKindAreRefusedAtOnce) {
  for (const char* pattern :
       {".{1,200}x", "(.{1,20}){1,10}", "[^a]{129}", "[\\s\\S]{0,500}a", "a.{200,}", "\\S{150}-"}) {
    const absl::Status status = CheckPattern(pattern, "p", true);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("too long to follow; at most 128")) << pattern;
    EXPECT_TRUE(Passes(pattern, /*strict=*/false)) << pattern;
  }
  for (const char* pattern : {".*", ".+x.*", "a.{1,100}b", "[a-z]{1,500}", "^.{1,2000}$", ".{5000,}", "\\d{400}"}) {
    EXPECT_TRUE(Passes(pattern)) << pattern;
  }
  EXPECT_EQ(AnyCharacters("^.{3,2000}$")->most, 2000);
  EXPECT_EQ(AnyCharacters(".{3}")->most, 3);
  EXPECT_EQ(AnyCharacters(".{3,}")->most, -1);
  EXPECT_EQ(AnyCharacters(".{3,}")->least, 3);
  for (const char* pattern : {".{3,2}", ".{a}", ".{}", ".{1,2}x", "x.{1,2}", ".*", ".{1,2}{3}", ".{-1}"}) {
    EXPECT_FALSE(AnyCharacters(pattern).has_value()) << pattern;
  }
}

TEST(PatternCheckTest, WhatTheLibraryWouldLeaveOutIsRefused) {
  for (const char* pattern :
       {"(?=a)b", "^(?!no).*$", "(?<=a)b", "(?<!a)b", "\\Aab", "ab\\Z", "\\bab", "\\p{L}", "(a)\\1"}) {
    EXPECT_FALSE(Passes(pattern)) << pattern;
  }
  for (const char* pattern : {"\\d\\D\\w\\W\\s\\S\\n\\t\\x41\\u0041", "[\\b]", "a+?b*?", "[(?=]", "\\(?=a"}) {
    EXPECT_TRUE(Passes(pattern)) << pattern;
  }
}

TEST(PatternCheckTest, CharactersThatJsonEscapesAreRefusedInStrings) {
  const auto passes = [](const char* pattern) { return CheckPatternInString(pattern, "p").ok(); };
  for (const char* pattern : {"^say \"hi\"$", "^C:\\\\dir$", "a\\nb", "a\nb", "^[\"\\\\]{3}$", "^\\x22$", "\\x{5c}",
                              "\\cA", "\\u0000", "\\0", "[\\n\\t]", "[\\b]", "[\\x00-\\x1f]", "\\\"", "(\\t)?"}) {
    EXPECT_FALSE(passes(pattern)) << pattern;
  }
  for (const char* pattern : {"^[ -~]{60}$", "[^\"]", "[^\\\\]+", "[\"a]", "[\\x1f-#]", "\\s\\S\\d.", "\\u0041\\x41",
                              "\\.\\/", "a-b", "[-\"]", "[\"-]", "\xc3\xbc"}) {
    EXPECT_TRUE(passes(pattern)) << pattern;
  }
}

TEST(PatternCheckTest, HalfSurrogatePairsAreRefused) {
  for (const bool strict : {true, false}) {
    EXPECT_FALSE(Passes("^\\ud83d\\ude00$", strict));
    EXPECT_FALSE(Passes("[\\ud800-\\udbff]", strict));
    EXPECT_TRUE(Passes("\\u{1f600}\\ud7ff\\ue000", strict));
    EXPECT_TRUE(Passes("\\\\ud800", strict));  // an escaped backslash before it
  }
}

TEST(PatternCheckTest, OtherCharactersAreWrittenByNumber) {
  EXPECT_EQ(AsciiPattern("^[a-z]\\d$"), "^[a-z]\\d$");
  EXPECT_EQ(AsciiPattern("\xc3\xbc+"), "\\u{fc}+");
  EXPECT_EQ(AsciiPattern("[^\xe5\x90\x8d\xf0\x9f\x98\x80]"), "[^\\u{540d}\\u{1f600}]");
  EXPECT_EQ(AsciiPattern("\\\xc3\xbc"), "\\u{fc}");                             // escaped without need
  EXPECT_EQ(AsciiPattern("\\\\\xc3\xbc"), "\\\\\\u{fc}");                       // behind an escaped backslash
  EXPECT_EQ(AsciiPattern("^{a{2}{b}\\u{41}[{]$"), "^\\{a{2}\\{b}\\u{41}[{]$");  // braces that repeat nothing
  EXPECT_EQ(AsciiPattern("(?P<name>a)"), "(?<name>a)");
  EXPECT_EQ(AsciiPattern("(?i)(ab+)?c?(?:d){2}?e*?[)?]?"), "(?i)(ab+){0,1}c?(?:d){2}e*[)?]?");
  EXPECT_EQ(AsciiPattern("a\nb\x7f"), "a\\u{a}b\\u{7f}");
}

}  // namespace
}  // namespace k3
