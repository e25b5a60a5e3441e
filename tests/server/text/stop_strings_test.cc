#include "server/text/stop_strings.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace k3 {
namespace {

struct Result {
  std::string text;
  int matched = StopStrings::kNoMatch;

  bool operator==(const Result&) const = default;
};

Result Match(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  StopStrings matcher(stops);
  Result result;
  for (const std::string& piece : pieces) {
    result.matched = matcher.Append(piece, &result.text);
    if (result.matched != StopStrings::kNoMatch) return result;
  }
  matcher.Flush(&result.text);
  return result;
}

TEST(StopStrings, SpansPieces) {
  EXPECT_EQ(Match({"\nUser:"}, {"abc", "\nUs", "er", ": x"}), (Result{"abc", 0}));
  EXPECT_EQ(Match({"END", "NDX"}, {"aE", "ND", "X"}), (Result{"a", 0}));
  EXPECT_EQ(Match({"STOP"}, {"fooSTOPbar"}), (Result{"foo", 0}));
  EXPECT_EQ(Match({"😀"}, {"x😀y"}), (Result{"x", 0}));
  EXPECT_EQ(Match({"NDX", "END", "b"}, {"aENb"}), (Result{"aEN", 2}));
}

TEST(StopStrings, HoldsBackOnlyWhatCouldBeginAStop) {
  StopStrings matcher({"\nUser:", "Us!"});
  std::string text;
  EXPECT_EQ(matcher.Append("abc", &text), StopStrings::kNoMatch);
  EXPECT_EQ(text, "abc");
  EXPECT_EQ(matcher.Append("\nUs", &text), StopStrings::kNoMatch);
  EXPECT_EQ(text, "abc");
  EXPECT_EQ(matcher.Append("a", &text), StopStrings::kNoMatch);
  EXPECT_EQ(text, "abc\nUsa");
  EXPECT_EQ(matcher.Append("\n", &text), StopStrings::kNoMatch);
  EXPECT_EQ(text, "abc\nUsa");
  matcher.Flush(&text);
  EXPECT_EQ(text, "abc\nUsa\n");
}

TEST(StopStrings, OverlapsAndTies) {
  EXPECT_EQ(Match({"aab"}, {"aaaab"}), (Result{"aa", 0}));
  EXPECT_EQ(Match({"ababac"}, {"abab", "abac"}), (Result{"ab", 0}));
  EXPECT_EQ(Match({"c", "abc"}, {"xabc"}), (Result{"x", 1}));    // both end here: the longest
  EXPECT_EQ(Match({"abcd", "bc"}, {"abcd"}), (Result{"a", 1}));  // complete first
}

TEST(StopStrings, NothingPassesAfterAMatch) {
  StopStrings matcher({"x"});
  std::string text;
  EXPECT_EQ(matcher.Append("axb", &text), 0);
  EXPECT_EQ(matcher.Append("c", &text), 0);
  matcher.Flush(&text);
  EXPECT_EQ(text, "a");
  EXPECT_EQ(Match({}, {"any", "thing"}), (Result{"anything", StopStrings::kNoMatch}));
}

// Text after a flush is another text: it does not go on with what was held back before.
TEST(StopStrings, AFlushForgetsWhatWasBegun) {
  StopStrings matcher({"abcd", "xy"});
  std::string text;
  EXPECT_EQ(matcher.Append("1ab", &text), StopStrings::kNoMatch);
  matcher.Flush(&text);
  EXPECT_EQ(text, "1ab");
  EXPECT_EQ(matcher.Append("cd", &text), StopStrings::kNoMatch);
  EXPECT_EQ(text, "1abcd");
  EXPECT_EQ(matcher.Append("2abc", &text), StopStrings::kNoMatch);
  EXPECT_EQ(text, "1abcd2");
  EXPECT_EQ(matcher.Append("d3", &text), 0);
  EXPECT_EQ(text, "1abcd2");
}

// Against the definition, at every cut.
TEST(StopStrings, RandomAgainstDefinition) {
  std::mt19937 random(7);
  const auto word = [&](size_t least, size_t most) {
    std::string text;
    for (size_t n = least + random() % (most - least + 1); n > 0; --n) text.push_back("ab"[random() % 2]);
    return text;
  };
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stops;
    for (size_t n = 1 + random() % 3; n > 0; --n) stops.push_back(word(2, 6));
    const std::string text = word(0, 24);
    Result expected{text, StopStrings::kNoMatch};
    for (size_t end = 1; end <= text.size() && expected.matched == StopStrings::kNoMatch; ++end) {
      size_t longest = 0;
      for (size_t i = 0; i < stops.size(); ++i) {
        const size_t size = stops[i].size();
        if (size > end || size <= longest || text.compare(end - size, size, stops[i]) != 0) continue;
        longest = size;
        expected = {text.substr(0, end - size), static_cast<int>(i)};
      }
    }
    for (size_t cut = 0; cut <= text.size(); ++cut) {
      EXPECT_EQ(Match(stops, {text.substr(0, cut), text.substr(cut)}), expected);
    }
    std::vector<std::string> letters;
    for (const char c : text) letters.emplace_back(1, c);
    EXPECT_EQ(Match(stops, letters), expected);
  }
}

}  // namespace
}  // namespace k3
