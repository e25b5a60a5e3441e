#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>

#include "engine/model/golden_check.h"
#include "tests/e2e/random_schedules.h"
#include "tests/testing/paths.h"
#include "tests/testing/quiet_load.h"
#include "tests/testing/two_phase_ops.h"

// Attention residuals in two phases in whole models, forced where the measured table would not choose them.
namespace k3::testing {
namespace {

void ExpectGolden(Ops& ops, double tolerance, bool golden_routing, std::initializer_list<int64_t> chunks,
                  bool same_bits) {
  const auto config = LoadModelConfig(TinyK3());
  ASSERT_TRUE(config.ok()) << config.status();
  const auto loaded = LoadWeights(TinyK3(), *config, ops, QuietLoad());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Model model((*loaded)->config, (*loaded)->weights, ops);
  const auto prompts = LoadGolden(DataFile("tiny-k3.safetensors"));
  ASSERT_TRUE(prompts.ok()) << prompts.status();
  ASSERT_FALSE(prompts->empty());
  for (const GoldenPrompt& prompt : *prompts) {
    SCOPED_TRACE(prompt.name);
    std::vector<float> whole;
    for (int64_t chunk : chunks) {
      SCOPED_TRACE(chunk);
      GoldenCheckOptions options;
      options.chunk = chunk;
      options.golden_routing = golden_routing;
      const auto result = CheckGolden(model, ops, prompt, options);
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_LE(result->rel_error, tolerance);
      if (!same_bits) continue;
      EXPECT_EQ(result->experts_equal_share, 1.0);
      EXPECT_EQ(result->greedy_equal, result->greedy_compared);
      if (whole.empty()) whole = result->logits;
      ASSERT_EQ(whole.size(), result->logits.size());
      EXPECT_EQ(std::memcmp(whole.data(), result->logits.data(), whole.size() * sizeof(float)), 0);
    }
  }
}

TEST(AttnResFormsTest, GoldensOnTheCpu) {
  TwoPhaseOps ops(MakeCpuOps());
  ExpectGolden(ops, 1e-4, false, {4096, 7}, true);
  EXPECT_FALSE(ops.groups.empty());
}

TEST(AttnResFormsTest, CudaGoldens) {
  if (CudaDeviceCount() == 0) GTEST_SKIP() << "no CUDA device that this build can use";
  TwoPhaseOps bf16(MakeCudaOps());
  ExpectGolden(bf16, 2e-2, true, {4096, 64, 7}, false);
  EXPECT_FALSE(bf16.groups.empty());
  TwoPhaseOps fp32(MakeCudaOps({.compute_dtype = DType::kF32}));
  ExpectGolden(fp32, 1e-3, true, {4096, 7}, false);
}

// The sites of one closed set in even groups, each mixed once, and the logits of one pass.
TEST(AttnResFormsTest, GroupsOfSites) {
  struct Case {
    int32_t layers, block;
    std::vector<TwoPhaseOps::Group> groups;
  };
  const Case cases[] = {
      // Sites 1 .. 2 S have one closed block, and so on; 2 L is the last.
      {14, 6, {{1, 6}, {1, 6}, {2, 6}, {2, 6}, {3, 4}}},
      {13, 12, {{1, 8}, {1, 8}, {1, 8}, {2, 2}}},
      {9, 5, {{1, 5}, {1, 5}, {2, 8}}},
      {3, 1, {{1, 2}, {2, 2}, {3, 2}}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(std::to_string(c.layers) + " layers, blocks of " + std::to_string(c.block));
    ModelConfig shape = SmallK3Config();
    shape.num_hidden_layers = c.layers;
    shape.attn_res_block_size = c.block;
    shape.layers.assign(static_cast<size_t>(c.layers), LayerKind::kKda);
    shape.layers.back() = LayerKind::kMla;
    const TempDir dir;
    TestCheckpoint(shape).Write(dir.path());
    TestModel one(dir.path());
    auto wrapped = std::make_unique<TwoPhaseOps>(MakeCpuOps({.threads = 1}));
    TwoPhaseOps& ops = *wrapped;
    TestModel two(dir.path(), std::move(wrapped));

    const int32_t tokens[] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};
    const int32_t rows[] = {0, 4, 10};
    SequenceRunner first(one.model(), one.ops(), 64, 16), second(two.model(), two.ops(), 64, 16);
    const std::vector<float> want = first.Append(tokens, rows), got = second.Append(tokens, rows);
    EXPECT_EQ(ops.groups, c.groups);
    double difference = 0, norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      difference += std::pow(double{got[i]} - want[i], 2);
      norm += std::pow(double{want[i]}, 2);
    }
    EXPECT_LE(std::sqrt(difference / norm), 1e-5);
  }
}

// An answer depends on nothing beside it or before it, as with one pass (equivalence_test.cc).
TEST(AttnResFormsTest, RandomSchedules) {
  const TempDir dir;
  TestCheckpoint(SmallK3Config()).Write(dir.path());
  TestModel model(dir.path(), std::make_unique<TwoPhaseOps>(MakeCpuOps({.threads = 1})));
  std::map<std::string, Outcome> alone;
  RunSchedules(model, {}, 80, [&](const TestRequest& request, const Outcome& outcome, bool cut) {
    const auto [it, fresh] = alone.try_emplace(AnswerKey(request));
    if (fresh) it->second = RunAlone(model, request);
    ExpectSameAnswer(outcome, it->second, cut);
  });
}

}  // namespace
}  // namespace k3::testing
