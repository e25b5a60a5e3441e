#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tests/engine/model/loaded_checkpoint.h"
#include "tests/testing/log_capture.h"

namespace k3 {
namespace {

using ::testing::AllOf;
using testing::FailureAfter;
using ::testing::HasSubstr;
using testing::kK3;
using testing::Loaded;
using testing::TestCheckpoint;

TEST(WeightsLoaderTest, MissingTensorsAreListed) {
  const std::string name = std::string(kK3) + "layers.2.self_attn.f_a_proj.weight";
  EXPECT_THAT(
      FailureAfter(testing::SmallK3Config(), [&](TestCheckpoint& c) { c.Remove(name); }),
      AllOf(HasSubstr("model.safetensors"), HasSubstr("1 tensors that the model needs are missing"), HasSubstr(name)));
  const std::string many = FailureAfter(testing::SmallK3Config(), [&](TestCheckpoint& c) {
    std::erase_if(c.tensors,
                  [](const auto& t) { return t.name.find("layers.1.block_sparse_moe.experts") != std::string::npos; });
  });
  EXPECT_THAT(many, AllOf(HasSubstr("24 tensors"), HasSubstr("experts.0.w1.weight_packed"), HasSubstr("and 14 more")));
  EXPECT_THAT(FailureAfter(testing::SmallK3Config(),
                           [&](TestCheckpoint& c) {
                             c.Remove(std::string(kK3) + "layers.1.block_sparse_moe.experts.3.w2.weight_scale");
                           }),
              HasSubstr("experts.3.w2.weight_scale"));
}

TEST(WeightsLoaderTest, NamesWithoutThePrefixAreExplained) {
  EXPECT_THAT(FailureAfter(testing::SmallK3Config(),
                           [&](TestCheckpoint& c) {
                             for (auto& t : c.tensors) t.name = t.name.substr(std::string("language_model.").size());
                           }),
              AllOf(HasSubstr("missing"), HasSubstr("lack the prefix 'language_model.'")));
}

TEST(WeightsLoaderTest, WrongShapesAndTypesNameBothSides) {
  const auto wrong = [&](const std::string& name, const std::function<void(testing::CheckpointTensor&)>& change) {
    return FailureAfter(testing::SmallK3Config(), [&](TestCheckpoint& c) { change(*c.Find(kK3 + name)); });
  };
  using Tensor = testing::CheckpointTensor;
  EXPECT_THAT(wrong("layers.0.self_attn.q_proj.weight",
                    [](Tensor& t) {
                      t.shape = {64, 32};
                    }),
              AllOf(HasSubstr("model.safetensors"), HasSubstr("layers.0.self_attn.q_proj.weight"),
                    HasSubstr("expected BF16, F16 or F32 [32, 64]"), HasSubstr("found BF16 [64, 32]")));
  EXPECT_THAT(wrong("norm.weight",
                    [](Tensor& t) {
                      t.shape = {8, 8};
                    }),
              AllOf(HasSubstr("[64]"), HasSubstr("found BF16 [8, 8]")));
  EXPECT_THAT(wrong("norm.weight", [](Tensor& t) { t.dtype = "I16"; }), HasSubstr("found I16 [64]"));
  EXPECT_THAT(wrong("layers.0.self_attn.A_log",
                    [](Tensor& t) {
                      t.shape = {1, 16};
                    }),
              AllOf(HasSubstr("[2], longer, or [1, 1, 2, 1]"), HasSubstr("F32 [1, 16]")));
  EXPECT_THAT(wrong("layers.0.self_attn.A_log",
                    [](Tensor& t) {
                      t.shape = {1};
                      t.data.resize(4);
                    }),
              HasSubstr("F32 [1]"));
  EXPECT_THAT(wrong("layers.0.self_attn.q_conv1d.weight",
                    [](Tensor& t) {
                      t.shape = {32, 4, 1};
                    }),
              AllOf(HasSubstr("[32, 1, 4] or [32, 4]"), HasSubstr("F32 [32, 4, 1]")));
  EXPECT_THAT(wrong("layers.1.block_sparse_moe.experts.2.w1.weight_packed", [](Tensor& t) { t.dtype = "I8"; }),
              AllOf(HasSubstr("expected U8 [32, 16]"), HasSubstr("found I8 [32, 16]")));
  EXPECT_THAT(wrong("layers.1.block_sparse_moe.experts.2.w1.weight_scale",
                    [](Tensor& t) {
                      t.shape = {1, 32};
                    }),
              AllOf(HasSubstr("expected U8 [32, 1]"), HasSubstr("found U8 [1, 32]")));
  EXPECT_THAT(wrong("layers.1.block_sparse_moe.experts.2.w1.weight_packed",
                    [](Tensor& t) {
                      t.name.resize(t.name.size() - std::string("_packed").size());
                      t.dtype = "BF16";
                      t.shape = {32, 32};
                      t.data.resize(2048);
                    }),
              AllOf(HasSubstr("experts.2.w1.weight'"), HasSubstr("either this tensor or")));
}

TEST(WeightsLoaderTest, OnlyExpertsMayBePacked) {
  EXPECT_THAT(FailureAfter(testing::SmallK3Config(),
                           [](TestCheckpoint& c) {
                             testing::CheckpointTensor* t =
                                 c.Find(std::string(kK3) + "layers.1.block_sparse_moe.shared_experts.up_proj.weight");
                             t->name += "_packed";
                             t->dtype = "U8";
                             t->shape = {64, 32};
                             t->data.resize(2048);
                           }),
              AllOf(HasSubstr("shared_experts.up_proj.weight_packed"), HasSubstr("only routed experts")));
}

TEST(WeightsLoaderTest, PlainAndPackedExpertsDoNotMixInALayer) {
  const std::string name = std::string(kK3) + "layers.1.block_sparse_moe.experts.4.w3.weight";
  EXPECT_THAT(FailureAfter(testing::SmallK3Config(),
                           [&](TestCheckpoint& c) {
                             c.Remove(name + "_packed");
                             c.Remove(name + "_scale");
                             c.tensors.push_back({name, "BF16", {32, 32}, std::vector<uint8_t>(2048)});
                           }),
              AllOf(HasSubstr(name), HasSubstr("all experts of a layer plain or all packed")));
}

// B39.
TEST(WeightsLoaderTest, TheNanScaleIsRefusedAndNeighboursAreNot) {
  const std::string name = std::string(kK3) + "layers.2.block_sparse_moe.experts.6.w3.weight_scale";
  ModelConfig config = testing::SmallK3Config();
  config.routed_expert_hidden_size = 96;  // three blocks a row
  EXPECT_THAT(
      FailureAfter(
          config, [&](TestCheckpoint& c) { c.Find(name)->data[3 * 7 + 2] = 255; }, 3),
      AllOf(HasSubstr(testing::ShardName(1, 3)), HasSubstr(name), HasSubstr("row 7, block 2"), HasSubstr("255 (NaN)")));
  TestCheckpoint content(config);
  content.Find(name)->data[0] = 254;
  content.Find(name)->data[1] = 128;
  content.Find(name)->data[2] = 0;
  const Loaded loaded(content);
  EXPECT_TRUE(loaded.model.ok()) << loaded.model.status();
}

TEST(WeightsLoaderTest, UnknownTensorsAreOneWarningAndVisionOneLine) {
  TestCheckpoint content(testing::SmallK3Config());
  for (int i = 0; i < 12; ++i)
    content.tensors.push_back({std::string(kK3) + "mystery." + std::to_string(i), "U8", {1}, {7}});
  for (const char* name : {"vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight"}) {
    content.tensors.push_back({name, "BF16", {2}, {0, 0, 0, 0}});
  }
  const testing::LogCapture log;
  const Loaded loaded(content, 2);
  ASSERT_TRUE(loaded.model.ok()) << loaded.model.status();
  EXPECT_EQ(log.Count("warn"), 1);
  EXPECT_EQ(log.Count("skipping 2 vision tensors (8 bytes)"), 1) << log.text();
  EXPECT_THAT(log.text(), AllOf(HasSubstr("ignoring 12 tensors"), HasSubstr("mystery.9"), HasSubstr("and 2 more")));
}

// A config.json that lacks a field of its checkpoint would otherwise be served without a part of the model.
TEST(WeightsLoaderTest, WeightsWithoutAUseAreRefused) {
  const auto without = [](void (*forget)(ModelConfig&)) {
    return FailureAfter(testing::SmallK3Config(), [&](TestCheckpoint& c) { forget(c.config); });
  };
  EXPECT_THAT(without([](ModelConfig& c) { c.mla_use_output_gate = false; }),
              AllOf(HasSubstr("model.safetensors"), HasSubstr("2 tensors that the model of config.json has no use for"),
                    HasSubstr("layers.3.self_attn.g_proj.weight")));
  EXPECT_THAT(without([](ModelConfig& c) { c.latent_moe_use_norm = false; }), HasSubstr("routed_expert_norm.weight"));
  EXPECT_THAT(without([](ModelConfig& c) { c.attn_res_block_size = 0; }), HasSubstr("output_attn_res_norm.weight"));
  EXPECT_THAT(without([](ModelConfig& c) { c.num_shared_experts = 0; }), HasSubstr("shared_experts.gate_proj.weight"));
  for (const char* name : {"layers.0.self_attn.q_proj.bias", "layers.1.block_sparse_moe.experts.8.w1.weight_packed",
                           "layers.4.self_attn.q_proj.weight_scale", "norm.bias"}) {
    EXPECT_THAT(FailureAfter(testing::SmallK3Config(),
                             [&](TestCheckpoint& c) {
                               c.tensors.push_back({std::string(kK3) + name, "U8", {1}, {7}});
                             }),
                AllOf(HasSubstr("1 tensors"), HasSubstr(name)));
  }
}

TEST(WeightsLoaderTest, BuffersDraftLayersAndOtherPartsArePassedOver) {
  TestCheckpoint content(testing::SmallK3Config());
  for (const char* name : {"layers.3.self_attn.rotary_emb.inv_freq", "layers.5.self_attn.q_proj.weight",
                           "layers.99999999999.norm.weight", "mtp.0.norm.weight"}) {
    content.tensors.push_back({std::string(kK3) + name, "U8", {1}, {7}});
  }
  content.tensors.push_back({"audio_tower.norm.weight", "U8", {1}, {7}});
  const testing::LogCapture log;
  const Loaded loaded(content);
  ASSERT_TRUE(loaded.model.ok()) << loaded.model.status();
  EXPECT_THAT(log.text(), HasSubstr("ignoring 5 tensors"));
}

TEST(WeightsLoaderTest, TheFirstLayersMixPairMayBeAbsent) {
  TestCheckpoint content(testing::SmallK3Config());
  content.Remove(std::string(kK3) + "layers.0.self_attention_res_norm.weight");
  content.Remove(std::string(kK3) + "layers.0.self_attention_res_proj.weight");
  const Loaded loaded(content);
  ASSERT_TRUE(loaded.model.ok()) << loaded.model.status();
  EXPECT_EQ(loaded.weights().layers[0].attention_mix_query, nullptr);
  EXPECT_THAT(
      FailureAfter(testing::SmallK3Config(),
                   [](TestCheckpoint& c) { c.Remove(std::string(kK3) + "layers.1.self_attention_res_norm.weight"); }),
      HasSubstr("layers.1.self_attention_res_norm.weight"));
}

}  // namespace
}  // namespace k3
