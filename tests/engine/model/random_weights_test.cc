#include "engine/model/random_weights.h"

#include <array>
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/core/bfloat16.h"

namespace k3 {
namespace {

TEST(RandomWeightsTest, NormalNumbersHaveTheirMoments) {
  constexpr int kCount = 200000;
  double sum = 0, squares = 0, cubes = 0, fourth = 0;
  for (int i = 0; i < kCount; ++i) {
    const double x = RandomNormal(42, i);
    ASSERT_TRUE(std::isfinite(x));
    sum += x, squares += x * x, cubes += x * x * x, fourth += x * x * x * x;
  }
  EXPECT_NEAR(sum / kCount, 0, 0.01);
  EXPECT_NEAR(squares / kCount, 1, 0.02);
  EXPECT_NEAR(cubes / kCount, 0, 0.05);
  EXPECT_NEAR(fourth / kCount, 3, 0.1);
}

TEST(RandomWeightsTest, StreamsDependOnSeedNameAndRank) {
  EXPECT_EQ(RandomSeed(1, "a", 0), RandomSeed(1, "a", 0));
  EXPECT_NE(RandomSeed(1, "a", 0), RandomSeed(2, "a", 0));
  EXPECT_NE(RandomSeed(1, "a", 0), RandomSeed(1, "b", 0));
  EXPECT_NE(RandomSeed(1, "a", 0), RandomSeed(1, "a", 1));
  EXPECT_NE(RandomNormal(RandomSeed(1, "a", 0), 0), RandomNormal(RandomSeed(1, "a", 0), 1));
}

TEST(RandomWeightsTest, PackedExpertsHaveAboutTheWantedDeviation) {
  constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (float wanted : {0.01f, 0.0167f, 0.125f, 1.0f}) {
    std::array<uint8_t, 5003> codes;  // no multiple of eight
    WriteRandomBytes(3, codes.data(), codes.size());
    const double scale = std::ldexp(1.0, RandomScaleCode(wanted) - 127);
    double squares = 0;
    std::array<int, 16> seen{};
    for (uint8_t byte : codes) {
      for (int code : {byte & 15, byte >> 4}) {
        ++seen[code];
        squares += std::pow(kMagnitudes[code & 7] * scale, 2);
      }
    }
    const double deviation = std::sqrt(squares / (2 * codes.size()));
    EXPECT_GT(deviation, wanted / 1.5);
    EXPECT_LT(deviation, wanted * 1.5);
    for (int count : seen) EXPECT_GT(count, 400);
  }
  EXPECT_EQ(RandomScaleCode(1e-38f), 1);  // never the NaN code or zero
}

TEST(RandomWeightsTest, MatricesFollowTheirTensor) {
  HostTensor tensor;
  tensor.dtype = DType::kBF16;
  tensor.shape = {3, 5};
  tensor.random_stddev = 0.5f;
  tensor.random_seed = 9;
  std::array<uint16_t, 15> values;
  WriteRandomBf16(tensor, values.data());
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], FloatToBf16(0.5f * RandomNormal(9, i)));
}

}  // namespace
}  // namespace k3
