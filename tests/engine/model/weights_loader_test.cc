#include "engine/model/weights_loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "engine/model/tensor_match.h"
#include "tests/engine/model/loaded_checkpoint.h"
#include "tests/testing/log_capture.h"
#include "tests/testing/paths.h"

namespace k3 {
namespace {

using ::testing::AllOf;
using testing::CheckpointForm;
using testing::Folded;
using ::testing::HasSubstr;
using testing::Loaded;
using testing::Recorded;
using testing::RecordedExperts;
using testing::RecordedLinear;
using testing::RecordingOps;
using testing::Stacked;
using testing::TempDir;
using testing::TestCheckpoint;

TEST(WeightsLoaderTest, K3MergesInTheDocumentedOrder) {
  const TestCheckpoint content(testing::SmallK3Config());
  const Loaded loaded(content, 3);
  ASSERT_TRUE(loaded.model.ok()) << loaded.model.status();
  const Weights& w = loaded.weights();
  ASSERT_EQ(w.layers.size(), 5u);

  const std::string l0 = "model.layers.0.";
  const KdaWeights& kda = *w.layers[0].kda;
  EXPECT_EQ(w.layers[0].mla, nullptr);
  EXPECT_EQ(Recorded(kda.in_proj).values, Stacked(content, l0 + "self_attn.",
                                                  {"q_proj.weight", "k_proj.weight", "v_proj.weight", "f_a_proj.weight",
                                                   "b_proj.weight", "g_proj.weight"}));
  EXPECT_EQ(Recorded(kda.f_b_proj).values, Stacked(content, l0, {"self_attn.f_b_proj.weight"}));
  EXPECT_EQ(kda.g_b_proj, nullptr);
  EXPECT_EQ(Recorded(kda.o_proj).values, Stacked(content, l0, {"self_attn.o_proj.weight"}));
  EXPECT_EQ(loaded.ops.Vector(kda.conv_taps),
            Stacked(content, l0 + "self_attn.", {"q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"}));
  EXPECT_EQ(loaded.ops.Vector(kda.dt_bias), Stacked(content, l0, {"self_attn.dt_bias"}));
  EXPECT_EQ(loaded.ops.Vector(kda.a_log), Stacked(content, l0, {"self_attn.A_log"}));
  EXPECT_EQ(loaded.ops.Vector(kda.a_log).size(), 2u);  // of a padded tensor
  EXPECT_EQ(loaded.ops.Vector(kda.o_norm), Stacked(content, l0, {"self_attn.o_norm.weight"}));
  EXPECT_EQ(loaded.ops.Vector(w.layers[0].mlp_mix_query),
            Folded(content, l0 + "mlp_res_norm.weight", l0 + "mlp_res_proj.weight"));
  EXPECT_EQ(Recorded(w.layers[0].mlp->gate_up).values,
            Stacked(content, l0 + "mlp.", {"gate_proj.weight", "up_proj.weight"}));
  EXPECT_EQ(Recorded(w.layers[0].mlp->down).values, Stacked(content, l0, {"mlp.down_proj.weight"}));
  EXPECT_EQ(w.layers[0].moe, nullptr);

  const std::string l3 = "model.layers.3.";
  const MlaWeights& mla = *w.layers[3].mla;
  EXPECT_EQ(w.layers[3].kda, nullptr);
  EXPECT_EQ(Recorded(mla.in_proj).values,
            Stacked(content, l3 + "self_attn.", {"q_a_proj.weight", "kv_a_proj_with_mqa.weight", "g_proj.weight"}));
  EXPECT_EQ(loaded.ops.Vector(mla.q_a_norm), Stacked(content, l3, {"self_attn.q_a_layernorm.weight"}));
  EXPECT_EQ(Recorded(mla.q_b_proj).values, Stacked(content, l3, {"self_attn.q_b_proj.weight"}));
  EXPECT_EQ(loaded.ops.Vector(mla.kv_a_norm), Stacked(content, l3, {"self_attn.kv_a_layernorm.weight"}));
  const auto& kv_b = dynamic_cast<const testing::RecordedProjection&>(*mla.kv_b);
  EXPECT_EQ(kv_b.values, Stacked(content, l3, {"self_attn.kv_b_proj.weight"}));
  EXPECT_EQ(kv_b.heads, 2);
  EXPECT_EQ(kv_b.latent_dim, 40);
  EXPECT_EQ(loaded.ops.Vector(w.layers[3].attention_mix_query),
            Folded(content, l3 + "self_attention_res_norm.weight", l3 + "self_attention_res_proj.weight"));
  EXPECT_EQ(loaded.ops.Vector(w.layers[3].input_norm), Stacked(content, l3, {"input_layernorm.weight"}));
  EXPECT_EQ(loaded.ops.Vector(w.layers[3].post_attention_norm),
            Stacked(content, l3, {"post_attention_layernorm.weight"}));

  const MoeWeights& moe = *w.layers[3].moe;
  const std::string m3 = l3 + "block_sparse_moe.";
  EXPECT_EQ(Recorded(moe.router).values, Stacked(content, m3, {"gate.weight"}));
  EXPECT_EQ(loaded.ops.Vector(moe.router_bias), Stacked(content, m3, {"gate.e_score_correction_bias"}));
  EXPECT_EQ(Recorded(moe.latent_down).values, Stacked(content, m3, {"routed_expert_down_proj.weight"}));
  EXPECT_EQ(loaded.ops.Vector(moe.latent_norm), Stacked(content, m3, {"routed_expert_norm.weight"}));
  EXPECT_EQ(Recorded(moe.latent_up).values, Stacked(content, m3, {"routed_expert_up_proj.weight"}));
  EXPECT_EQ(Recorded(moe.shared.gate_up).values,
            Stacked(content, m3 + "shared_experts.", {"gate_proj.weight", "up_proj.weight"}));
  const auto& experts = dynamic_cast<const RecordedExperts&>(*moe.experts[0]);
  ASSERT_EQ(experts.experts.size(), 8u);
  TestCheckpoint copy = content;
  const auto& packed = copy.Find("language_model." + m3 + "experts.5.w2.weight_packed")->data;
  const auto& scale = copy.Find("language_model." + m3 + "experts.5.w2.weight_scale")->data;
  EXPECT_EQ(experts.experts[5].w2, std::vector<float>(packed.begin(), packed.end()));
  EXPECT_EQ(experts.experts[5].w2_scale, std::vector<float>(scale.begin(), scale.end()));

  EXPECT_EQ(loaded.ops.Vector(w.output_mix_query),
            Folded(content, "model.output_attn_res_norm.weight", "model.output_attn_res_proj.weight"));
  EXPECT_EQ(loaded.ops.Vector(w.final_norm), Stacked(content, "", {"model.norm.weight"}));
  EXPECT_EQ(Recorded(w.lm_head).values, Stacked(content, "", {"lm_head.weight"}));
  EXPECT_EQ(testing::HostValues(loaded.ops.tables.at(0)), Stacked(content, "", {"model.embed_tokens.weight"}));
}

TEST(WeightsLoaderTest, KimiLinearForms) {
  CheckpointForm form;
  form.a_log = CheckpointForm::ALog::kFourD;
  form.conv_3d = false;
  form.conv_dtype = DType::kBF16;
  const TestCheckpoint content(testing::SmallKimiLinearConfig(), form);
  const Loaded loaded(content, 2);
  ASSERT_TRUE(loaded.model.ok()) << loaded.model.status();
  const std::string attn = "model.layers.1.self_attn.";
  const LayerWeights& layer = loaded.weights().layers[1];
  EXPECT_EQ(Recorded(layer.kda->in_proj).values, Stacked(content, attn,
                                                         {"q_proj.weight", "k_proj.weight", "v_proj.weight",
                                                          "f_a_proj.weight", "b_proj.weight", "g_a_proj.weight"}));
  EXPECT_EQ(Recorded(layer.kda->g_b_proj).values, Stacked(content, attn, {"g_b_proj.weight"}));
  EXPECT_EQ(loaded.ops.Vector(layer.kda->a_log), Stacked(content, attn, {"A_log"}));
  EXPECT_EQ(loaded.ops.Vector(layer.kda->conv_taps),
            Stacked(content, attn, {"q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"}));
  EXPECT_EQ(layer.attention_mix_query, nullptr);
  EXPECT_EQ(layer.moe->latent_down, nullptr);
  EXPECT_EQ(loaded.weights().output_mix_query, nullptr);
  const MlaWeights& mla = *loaded.weights().layers[3].mla;
  EXPECT_EQ(Recorded(mla.in_proj).values,
            Stacked(content, "model.layers.3.self_attn.", {"q_proj.weight", "kv_a_proj_with_mqa.weight"}));
  EXPECT_EQ(mla.q_b_proj, nullptr);
  const auto& experts = dynamic_cast<const RecordedExperts&>(*layer.moe->experts[0]);
  EXPECT_EQ(experts.experts[7].w1, Stacked(content, "model.layers.1.block_sparse_moe.experts.7.", {"w1.weight"}));
  EXPECT_TRUE(experts.experts[7].w1_scale.empty());
}

TEST(WeightsLoaderTest, HalfAndSinglePrecision) {
  for (DType dtype : {DType::kF16, DType::kF32}) {
    CheckpointForm form;
    form.plain_dtype = dtype;
    form.a_log = CheckpointForm::ALog::kPlain;
    const TestCheckpoint content(testing::SmallKimiLinearConfig(), form);
    const Loaded loaded(content);
    ASSERT_TRUE(loaded.model.ok()) << loaded.model.status();
    EXPECT_EQ(Recorded(loaded.weights().lm_head).values, Stacked(content, "", {"lm_head.weight"}));
    EXPECT_EQ(loaded.ops.Vector(loaded.weights().final_norm), Stacked(content, "", {"model.norm.weight"}));
  }
}

TEST(WeightsLoaderTest, TheShippedModelsLoadWithoutAWarning) {
  for (const std::string& dir : {testing::TinyK3(), testing::TinyKimiLinear()}) {
    const testing::LogCapture log;
    const auto config = LoadModelConfig(dir);
    ASSERT_TRUE(config.ok()) << config.status();
    RecordingOps ops;
    const auto model = LoadWeights(dir, *config, ops, {});
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(log.Count("warn"), 0) << log.text();
    EXPECT_EQ((*model)->weights.layers.size(), config->layers.size());
  }
}

TEST(WeightsLoaderTest, PackingIsDecidedByNamesNotByTheConfig) {
  // Packed tensors under a config without quantization, and plain ones under a config with it.
  for (bool packed : {true, false}) {
    TestCheckpoint content([&] {
      ModelConfig config = testing::SmallK3Config();
      config.mxfp4_experts = packed;
      return config;
    }());
    content.config.mxfp4_experts = !packed;
    const Loaded loaded(content);
    ASSERT_TRUE(loaded.model.ok()) << loaded.model.status();
    const auto& experts = dynamic_cast<const RecordedExperts&>(*loaded.weights().layers[1].moe->experts[0]);
    EXPECT_EQ(experts.experts[0].w1_scale.empty(), !packed);
  }
}

TEST(WeightsLoaderTest, UnalignedDataAreReadRight) {
  const TestCheckpoint content(testing::SmallKimiLinearConfig());
  Loaded loaded(content);
  const std::string file = testing::ReadFile(loaded.dir.File("model.safetensors"));
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  for (int extra : {1, 2, 3}) {
    const std::vector<uint8_t> data(file.begin() + 8 + length, file.end());
    testing::WriteRawSafetensors(loaded.dir.File("model.safetensors"), file.substr(8, length) + std::string(extra, ' '),
                                 data);
    loaded.Load();
    ASSERT_TRUE(loaded.model.ok()) << loaded.model.status();
    EXPECT_EQ(Recorded(loaded.weights().lm_head).values, Stacked(content, "", {"lm_head.weight"}));
    const HostTensor& table = loaded.ops.tables.back();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(table.data) % 2, 0u);
    EXPECT_EQ(testing::HostValues(table), Stacked(content, "", {"model.embed_tokens.weight"}));
  }
}

// --- shares, threads, progress, random weights ---

TEST(WeightsLoaderTest, TensorParallelSharesPutTogetherAreTheWhole) {
  const TestCheckpoint content(testing::SmallK3Config());
  const Loaded whole(content);
  std::vector<std::unique_ptr<Loaded>> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    LoadOptions options;
    options.tensor_parallel_rank = options.expert_rank = rank;
    options.tensor_parallel_size = options.expert_ranks = 2;
    ranks.push_back(std::make_unique<Loaded>(content, 1, options));
    ASSERT_TRUE(ranks.back()->model.ok()) << ranks.back()->model.status();
  }
  const auto joined = [&](const std::function<const RecordedLinear&(const Weights&)>& pick) {
    std::vector<float> values = pick(ranks[0]->weights()).values;
    const std::vector<float>& more = pick(ranks[1]->weights()).values;
    values.insert(values.end(), more.begin(), more.end());
    return values;
  };
  // Cut by rows: the halves follow each other.
  const auto head = [](const Weights& w) -> const RecordedLinear& { return Recorded(w.lm_head); };
  EXPECT_EQ(joined(head), head(whole.weights()).values);
  // Cut by columns: row r of the whole is row r of both halves.
  const RecordedLinear& o = Recorded(whole.weights().layers[0].kda->o_proj);
  const RecordedLinear& left = Recorded(ranks[0]->weights().layers[0].kda->o_proj);
  const RecordedLinear& right = Recorded(ranks[1]->weights().layers[0].kda->o_proj);
  ASSERT_EQ(left.in, o.in / 2);
  for (int64_t r = 0; r < o.out; ++r) {
    for (int64_t c = 0; c < o.in; ++c) {
      const RecordedLinear& half = c < left.in ? left : right;
      ASSERT_EQ(o.values[r * o.in + c], half.values[r * half.in + c % half.in]);
    }
  }
  // Merged: head 1's share of q | k | v | f_a (whole) | b | g.
  const int64_t d = 64, dim = 16;
  const std::vector<float>& all = Recorded(whole.weights().layers[0].kda->in_proj).values;
  const std::vector<float>& part = Recorded(ranks[1]->weights().layers[0].kda->in_proj).values;
  ASSERT_EQ(part.size(), static_cast<size_t>((3 * dim + dim + 1 + dim) * d));
  const int64_t first_rows[] = {dim, 3 * dim, 5 * dim, 6 * dim, 7 * dim + 1, 7 * dim + 2 + dim};
  const int64_t counts[] = {dim, dim, dim, dim, 1, dim};
  int64_t at = 0;
  for (int i = 0; i < 6; ++i) {
    for (int64_t e = 0; e < counts[i] * d; ++e) ASSERT_EQ(part[at + e], all[first_rows[i] * d + e]) << i;
    at += counts[i] * d;
  }
  // Small vectors, convolution taps (q, k, v of head 1), experts.
  const KdaWeights& kda = *ranks[1]->weights().layers[0].kda;
  const std::vector<float> a_log = whole.ops.Vector(whole.weights().layers[0].kda->a_log);
  EXPECT_EQ(ranks[1]->ops.Vector(kda.a_log), std::vector<float>{a_log[1]});
  const std::vector<float> taps = whole.ops.Vector(whole.weights().layers[0].kda->conv_taps);
  const std::vector<float> share = ranks[1]->ops.Vector(kda.conv_taps);
  ASSERT_EQ(share.size(), taps.size() / 2);
  for (size_t e = 0; e < share.size(); ++e) {
    const size_t per_part = dim * 4, part_index = e / per_part;
    ASSERT_EQ(share[e], taps[part_index * 2 * per_part + per_part + e % per_part]);
  }
  const auto& experts = dynamic_cast<const RecordedExperts&>(*ranks[1]->weights().layers[1].moe->experts[0]);
  EXPECT_EQ(experts.first, 4);
  EXPECT_EQ(experts.count, 4);
}

