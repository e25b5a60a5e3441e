#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/parallel/parallel_model.h"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/paths.h"
#include "tests/testing/temp_dir.h"

// Whole models over tensor- and data-parallel ranks: the logits of one rank, and its bits where only the order of the
// experts' sum could differ.
namespace k3::testing {
namespace {

constexpr double kTolerance = 1e-5;
constexpr int32_t kLeaves = 16;
constexpr int32_t kTokens = 70;

struct Case {
  const char* name;
  std::string dir;  // empty: a generated checkpoint
  int32_t tensor;
  int32_t data;
};

class LayoutTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    dir_ = GetParam().dir;
    if (dir_.empty()) {
      TestCheckpoint(WideK3Config()).Write(temp_.path());
      dir_ = temp_.path();
    }
  }
  SequenceLogits Run(const ParallelLayout& layout, int32_t group, int64_t chunk,
                     ExpertTransport transport = ExpertTransport::kAllGather) {
    const auto ranks = LoadRanks(dir_, layout, transport);
    return RunSequence(*ranks, group, SomeTokens(3, kTokens, ranks->vocab_size()), chunk);
  }

  const TempDir temp_;
  std::string dir_;
};

TEST_P(LayoutTest, GivesTheLogitsOfOneRank) {
  const Case& c = GetParam();
  const SequenceLogits one = Run({}, 0, kTokens);
  const auto ranks = LoadRanks(dir_, {.tensor = c.tensor, .data = c.data});
  for (int32_t group = 0; group < c.data; ++group) {
    // Whole, where the residual bank is spread over the group, and in chunks, the last of which is kept by everybody.
    for (const int64_t chunk : {int64_t{kTokens}, int64_t{13}}) {
      SCOPED_TRACE("group " + std::to_string(group) + ", chunk " + std::to_string(chunk));
      const SequenceLogits many = RunSequence(*ranks, group, SomeTokens(3, kTokens, ranks->vocab_size()), chunk);
      const double error = RelativeError(many.logits, one.logits);
      EXPECT_LE(error, kTolerance);
      if (group == 0) RecordProperty("rel_error_chunk_" + std::to_string(chunk), std::to_string(error));
      EXPECT_EQ(many.experts[0], one.experts[0]);  // of the first MoE layer
      if (c.tensor == 1 && c.data == 1) EXPECT_EQ(many.logits, one.logits);
    }
  }
}

// Every rank mixes its own part of the tokens in groups of sites.
TEST_P(LayoutTest, GivesTheLogitsOfOneRankInTwoPhases) {
  const Case& c = GetParam();
  const SequenceLogits one = Run({}, 0, kTokens);
  const auto ranks = LoadRanks(dir_, {.tensor = c.tensor, .data = c.data}, ExpertTransport::kAllGather, true);
  for (const int64_t chunk : {int64_t{kTokens}, int64_t{13}}) {
    const SequenceLogits many = RunSequence(*ranks, c.data - 1, SomeTokens(3, kTokens, ranks->vocab_size()), chunk);
    EXPECT_LE(RelativeError(many.logits, one.logits), kTolerance) << "chunk " << chunk;
  }
}

// The same tree over the groups of experts, cut at different heights: nothing else depends on the number of groups.
TEST_P(LayoutTest, GroupsGiveTheBitsOfOneGroupWithTheFixedTree) {
  const Case& c = GetParam();
  const SequenceLogits one = Run({.tensor = c.tensor, .data = 1, .expert_leaves = kLeaves}, 0, kTokens);
  for (const ExpertTransport transport : {ExpertTransport::kAllGather, ExpertTransport::kAllToAll}) {
    const SequenceLogits many =
        Run({.tensor = c.tensor, .data = c.data, .expert_leaves = kLeaves}, c.data - 1, 13, transport);
    EXPECT_EQ(many.experts, one.experts);
    EXPECT_EQ(many.logits, one.logits);
  }
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const int32_t tensor : {1, 2}) {
    for (const int32_t data : {1, 2, 4}) {
      cases.push_back({"TinyK3", SourcePath("configs/models/tiny-k3"), tensor, data});
      cases.push_back({"TinyKimiLinear", TinyKimiLinear(), tensor, data});
    }
  }
  for (const auto& [tensor, data] : {std::pair{4, 1}, {4, 4}, {8, 2}, {2, 8}, {1, 16}}) {
    cases.push_back({"Generated", "", tensor, data});
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Layouts, LayoutTest, ::testing::ValuesIn(Cases()), [](const auto& info) {
  return std::string(info.param.name) + "Tp" + std::to_string(info.param.tensor) + "Dp" +
         std::to_string(info.param.data);
});

}  // namespace
}  // namespace k3::testing
