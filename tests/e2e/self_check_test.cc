#include "engine/model/self_check.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/quiet_load.h"
#include "tests/testing/temp_dir.h"

namespace k3 {
namespace {

absl::Status CheckAfter(const std::function<void(testing::TestCheckpoint&)>& change) {
  testing::TestCheckpoint checkpoint(testing::SmallK3Config());
  change(checkpoint);
  const testing::TempDir dir;
  checkpoint.Write(dir.path());
  const auto config = LoadModelConfig(dir.path());
  if (!config.ok()) return config.status();
  const std::unique_ptr<Ops> ops = MakeCpuOps();
  const auto loaded = LoadWeights(dir.path(), *config, *ops, testing::QuietLoad());
  if (!loaded.ok()) return loaded.status();
  return SelfCheck(Model((*loaded)->config, (*loaded)->weights, *ops), *ops);
}

void Fill(testing::TestCheckpoint& checkpoint, const std::string& name, uint8_t byte) {
  testing::CheckpointTensor* tensor = checkpoint.Find(name);
  ASSERT_NE(tensor, nullptr) << name;
  std::fill(tensor->data.begin(), tensor->data.end(), byte);
}

TEST(SelfCheckTest, AcceptsAModelWithWeights) {
  EXPECT_TRUE(CheckAfter([](testing::TestCheckpoint&) {}).ok());
}

TEST(SelfCheckTest, RefusesAnEmptyHead) {
  const absl::Status status =
      CheckAfter([](testing::TestCheckpoint& c) { Fill(c, "language_model.lm_head.weight", 0); });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("all 256 logits equal 0"), absl::string_view::npos) << status;
}

TEST(SelfCheckTest, RefusesNan) {
  const absl::Status status =
      CheckAfter([](testing::TestCheckpoint& c) { Fill(c, "language_model.model.norm.weight", 0xFF); });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("expected a finite number"), absl::string_view::npos) << status;
}

TEST(SelfCheckTest, RefusesAnEmptyEmbedding) {
  const absl::Status status =
      CheckAfter([](testing::TestCheckpoint& c) { Fill(c, "language_model.model.embed_tokens.weight", 0); });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace k3
