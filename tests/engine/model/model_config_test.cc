#include "engine/model/model_config.h"

#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/log_capture.h"
#include "tests/testing/paths.h"
#include "tests/testing/temp_dir.h"

namespace k3 {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Json = nlohmann::ordered_json;

TEST(ModelConfigTest, TinyK3) {
  const auto config = LoadModelConfig(testing::TinyK3());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->model_type, "kimi_k3");
  EXPECT_EQ(config->tensor_prefix, "language_model.");
  EXPECT_EQ(config->vocab_size, 4096);
  EXPECT_EQ(config->hidden_size, 256);
  EXPECT_EQ(config->num_hidden_layers, 8);
  EXPECT_EQ(config->layers[3], LayerKind::kMla);
  EXPECT_EQ(config->layers[4], LayerKind::kKda);
  EXPECT_EQ(config->layers[7], LayerKind::kMla);
  EXPECT_EQ(config->num_kda_layers(), 6);
  EXPECT_EQ(config->num_mla_layers(), 2);
  EXPECT_EQ(config->kda_gate, KdaGate::kBounded);
  EXPECT_EQ(config->gate_lower_bound, -5.0f);
  EXPECT_TRUE(config->use_full_rank_gate);
  EXPECT_EQ(config->q_lora_rank, 128);
  EXPECT_TRUE(config->mla_use_output_gate);
  EXPECT_EQ(config->activation.kind, Activation::kSitu);
  EXPECT_EQ(config->activation.beta, 4.0f);
  EXPECT_EQ(config->activation.linear_beta, 25.0f);
  EXPECT_EQ(config->attn_res_block_size, 3);
  EXPECT_EQ(config->num_residual_blocks(), 4);
  EXPECT_EQ(config->routed_expert_hidden_size, 128);
  EXPECT_TRUE(config->latent_moe_use_norm);
  EXPECT_TRUE(config->mxfp4_experts);
  EXPECT_FALSE(config->IsMoe(0));
  EXPECT_TRUE(config->IsMoe(1));
  EXPECT_THAT(config->eos_token_ids, ElementsAre(3842));
  EXPECT_THAT(config->unknown_fields, IsEmpty());
}

TEST(ModelConfigTest, TinyKimiLinear) {
  const auto config = LoadModelConfig(testing::TinyKimiLinear());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->model_type, "kimi_linear");
  EXPECT_EQ(config->tensor_prefix, "");
  EXPECT_EQ(config->kda_gate, KdaGate::kSoftplus);
  EXPECT_FALSE(config->use_full_rank_gate);
  EXPECT_EQ(config->q_lora_rank, 0);
  EXPECT_FALSE(config->mla_use_output_gate);
  EXPECT_EQ(config->activation.kind, Activation::kSwiglu);
  EXPECT_EQ(config->attn_res_block_size, 0);
  EXPECT_EQ(config->num_residual_blocks(), 1);
  EXPECT_EQ(config->expert_width(), 128);
  EXPECT_EQ(config->max_position_embeddings, 65536);
  EXPECT_FLOAT_EQ(config->routed_scaling_factor, 2.446f);
  EXPECT_FALSE(config->mxfp4_experts);
  EXPECT_THAT(config->unknown_fields, IsEmpty());
}

TEST(ModelConfigTest, ReleasedShapes) {
  const auto k3 = LoadModelConfig(testing::SourcePath("configs/models/kimi-k3"));
  ASSERT_TRUE(k3.ok()) << k3.status();
  EXPECT_EQ(k3->num_hidden_layers, 93);
  EXPECT_EQ(k3->num_kda_layers(), 69);
  EXPECT_EQ(k3->num_mla_layers(), 24);
  EXPECT_EQ(k3->layers[91], LayerKind::kMla);
  EXPECT_EQ(k3->layers[92], LayerKind::kMla);
  EXPECT_EQ(k3->num_residual_blocks(), 9);
  EXPECT_EQ(k3->shared_intermediate_size(), 6144);
  EXPECT_TRUE(k3->has_vision);
  // Spec 2.7.
  EXPECT_EQ(k3->kda_state_elements() * 4, 6 << 20);
  EXPECT_EQ(k3->conv_state_elements() * 2, 221184);
  EXPECT_THAT(k3->unknown_fields, IsEmpty());
  EXPECT_EQ(k3->latent_line_elements() * 2, 1152);

  const auto kl = LoadModelConfig(testing::SourcePath("configs/models/kimi-linear-48b"));
  ASSERT_TRUE(kl.ok()) << kl.status();
  EXPECT_EQ(kl->num_kda_layers(), 20);
  EXPECT_EQ(kl->layers[26], LayerKind::kMla);
  EXPECT_EQ(kl->max_position_embeddings, 1048576);
  EXPECT_THAT(kl->unknown_fields, IsEmpty());
}

