#include "engine/model/tensor_table.h"

#include <set>

#include "gtest/gtest.h"
#include "tests/testing/paths.h"

namespace k3 {
namespace {

struct Totals {
  int64_t tensors = 0;
  int64_t bytes = 0;
  int64_t expert_bytes = 0;
  std::set<std::string> names;
};

// Bytes as released: packed experts where the configuration says so, A_log padded in the K3 form.
Totals Sum(const ModelConfig& config) {
  Totals totals;
  const auto add = [&](const TensorSpec& spec) {
    EXPECT_TRUE(totals.names.insert(spec.name).second) << spec.name;
    if (spec.form == TensorForm::kExpert && config.mxfp4_experts) {
      totals.tensors += 2;
      totals.bytes += spec.elements() / 2 + spec.elements() / kMxfp4BlockSize;
      return;
    }
    ++totals.tensors;
    totals.bytes += (spec.elements() + spec.padding) * static_cast<int64_t>(SizeOf(spec.released));
  };
  for (const TensorSpec& spec : ModelTensors(config)) add(spec);
  for (int32_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    for (const TensorSpec& spec : LayerTensors(config, layer)) add(spec);
    const int64_t before = totals.bytes;
    for (int32_t expert = 0; config.IsMoe(layer) && expert < config.num_experts; ++expert) {
      for (const TensorSpec& spec : ExpertTensors(config, layer, expert)) add(spec);
    }
    totals.expert_bytes += totals.bytes - before;
  }
  return totals;
}

TEST(TensorTableTest, KimiK3AddsUpToTheReleasedIndex) {
  const auto config = LoadModelConfig(testing::SourcePath("configs/models/kimi-k3"));
  ASSERT_TRUE(config.ok()) << config.status();
  const Totals totals = Sum(*config);
  // the 168 vision tensors (spec 2.4) are no part of the table.
  EXPECT_EQ(totals.tensors, 497220 - 168);
  EXPECT_EQ(totals.expert_bytes, 1446456066048);
  EXPECT_EQ(totals.expert_bytes / 92 / 896, 17547264);
  const int64_t vision_elements = 1024 * 3 * 14 * 14 + 64 * 64 * 1024 +
                                  27 * (2 * 1024 + 4608 * 1024 + 1024 * 1536 + 2 * 4096 * 1024) + 1024 + 4096 * 4096 +
                                  7168 * 4096 + 7168;
  EXPECT_EQ(totals.bytes + 2 * vision_elements, 1560860324864);
}

TEST(TensorTableTest, KimiLinear48B) {
  const auto config = LoadModelConfig(testing::SourcePath("configs/models/kimi-linear-48b"));
  ASSERT_TRUE(config.ok()) << config.status();
  const Totals totals = Sum(*config);
  EXPECT_EQ(totals.tensors, 20493);
  EXPECT_NEAR(static_cast<double>(totals.bytes), 98.25e9, 0.01e9);
}

}  // namespace
}  // namespace k3
