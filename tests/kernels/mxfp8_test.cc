#include "kernels/core/mxfp8.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "tests/kernels/op_fixture.h"
#include "tests/kernels/oracle.h"

namespace k3::testing {
namespace {

using Group = std::array<float, kMxfp8Group>;

Group Rounded(Group group) {
  RoundToMxfp8(group.data());
  return group;
}

TEST(Mxfp8Test, KeepsWhatItCanHold) {
  Group group = {448, -416, 240, 1, 0.015625f, 0.001953125f, -0.0f, 0};
  EXPECT_EQ(Rounded(group), group);
  EXPECT_TRUE(std::signbit(Rounded(group)[6]));
  for (float& x : group) x *= 0x1p-40f;
  EXPECT_EQ(Rounded(group), group);
  EXPECT_EQ(Rounded(Group{}), Group{});
}

TEST(Mxfp8Test, TiesGoToTheEvenMantissaAndTheScaleIsTheLeast) {
  // The scale is 1: steps are 16 from 128 and 32 from 256 on.
  const Group small = Rounded({448, 136, 152, 272, 304, 0.0009765625f, 0.0029296875f});
  EXPECT_EQ(small[1], 128);
  EXPECT_EQ(small[2], 160);
  EXPECT_EQ(small[3], 256);
  EXPECT_EQ(small[4], 320);
  EXPECT_EQ(small[5], 0);
  EXPECT_EQ(small[6], 0.00390625f);
  // A little more than 448 doubles the scale.
  EXPECT_EQ(Rounded({449, 9})[0], 448);
  EXPECT_EQ(Rounded({480, 9})[0], 512 - 32);
  EXPECT_EQ(Mxfp8ScaleExponent(448), 0);
  EXPECT_EQ(Mxfp8ScaleExponent(449), 1);
  EXPECT_EQ(Mxfp8ScaleExponent(224), -1);
}

TEST(Mxfp8Test, NonFiniteElementsStayVisible) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isnan(Rounded({1, nan, 2})[1]));
  EXPECT_EQ(Rounded({1, -infinity})[1], -infinity);
}

TEST(Mxfp8Test, MatchesTheSearch) {
  Random random(5);
  for (float size : {1e-20f, 1e-3f, 1.0f, 3e4f, 1e30f}) {
    std::vector<float> values = random.Normal(64 * kMxfp8Group, size);
    oracle::Doubles expected = oracle::ToDouble(values);
    oracle::RoundToMxfp8(expected);
    for (size_t begin = 0; begin < values.size(); begin += kMxfp8Group) RoundToMxfp8(values.data() + begin);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(values[i], static_cast<float>(expected[i])) << i;
      ASSERT_EQ(Round({values[i]}, DType::kBF16)[0], values[i]) << "exact in bf16";
    }
    const std::vector<float> once = values;
    for (size_t begin = 0; begin < values.size(); begin += kMxfp8Group) RoundToMxfp8(values.data() + begin);
    EXPECT_EQ(values, once);
  }
}

}  // namespace
}  // namespace k3::testing
