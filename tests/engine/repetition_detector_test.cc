#include "engine/repetition_detector.h"

#include <gtest/gtest.h>

#include <random>

namespace k3 {
namespace {

// Index of the token at which it is noticed, or -1.
int Noticed(int32_t max_period, int32_t count, const std::vector<int32_t>& tokens) {
  RepetitionDetector detector;
  detector.Begin(max_period, count, static_cast<int32_t>(tokens.size()));
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (detector.Add(std::span(tokens).first(i + 1))) return static_cast<int>(i);
  }
  return -1;
}

int NoticedBySearch(int32_t max_period, int32_t count, const std::vector<int32_t>& tokens) {
  for (size_t end = 1; end <= tokens.size(); ++end) {
    for (size_t period = 1; period <= static_cast<size_t>(max_period); ++period) {
      const size_t length = period * static_cast<size_t>(count);
      if (length > end) break;
      bool same = true;
      for (size_t i = end - length + period; i < end; ++i) same &= tokens[i] == tokens[i - period];
      if (same) return static_cast<int>(end) - 1;
    }
  }
  return -1;
}

TEST(RepetitionDetectorTest, NoticesTheLastCopy) {
  EXPECT_EQ(Noticed(1, 3, {5, 5, 5}), 2);
  EXPECT_EQ(Noticed(2, 3, {1, 2, 1, 2, 1, 2, 9}), 5);
  EXPECT_EQ(Noticed(1, 3, {1, 2, 1, 2, 1, 2}), -1);  // the period is longer than allowed
  EXPECT_EQ(Noticed(3, 2, {9, 1, 2, 3, 1, 2, 3}), 6);
  EXPECT_EQ(Noticed(3, 2, {1, 2, 3, 1, 2, 4}), -1);
}

TEST(RepetitionDetectorTest, IsOffWithoutPeriodOrCount) {
  const std::vector<int32_t> same(50, 1);
  EXPECT_EQ(Noticed(0, 3, same), -1);
  EXPECT_EQ(Noticed(4, 0, same), -1);
  EXPECT_EQ(Noticed(4, 1, same), -1);  // one copy is no repetition
}

TEST(RepetitionDetectorTest, AgreesWithASearch) {
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    std::vector<int32_t> tokens(random() % 40);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 2);
    const int32_t period = static_cast<int32_t>(1 + random() % 8), count = static_cast<int32_t>(2 + random() % 3);
    ASSERT_EQ(Noticed(period, count, tokens), NoticedBySearch(period, count, tokens));
  }
}

TEST(RepetitionDetectorTest, PeriodsAreWatchedUpToALimit) {
  const int32_t longest = RepetitionDetector::kLongestPeriod;
  for (int32_t period : {longest, longest + 1}) {
    std::vector<int32_t> tokens(static_cast<size_t>(2 * period));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i) % period;
    EXPECT_EQ(Noticed(INT32_MAX, 2, tokens), period == longest ? 2 * period - 1 : -1);
  }
}

}  // namespace
}  // namespace k3