TEST(WeightsLoaderTest, SharesMustDivide) {
  const TestCheckpoint content(testing::SmallK3Config());
  LoadOptions options;
  options.tensor_parallel_size = 3;
  const Loaded loaded(content, 1, options);
  EXPECT_EQ(loaded.model.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(loaded.message(), AllOf(HasSubstr("tensor-parallel-size 3"), HasSubstr("num_attention_heads (2)")));
}

TEST(WeightsLoaderTest, ExpertsOfRanksCoverAllOnce) {
  for (const auto& [experts, ranks] : {std::pair{896, 8}, {896, 16}, {7, 3}, {2, 4}}) {
    int32_t next = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const ExpertRange range = ExpertsOfRank(experts, rank, ranks);
      EXPECT_EQ(range.first, next);
      next += range.count;
    }
    EXPECT_EQ(next, experts);
  }
  EXPECT_EQ(ExpertsOfRank(896, 3, 16).count, 56);
}

TEST(WeightsLoaderTest, ProgressGrowsToTheTotal) {
  const TestCheckpoint content(testing::SmallK3Config());
  LoadOptions options;
  std::vector<LoadProgress> seen;
  options.progress = [&](const LoadProgress& progress) { seen.push_back(progress); };
  const testing::LogCapture log;
  const Loaded loaded(content, 3, options);
  ASSERT_TRUE(loaded.model.ok()) << loaded.model.status();
  ASSERT_EQ(seen.size(), 6u);  // five layers and the rest
  for (size_t i = 1; i < seen.size(); ++i) EXPECT_GT(seen[i].bytes_done, seen[i - 1].bytes_done);
  EXPECT_EQ(seen.back().bytes_done, seen.back().bytes_total);
  EXPECT_EQ(seen.back().percent(), 100.0);
  EXPECT_EQ(log.Count("loaded "), 1);
  EXPECT_THAT(log.text(), HasSubstr("GB/s"));
}