TEST(ModelConfigTest, UnknownFieldsAreNamedInOneWarning) {
  const testing::TempDir dir;
  Json root = Json::parse(testing::ConfigJson(testing::SmallK3Config()));
  root["text_config"]["attention_window"] = 7;
  root["text_config"]["no_value"] = nullptr;
  root["text_config"]["top_k"] = 50;  // the base class writes it; it is no default of requests
  root["audio_config"] = Json::object();
  testing::WriteFile(dir.File("config.json"), root.dump());
  const testing::LogCapture log;
  const auto config = LoadModelConfig(dir.path());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->unknown_fields, ElementsAre("audio_config", "text_config.attention_window"));
  EXPECT_EQ(log.Count("ignoring 2 unknown fields: 'audio_config', 'text_config.attention_window'"), 1) << log.text();
}

TEST(ModelConfigTest, EosIsOneIdOrSeveralAndBothObjectsCount) {
  Json root = Json::parse(testing::ConfigJson(testing::SmallK3Config()));
  root["text_config"]["eos_token_id"] = Json({250, 251});
  root["eos_token_id"] = 252;
  EXPECT_THAT(ParseModelConfig(root.dump(), "config.json")->eos_token_ids, ElementsAre(250, 251, 252));
  root["eos_token_id"] = Json({251});
  root["text_config"].erase("eos_token_id");
  EXPECT_THAT(ParseModelConfig(root.dump(), "config.json")->eos_token_ids, ElementsAre(251));
  Json flat = Json::parse(testing::ConfigJson(testing::SmallKimiLinearConfig()));
  flat["eos_token_id"] = 251;
  EXPECT_THAT(ParseModelConfig(flat.dump(), "config.json")->eos_token_ids, ElementsAre(251));
}

TEST(ModelConfigTest, ExpertActivationsNeedMxfp4Experts) {
  ModelConfig k3 = *LoadModelConfig(testing::TinyK3());
  EXPECT_FALSE(k3.mxfp8_expert_inputs);
  EXPECT_TRUE(SetExpertActivations("mxfp8", k3).ok());
  EXPECT_TRUE(k3.mxfp8_expert_inputs);
  EXPECT_TRUE(SetExpertActivations("full", k3).ok());
  EXPECT_FALSE(k3.mxfp8_expert_inputs);
  ModelConfig plain = *LoadModelConfig(testing::TinyKimiLinear());
  EXPECT_TRUE(SetExpertActivations("full", plain).ok());
  const absl::Status refused = SetExpertActivations("mxfp8", plain);
  EXPECT_NE(std::string(refused.message()).find("--expert-activations mxfp8"), std::string::npos) << refused;
}

TEST(ModelConfigTest, OtherShapesSurviveWritingAndReading) {
  ModelConfig config = testing::SmallK3Config();
  config.num_hidden_layers = 13;
  config.layers.assign(13, LayerKind::kKda);
  config.layers[4] = config.layers[12] = LayerKind::kMla;
  config.attn_res_block_size = 4;
  config.kda_heads = 3;
  config.num_attention_heads = 5;
  config.kv_lora_rank = 37;
  config.num_expert_group = 4;
  config.topk_group = 2;
  config.moe_layer_freq = 3;
  config.mxfp4_experts = false;
  config.routed_expert_hidden_size = 17;
  config.activation.linear_beta = 0;
  config.tie_word_embeddings = true;
  const auto parsed = ParseModelConfig(testing::ConfigJson(config), "config.json");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(testing::ConfigJson(*parsed), testing::ConfigJson(config));
  EXPECT_EQ(parsed->num_residual_blocks(), 5);
  EXPECT_FALSE(parsed->IsMoe(1));
  EXPECT_TRUE(parsed->IsMoe(3));
}

// Each wrong file: how to change the small K3 config, and what the message must say.
struct WrongConfig {
  const char* name;
  std::function<void(Json& root, Json& text)> change;
  std::vector<std::string> says;
};

