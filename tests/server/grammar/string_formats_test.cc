#include "server/grammar/string_formats.h"

#include <gtest/gtest.h>

#include <regex>
#include <string>

#include "absl/strings/str_format.h"

namespace k3 {
namespace {

bool Fits(const char* format, const std::string& text) {
  return std::regex_match(text, std::regex(*FormatPattern(format)));
}

TEST(StringFormatsTest, DatesAreThoseOfTheCalendar) {
  constexpr int kDays[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
  const std::regex pattern(*FormatPattern("date"));
  for (const int year : {0, 1, 4, 100, 400, 1900, 1996, 1999, 2000, 2023, 2024, 2100, 9996, 9999}) {
    const bool leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    for (int month = 0; month <= 13; ++month) {
      for (int day = 0; day <= 32; ++day) {
        const bool in_month =
            month >= 1 && month <= 12 && day >= 1 && day <= kDays[month - 1] + (month == 2 && leap ? 1 : 0);
        const std::string text = absl::StrFormat("%04d-%02d-%02d", year, month, day);
        EXPECT_EQ(std::regex_match(text, pattern), year > 0 && in_month) << text;
      }
    }
  }
}

TEST(StringFormatsTest, FormatsAreAsNarrowAsTheirNames) {
  for (const char* text : {"00:00:00Z", "23:59:59+23:59", "12:34:56.789-05:30"})
    EXPECT_TRUE(Fits("time", text)) << text;
  for (const char* text :
       {"24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00:00", "1:00:00Z", "12:00:00.Z", "12:00:00+24:00"})
    EXPECT_FALSE(Fits("time", text)) << text;
  EXPECT_TRUE(Fits("date-time", "2024-02-29T12:00:00Z"));
  EXPECT_FALSE(Fits("date-time", "2023-02-29T12:00:00Z"));
  EXPECT_FALSE(Fits("date-time", "2023-09-31T12:00:00Z"));
  for (const char* text : {"0.0.0.0", "255.255.255.255", "10.1.20.199"}) EXPECT_TRUE(Fits("ipv4", text)) << text;
  for (const char* text : {"01.2.3.4", "256.1.1.1", "1.2.3", "1.2.3.4.5", "1.2.3."})
    EXPECT_FALSE(Fits("ipv4", text)) << text;
  for (const char* text : {"::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "fe80::1:2", "::ffff:1.2.3.4",
                           "1:2:3:4:5:6:1.2.3.4", "::2:3:4:5:6:7:8"})
    EXPECT_TRUE(Fits("ipv6", text)) << text;
  for (const char* text : {"", ":", ":::", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "1::2::3",
                           "12345::", "::ffff:01.2.3.4", "1:2:3:4:5:6:7:8::"})
    EXPECT_FALSE(Fits("ipv6", text)) << text;
  EXPECT_TRUE(Fits("email", "first.last+tag@mail.example.org"));
  for (const char* text : {"a", "a@", "@b", "a..b@c", "a@b..c", "a@-b", "a@b-", "a b@c"})
    EXPECT_FALSE(Fits("email", text)) << text;
  EXPECT_TRUE(Fits("hostname", "xn--bcher-kva.example"));
  for (const char* text : {"", "-a", "a-", "a..b", "a_b", "a."}) EXPECT_FALSE(Fits("hostname", text)) << text;
  for (const char* text : {"P1D", "P1Y2M3D", "PT1H2M3S", "P1DT12H", "P4W", "PT5M"})
    EXPECT_TRUE(Fits("duration", text)) << text;
  for (const char* text : {"P", "PT", "P1", "1D", "P1Y2D", "P1DT", "P1S", "P1W2D"})
    EXPECT_FALSE(Fits("duration", text)) << text;
  for (const char* text : {"http://a.b/c?d=e#f", "urn:x:y", "mailto:a@b", "file:///x", "a+b:", "http://u@h:80"})
    EXPECT_EQ(Fits("uri", text), std::string(text) != "file:///x") << text;
  for (const char* text : {"", "a", "//a", ":a", "1a:b", "http://a b", "http://[", "a:b%2", "a:{"})
    EXPECT_FALSE(Fits("uri", text)) << text;
  for (const char* text : {"", "a/b", "/a", "//h/a", "?q", "#f", "http://a"})
    EXPECT_TRUE(Fits("uri-reference", text)) << text;
  EXPECT_FALSE(Fits("uri-reference", "a b"));
  for (const char* text : {"/a/{b}", "{?x,y*}", "{+p:3}", ""}) EXPECT_TRUE(Fits("uri-template", text)) << text;
  for (const char* text : {"{", "{}", "{a,}", "a}"}) EXPECT_FALSE(Fits("uri-template", text)) << text;
  for (const char* text : {"", "/", "/a~1b/~0"}) EXPECT_TRUE(Fits("json-pointer", text)) << text;
  for (const char* text : {"a", "/~", "/~2"}) EXPECT_FALSE(Fits("json-pointer", text)) << text;
  for (const char* text : {"0", "1/a", "2#"}) EXPECT_TRUE(Fits("relative-json-pointer", text)) << text;
  for (const char* text : {"", "/a", "01", "0##"}) EXPECT_FALSE(Fits("relative-json-pointer", text)) << text;
  EXPECT_EQ(FormatPattern("colour"), nullptr);
  EXPECT_TRUE(Fits("uuid", "01234567-89ab-CDEF-0123-456789abcdef"));
  EXPECT_FALSE(Fits("uuid", "0123456789abCDEF0123456789abcdef"));
}

}  // namespace
}  // namespace k3