TEST(WeightsLoaderTest, SeveralThreadsBuildTheSame) {
  const TestCheckpoint content(testing::SmallK3Config());
  LoadOptions options;
  options.threads = 4;
  const Loaded one(content), four(content, 1, options);
  ASSERT_TRUE(four.model.ok()) << four.model.status();
  for (size_t layer = 0; layer < 5; ++layer) {
    EXPECT_EQ(four.ops.Vector(four.weights().layers[layer].input_norm),
              one.ops.Vector(one.weights().layers[layer].input_norm));
    const auto& a = dynamic_cast<const LinearWeight&>(*four.weights().lm_head);
    EXPECT_EQ(a.out, 256);
  }
  EXPECT_EQ(four.weights().bytes, one.weights().bytes);
}

TEST(WeightsLoaderTest, ABackendFailurePassesThrough) {
  class FailingOps : public RecordingOps {
   public:
    std::unique_ptr<LinearWeight> MakeLinear(std::span<const HostTensor>) override { throw DeviceError("no memory"); }
  };
  const TestCheckpoint content(testing::SmallK3Config());
  const TempDir dir;
  content.Write(dir.path());
  for (int threads : {1, 3}) {
    FailingOps ops;
    LoadOptions options;
    options.threads = threads;
    EXPECT_THROW((void)LoadWeights(dir.path(), content.config, ops, options), DeviceError);
  }
}

