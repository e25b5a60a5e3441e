#include "kernels/kda_split.h"

#include <gtest/gtest.h>

namespace k3 {
namespace {

// All of a run's tokens, in segments that start on tiles and are worth a block.
TEST(KdaSplitTest, SegmentsCoverTheRun) {
  for (const bool core : {false, true}) {
    for (const double runs : {1.0, 4.0, 12.0, 32.0, 96.0, 130.0}) {
      for (int64_t tokens = 1; tokens <= 70000; tokens += tokens < 600 ? 1 : 977) {
        const KdaSegments cut = ChooseKdaSegments(tokens, runs, core, 132);
        if (cut.first == 0) continue;
        EXPECT_EQ(cut.first % 16, 0);
        EXPECT_EQ(cut.others % 16, 0);
        EXPECT_GE(cut.first, kLeastKdaSegment);
        EXPECT_GE(cut.others, kLeastKdaSegment);
        EXPECT_LT(cut.first, tokens);
        EXPECT_GE(cut.first + (kMostKdaSegments - 1) * cut.others, tokens);
      }
    }
  }
}

TEST(KdaSplitTest, FewRunsFillTheDeviceAndManyAreLeftWhole) {
  // 12 first segments and 5 x 12 others with their transitions: 132 blocks of about one length.
  const KdaSegments twelve = ChooseKdaSegments(32768, 12, true, 132);
  EXPECT_EQ(twelve.first, 5408);
  EXPECT_EQ(twelve.others, 5472);
  EXPECT_EQ(ChooseKdaSegments(32768, 132, true, 132).first, 0);
  EXPECT_EQ(ChooseKdaSegments(32768, 500, false, 132).first, 0);
  EXPECT_EQ(ChooseKdaSegments(2 * kLeastKdaSegment - 16, 1, true, 132).first, 0);
}

TEST(KdaSplitTest, TextSaysWhatIsChosen) {
  EXPECT_EQ(KdaSegmentsText(12),
            "2048 tokens 288 + 5 x 352, 8192 tokens 1312 + 5 x 1376, 32768 tokens 5408 + 5 x 5472");
  EXPECT_EQ(KdaSegmentsText(132), "2048 tokens whole, 8192 tokens whole, 32768 tokens whole");
}

}  // namespace
}  // namespace k3
