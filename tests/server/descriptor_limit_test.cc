#include "server/descriptor_limit.h"

#include <gtest/gtest.h>

namespace k3 {
namespace {

TEST(DescriptorLimitTest, ConnectionsLeaveDescriptorsForTheRest) {
  EXPECT_EQ(ConnectionsWithin(16384, 1, 1 << 20, 20), 16384);
  EXPECT_EQ(ConnectionsWithin(16384, 1, 16384 + 1024 + 20, 20), 16384);
  EXPECT_EQ(ConnectionsWithin(16384, 1, 4096, 20), 4096 - 20 - 1024);
  EXPECT_EQ(ConnectionsWithin(16384, 1, 64, 24), 20) << "half of what is left";
  EXPECT_EQ(ConnectionsWithin(10, 1, 64, 24), 10);
  EXPECT_EQ(ConnectionsWithin(16384, 1, 64, 64), 1);
  EXPECT_EQ(ConnectionsWithin(16384, 1, 8, 24), 1);
}

TEST(DescriptorLimitTest, ListenersShareThem) {
  EXPECT_EQ(ConnectionsWithin(16384, 2, 2 * 16384 + 1024 + 20, 20), 16384);
  EXPECT_EQ(ConnectionsWithin(16384, 2, 16384 + 1024 + 20, 20), 8192);
  EXPECT_EQ(ConnectionsWithin(16384, 2, 64, 24), 10);
}

TEST(DescriptorLimitTest, WhatIsSetIsWhatFits) {
  const int fit = FitDescriptorLimit(8, 2);
  EXPECT_GE(fit, 1);
  EXPECT_LE(fit, 8);
}

}  // namespace
}  // namespace k3