TEST(WeightsLoaderTest, RandomWeightsNeedNoFiles) {
  ModelConfig config = testing::SmallK3Config();
  LoadOptions options;
  options.random_seed = 7;
  RecordingOps cpu;
  const auto model = LoadWeights("/nowhere", config, cpu, options);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_TRUE(cpu.without_data.empty());  // the host fills them for the CPU backend
  const std::vector<float>& head = Recorded((*model)->weights.lm_head).values;
  double sum = 0, squares = 0;
  for (float v : head) sum += v, squares += v * v;
  EXPECT_NEAR(sum / head.size(), 0, 0.01);
  EXPECT_NEAR(std::sqrt(squares / head.size()), 1 / std::sqrt(64.0), 0.005);

  const auto& experts = dynamic_cast<const RecordedExperts&>(*(*model)->weights.layers[1].moe->experts[0]);
  ASSERT_EQ(experts.experts.size(), 8u);
  EXPECT_EQ(experts.experts[0].w1.size(), 32u * 16);
  EXPECT_NE(experts.experts[0].w1, experts.experts[1].w1);
  for (float code : experts.experts[0].w1_scale) EXPECT_EQ(code, 123);  // 2^-4, the power next to 32^-0.5 / 2.93

  RecordingOps again;
  const auto same = LoadWeights("/nowhere", config, again, options);
  EXPECT_EQ(Recorded((*same)->weights.lm_head).values, head);
  options.random_seed = 8;
  const auto other = LoadWeights("/nowhere", config, again, options);
  EXPECT_NE(Recorded((*other)->weights.lm_head).values, head);

  // A device backend draws the large plain matrices itself.
  RecordingOps device(/*is_cpu=*/false);
  ASSERT_TRUE(LoadWeights("/nowhere", config, device, options).ok());
  ASSERT_FALSE(device.without_data.empty());
  for (const HostTensor& tensor : device.without_data) {
    EXPECT_EQ(tensor.dtype, DType::kBF16) << tensor.name;
    EXPECT_GT(tensor.random_stddev, 0) << tensor.name;
  }
}

}  // namespace
}  // namespace k3
