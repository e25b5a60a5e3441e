#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "engine/model/sequence_runner.h"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/quiet_load.h"
#include "tests/testing/reference_model.h"
#include "tests/testing/temp_dir.h"

// Shapes other than the shipped models': written to disk as released-format checkpoints, loaded and run, and compared
// with a double-precision evaluation of the formulas.
namespace k3 {
namespace {

struct ShapeCase {
  const char* name;
  ModelConfig config;
  int shards = 1;
  int32_t page_size = 64;
  testing::CheckpointForm form = {};
};

void PrintTo(const ShapeCase& c, std::ostream* os) { *os << c.name; }

void SetLayers(ModelConfig& config, int32_t count, int32_t mla_every) {
  config.num_hidden_layers = count;
  config.layers.clear();
  for (int32_t layer = 0; layer < count; ++layer) {
    config.layers.push_back((layer + 1) % mla_every == 0 || layer + 1 == count ? LayerKind::kMla : LayerKind::kKda);
  }
}

std::vector<ShapeCase> Cases() {
  std::vector<ShapeCase> cases;
  cases.push_back({"SmallK3", testing::SmallK3Config()});
  cases.push_back({"SmallKimiLinear", testing::SmallKimiLinearConfig()});
  {
    ShapeCase c{"K3ThirteenLayersBlockFourOddHeads", testing::SmallK3Config(), 3, 16};
    SetLayers(c.config, 13, 4);
    c.config.attn_res_block_size = 4;
    c.config.kda_heads = 3;
    c.config.num_attention_heads = 5;
    c.config.num_expert_group = 4;
    c.config.topk_group = 2;
    c.config.num_experts = 16;
    c.config.num_experts_per_token = 3;
    cases.push_back(c);
  }
  {
    ShapeCase c{"K3LatentsNotMultiplesOf64", testing::SmallK3Config(), 2, 3};
    c.config.kv_lora_rank = 37;
    c.config.qk_rope_head_dim = 10;
    c.config.qk_nope_head_dim = 21;
    c.config.v_head_dim = 13;
    c.config.q_lora_rank = 27;
    c.config.kda_head_dim = 20;
    c.config.hidden_size = 72;
    c.config.routed_expert_hidden_size = 32;
    c.config.moe_intermediate_size = 96;
    c.config.num_shared_experts = 1;
    c.form.a_log = testing::CheckpointForm::ALog::kPlain;
    c.form.conv_3d = false;
    c.form.conv_dtype = DType::kBF16;
    cases.push_back(c);
  }
  {
    ShapeCase c{"K3PlainExpertsFullWidth", testing::SmallK3Config()};
    c.config.mxfp4_experts = false;
    c.config.routed_expert_hidden_size = 0;
    c.config.latent_moe_use_norm = false;
    c.config.q_lora_rank = 0;
    c.config.moe_layer_freq = 2;
    c.config.num_shared_experts = 0;
    c.form.plain_dtype = DType::kF32;
    cases.push_back(c);
  }
  {
    ShapeCase c{"KimiLinearOneExpertKeepsItsScore", testing::SmallKimiLinearConfig()};
    c.config.num_experts_per_token = 1;
    cases.push_back(c);
  }
  {
    ShapeCase c{"KimiLinearSoftmaxRouterOutputGate", testing::SmallKimiLinearConfig()};
    c.config.router_score = RouterScore::kSoftmax;
    c.config.mla_use_output_gate = true;
    c.config.use_full_rank_gate = true;
    c.config.kda_heads = 1;
    c.config.conv_width = 3;
    c.config.moe_renormalize = false;
    c.form.plain_dtype = DType::kF16;
    cases.push_back(c);
  }
  return cases;
}

class ShapesTest : public ::testing::TestWithParam<ShapeCase> {};

TEST_P(ShapesTest, AgreesWithDoublePrecisionAtEveryChunk) {
  const ShapeCase& c = GetParam();
  const testing::TestCheckpoint checkpoint(c.config, c.form);
  const testing::TempDir dir;
  checkpoint.Write(dir.path(), c.shards);

  const auto config = LoadModelConfig(dir.path());
  ASSERT_TRUE(config.ok()) << config.status();
  const std::unique_ptr<Ops> ops = MakeCpuOps();
  const auto loaded = LoadWeights(dir.path(), *config, *ops, testing::QuietLoad());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Model model((*loaded)->config, (*loaded)->weights, *ops);

  constexpr int64_t kLength = 70;
  std::mt19937 random(7);
  std::vector<int32_t> tokens(kLength);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint64_t>(config->vocab_size));
  testing::ReferenceModel reference(*config, [&](const std::string& name) { return checkpoint.Doubles(name); });
  const testing::ReferenceModel::Output expected = reference.Forward(tokens);
  // A near tie may fall either way between precisions; such a case would compare nothing meaningful.
  for (const std::vector<double>& layer : expected.margins) {
    for (double margin : layer) ASSERT_GT(margin, 1e-6) << "choose another seed";
  }

  std::vector<float> whole;
  for (int64_t chunk : {70, 64, 17, 3, 1}) {
    SCOPED_TRACE(chunk);
    SequenceRunner runner(model, *ops, kLength, chunk, c.page_size);
    std::vector<float> logits;
    for (int64_t begin = 0; begin < kLength; begin += chunk) {
      const size_t count = static_cast<size_t>(std::min(chunk, kLength - begin));
      std::vector<int32_t> rows(count);
      std::iota(rows.begin(), rows.end(), 0);
      const std::vector<float> part = runner.Append(std::span(tokens).subspan(begin, count), rows);
      logits.insert(logits.end(), part.begin(), part.end());
    }
    ASSERT_EQ(logits.size(), expected.logits.size());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      difference += std::pow(logits[i] - expected.logits[i], 2);
      norm += std::pow(expected.logits[i], 2);
    }
    EXPECT_LE(std::sqrt(difference / norm), 2e-5);
    if (whole.empty()) whole = logits;
    EXPECT_EQ(std::memcmp(whole.data(), logits.data(), whole.size() * sizeof(float)), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ShapesTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace k3