class WrongConfigTest : public ::testing::TestWithParam<WrongConfig> {};

TEST_P(WrongConfigTest, IsRefusedByName) {
  Json root = Json::parse(testing::ConfigJson(testing::SmallK3Config()));
  GetParam().change(root, root["text_config"]);
  const auto config = ParseModelConfig(root.dump(), "some/config.json");
  ASSERT_FALSE(config.ok());
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(config.status().message());
  EXPECT_THAT(message, HasSubstr("some/config.json"));
  for (const std::string& part : GetParam().says) EXPECT_THAT(message, HasSubstr(part));
}

#define CHANGE(...)            \
  [](Json& root, Json& text) { \
    (void)root;                \
    (void)text;                \
    __VA_ARGS__;               \
  }
const WrongConfig kWrongConfigs[] = {
    {"ModelTypeMissing", CHANGE(root.erase("model_type")), {"model_type", "a string", "no such field"}},
    {"ModelTypeUnknown", CHANGE(root["model_type"] = "llama"), {"model_type", "kimi_k3", "\"llama\""}},
    {"TextConfigMissing", CHANGE(root.erase("text_config")), {"text_config", "an object"}},
    {"TextConfigList", CHANGE(root["text_config"] = Json::array()), {"text_config", "an object", "[]"}},
    {"InnerModelType", CHANGE(text["model_type"] = "gpt2"), {"text_config.model_type", "gpt2"}},
    {"HiddenSizeMissing", CHANGE(text.erase("hidden_size")), {"text_config.hidden_size", "no such field"}},
    {"HiddenSizeString", CHANGE(text["hidden_size"] = "64"), {"text_config.hidden_size", "an integer", "\"64\""}},
    {"HiddenSizeFloat", CHANGE(text["hidden_size"] = 64.5), {"hidden_size", "64.5"}},
    {"HiddenSizeZero", CHANGE(text["hidden_size"] = 0), {"hidden_size", "from 1", "found 0"}},
    {"HiddenSizeNegative", CHANGE(text["hidden_size"] = -64), {"hidden_size", "found -64"}},
    {"HiddenSizeHuge", CHANGE(text["hidden_size"] = 1ull << 63), {"hidden_size", "9223372036854775808"}},
    {"VocabNull", CHANGE(text["vocab_size"] = nullptr), {"vocab_size", "null"}},
    {"LayersZero", CHANGE(text["num_hidden_layers"] = 0), {"num_hidden_layers"}},
    {"EpsZero", CHANGE(text["rms_norm_eps"] = 0), {"rms_norm_eps"}},
    {"ContextMissing", CHANGE(text.erase("max_position_embeddings")), {"model_max_length", "no such field"}},
    {"KvHeads", CHANGE(text["num_key_value_heads"] = 1), {"num_key_value_heads", "num_attention_heads (2)", "found 1"}},
    {"NopeFalse", CHANGE(text["mla_use_nope"] = false), {"mla_use_nope", "true", "false"}},
    {"NopeMissing", CHANGE(text.erase("mla_use_nope")), {"mla_use_nope", "no such field"}},
    {"QLoraZero", CHANGE(text["q_lora_rank"] = 0), {"q_lora_rank", "found 0"}},
    {"Act", CHANGE(text["hidden_act"] = "relu"), {"hidden_act", "\"relu\""}},
    {"SituBetaMissing", CHANGE(text.erase("activation_situ_beta")), {"activation_situ_beta"}},
    {"TopKTooMany", CHANGE(text["num_experts_per_token"] = 9), {"num_experts_per_token", "from 1 to 8", "found 9"}},
    {"TopKMissing", CHANGE(text.erase("num_experts_per_token")), {"num_experts_per_token"}},
    {"GroupsDontDivide", CHANGE(text["num_expert_group"] = 3), {"num_expert_group", "num_experts (8)", "found 3"}},
    {"GroupsOfOne", CHANGE(text["num_expert_group"] = 8), {"num_expert_group", "at least 2"}},
    {"TopGroupTooMany", CHANGE(text["num_expert_group"] = 2; text["topk_group"] = 3), {"topk_group", "(2)", "found 3"}},
    {"TopKOverGroups",
     CHANGE(text["num_expert_group"] = 4; text["num_experts_per_token"] = 3),
     {"num_experts_per_token", "at most the 2 experts of 1 groups", "found 3"}},
    {"RouterFunc", CHANGE(text["moe_router_activation_func"] = "tanh"), {"moe_router_activation_func", "\"tanh\""}},
    {"TopkMethod", CHANGE(text["topk_method"] = "greedy"), {"topk_method", "\"greedy\""}},
    {"LatentNorm", CHANGE(text.erase("routed_expert_hidden_size")), {"latent_moe_use_norm"}},
    {"MoeWidth", CHANGE(text["moe_intermediate_size"] = 48), {"quantization_config", "moe_intermediate_size", "48"}},
    {"LatentWidth", CHANGE(text["routed_expert_hidden_size"] = 33), {"quantization_config", "multiple of 32", "33"}},
    {"LinearMissing", CHANGE(text.erase("linear_attn_config")), {"text_config.linear_attn_config", "an object"}},
    {"KdaHeads", CHANGE(text["linear_attn_config"]["num_heads"] = -1), {"linear_attn_config.num_heads", "-1"}},
    {"ConvWidth",
     CHANGE(text["linear_attn_config"]["short_conv_kernel_size"] = 1),
     {"short_conv_kernel_size", "from 2"}},
    {"GateTooLow", CHANGE(text["linear_attn_config"]["gate_lower_bound"] = -5.5), {"gate_lower_bound", "-5.5"}},
    {"GateZero", CHANGE(text["linear_attn_config"]["gate_lower_bound"] = 0.0), {"gate_lower_bound", "below 0", "0.0"}},
    {"GateType", CHANGE(text["linear_attn_config"]["gate_lower_bound"] = true), {"gate_lower_bound", "true"}},
    {"KdaListType", CHANGE(text["linear_attn_config"]["kda_layers"] = 3), {"kda_layers", "a list", "found 3"}},
    {"KdaListEntry", CHANGE(text["linear_attn_config"]["kda_layers"][0] = "1"), {"kda_layers", "\"1\""}},
    {"KdaLayerZero", CHANGE(text["linear_attn_config"]["kda_layers"][0] = 0), {"kda_layers", "from 1 to 5", "0"}},
    {"KdaLayerTooHigh", CHANGE(text["linear_attn_config"]["kda_layers"][0] = 6), {"kda_layers", "from 1 to 5", "6"}},
    {"KdaLayerTwice",
     CHANGE(text["linear_attn_config"]["kda_layers"] = Json({1, 1, 2, 3})),
     {"kda_layers", "layer 1 twice"}},
    {"LayerInBoth",
     CHANGE(text["linear_attn_config"]["full_attn_layers"] = Json({3, 4, 5})),
     {"full_attn_layers", "exactly one", "layer 3"}},
    {"LayerInNone", CHANGE(text["linear_attn_config"]["full_attn_layers"] = Json({4})), {"layer 5 in neither"}},
    {"QuantMethod", CHANGE(text["quantization_config"]["quant_method"] = "fp8"), {"quant_method", "\"fp8\""}},
    {"QuantFormat", CHANGE(text["quantization_config"]["format"] = "nvfp4"), {"format", "\"nvfp4\""}},
    {"QuantGroup",
     CHANGE(text["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16),
     {"config_groups.group_0.weights.group_size", "32", "16"}},
    {"QuantBits",
     CHANGE(text["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8),
     {"num_bits"}},
    {"QuantGroupType", CHANGE(text["quantization_config"]["config_groups"]["group_0"] = 1), {"config_groups"}},
    {"EosOutside", CHANGE(text["eos_token_id"] = 256), {"eos_token_id", "from 0 to 255", "256"}},
    {"EosListOutside", CHANGE(text["eos_token_id"] = Json({1, 256})), {"eos_token_id", "from 0 to 255", "256"}},
    {"OuterEosOutside", CHANGE(root["eos_token_id"] = -1), {"eos_token_id", "from 0 to 255", "-1"}},
    {"QuantStatus", CHANGE(text["quantization_config"]["quantization_status"] = "frozen"), {"\"compressed\""}},
    {"QuantNoGroup", CHANGE(text["quantization_config"]["config_groups"] = Json::object()), {"at least one group"}},
    {"QuantCache",
     CHANGE(text["quantization_config"]["kv_cache_scheme"] = {{"num_bits", 8}}),
     {"quantization_config.kv_cache_scheme", "null"}},
    {"QuantTransform",
     CHANGE(text["quantization_config"]["transform_config"] = {{"R1", 1}}),
     {"quantization_config.transform_config", "null"}},
    {"QuantSparsity",
     CHANGE(text["quantization_config"]["sparsity_config"] = {{"format", "sparse-24"}}),
     {"quantization_config.sparsity_config", "null"}},
    {"QuantInputs",
     CHANGE(text["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {{"num_bits", 8}}),
     {"config_groups.group_0.input_activations", "null"}},
    {"QuantOutputs",
     CHANGE(text["quantization_config"]["config_groups"]["group_0"]["output_activations"] = {{"num_bits", 8}}),
     {"config_groups.group_0.output_activations", "null"}},
    {"QuantGroupFormat",
     CHANGE(text["quantization_config"]["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized"),
     {"config_groups.group_0.format", "nvfp4"}},
    {"QuantScaleType",
     CHANGE(text["quantization_config"]["config_groups"]["group_0"]["weights"]["scale_dtype"] = "torch.float8_e4m3fn"),
     {"weights.scale_dtype", "torch.uint8"}},
    {"QuantStrategy",
     CHANGE(text["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "channel"),
     {"weights.strategy", "\"group\""}},
    {"QuantDynamic",
     CHANGE(text["quantization_config"]["config_groups"]["group_0"]["weights"]["dynamic"] = true),
     {"weights.dynamic", "false"}},
    {"QuantOrder",
     CHANGE(text["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"),
     {"weights.actorder", "null"}},
    {"QuantTwice",
     CHANGE(root["quantization_config"] = {{"quant_method", "fp8"}}),
     {"quantization_config", "the same"}},
    {"LinearUnknown",
     CHANGE(text["linear_attn_config"]["allow_neg_eigval"] = true),
     {"text_config.linear_attn_config.allow_neg_eigval", "no such field"}},
    {"Bias", CHANGE(text["attention_bias"] = true), {"text_config.attention_bias", "expected false"}},
    {"QkNorm", CHANGE(text["use_qk_norm"] = true), {"text_config.use_qk_norm", "expected false"}},
    {"Window", CHANGE(text["sliding_window"] = 4096), {"text_config.sliding_window", "null", "4096"}},
    {"SoftCap", CHANGE(text["final_logit_softcapping"] = 30.0), {"text_config.final_logit_softcapping", "30.0"}},
    {"LogitScale", CHANGE(text["logit_scale"] = 0.5), {"text_config.logit_scale", "expected 1", "0.5"}},
    {"TiedDisagree", CHANGE(root["tie_word_embeddings"] = true), {"tie_word_embeddings", "outer"}},
    {"BlockSize", CHANGE(text["attn_res_block_size"] = 0), {"attn_res_block_size", "found 0"}},
};
#undef CHANGE

INSTANTIATE_TEST_SUITE_P(All, WrongConfigTest, ::testing::ValuesIn(kWrongConfigs),
                         [](const auto& info) { return info.param.name; });

TEST(ModelConfigTest, NotJson) {
  for (const char* text : {"", "{", "[]", "null", "{\"model_type\":}", "{\"a\":1} x", "\xff\xfe", "{\"a\": 1e999}"}) {
    const auto config = ParseModelConfig(text, "config.json");
    ASSERT_FALSE(config.ok()) << text;
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(ModelConfigTest, DeepNestingIsRefusedNotFollowed) {
  const std::string deep = "{\"model_type\": " + std::string(4'000'000, '[') + std::string(4'000'000, ']') + "}";
  const auto config = ParseModelConfig(deep, "config.json");
  EXPECT_THAT(std::string(config.status().message()), HasSubstr("nested more than 64 levels"));
  // Brackets inside strings do not nest.
  Json root = Json::parse(testing::ConfigJson(testing::SmallK3Config()));
  root["note"] = std::string(1000, '[') + "\\\"" + std::string(1000, '{');
  EXPECT_TRUE(ParseModelConfig(root.dump(), "config.json").ok());
}

TEST(ModelConfigTest, MissingDirectoryAndFile) {
  const testing::TempDir dir;
  const auto no_dir = LoadModelConfig(dir.File("nowhere"));
  EXPECT_EQ(no_dir.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(no_dir.status().message()), HasSubstr("nowhere"));
  const auto no_file = LoadModelConfig(dir.path());
  EXPECT_EQ(no_file.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(no_file.status().message()), HasSubstr("config.json"));
}

}  // namespace
}  // namespace k3
