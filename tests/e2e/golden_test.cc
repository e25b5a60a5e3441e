#include <gtest/gtest.h>

#include <cstring>

#include "engine/model/golden_check.h"
#include "tests/testing/paths.h"
#include "tests/testing/quiet_load.h"

// The whole model on the CPU against the goldens: right within 1e-4, same experts, same greedy tokens, and the same
// bits whatever the chunk.
namespace k3 {
namespace {

struct GoldenCase {
  const char* name;
  std::string model;
  std::string golden;
};

void PrintTo(const GoldenCase& c, std::ostream* os) { *os << c.name; }

class GoldenTest : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(GoldenTest, EveryPromptAtEveryChunkSize) {
  const std::unique_ptr<Ops> ops = MakeCpuOps();
  const auto config = LoadModelConfig(GetParam().model);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto loaded = LoadWeights(GetParam().model, *config, *ops, testing::QuietLoad());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Model model((*loaded)->config, (*loaded)->weights, *ops);
  const auto prompts = LoadGolden(GetParam().golden);
  ASSERT_TRUE(prompts.ok()) << prompts.status();
  ASSERT_FALSE(prompts->empty());

  for (const GoldenPrompt& prompt : *prompts) {
    SCOPED_TRACE(prompt.name);
    std::vector<float> whole;
    for (int64_t chunk : {4096, 65, 64, 16, 7, 3, 1}) {
      SCOPED_TRACE(chunk);
      const auto result = CheckGolden(model, *ops, prompt, {.chunk = chunk});
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_LE(result->rel_error, 1e-4);
      EXPECT_EQ(result->experts_equal_share, 1.0);
      EXPECT_EQ(result->greedy_equal, result->greedy_compared);
      if (whole.empty()) {
        whole = result->logits;
      } else {
        ASSERT_EQ(whole.size(), result->logits.size());
        EXPECT_EQ(std::memcmp(whole.data(), result->logits.data(), whole.size() * sizeof(float)), 0);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenTest,
                         ::testing::Values(GoldenCase{"TinyK3", testing::TinyK3(),
                                                      testing::DataFile("tiny-k3.safetensors")},
                                           GoldenCase{"TinyKimiLinear", testing::TinyKimiLinear(),
                                                      testing::DataFile("tiny-kimi-linear.safetensors")}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace k3
