#include "engine/model/model_config.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "engine/model/config_fields.h"
#include "engine/model/config_names.h"
#include "engine/model/file_link.h"
#include "engine/model/name_list.h"
#include "engine/model/quantization_config.h"
#include "spdlog/spdlog.h"

namespace k3 {
namespace {

using Json = nlohmann::json;

// Far above any released model; they keep every product of sizes within 64 bits.
constexpr int64_t kMaxWidth = int64_t{1} << 20;
constexpr int64_t kMaxVocab = int64_t{1} << 24;
constexpr int64_t kMaxHeads = 1 << 13;
constexpr int64_t kMaxHeadDim = 1 << 13;
constexpr int64_t kMaxLayers = 1 << 13;
constexpr int64_t kMaxExperts = 1 << 16;
constexpr int64_t kMaxContext = int64_t{1} << 30;
constexpr size_t kMaxFileBytes = 16u << 20;
constexpr int kMaxDepth = 64;

// Deepest nesting of brackets outside strings. nlohmann's parser keeps its own stack on the heap, but copying or
// printing what it built recurses, so the text is refused before.
int NestingDepth(const std::string& text) {
  int depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

// Switches of related models that would change the computation; no released file sets one, so none is implemented.
void RefuseForeignSwitches(ConfigFields& text) {
  for (const char* name : {"attention_bias", "mlp_bias", "use_bias", "qk_norm", "use_qk_norm", "use_qk_layernorm"}) {
    if (text.BoolOr(name, false)) text.Fail(name, "false");
  }
  for (const char* name : {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}) {
    if (text.Has(name)) text.Fail(name, "null");
  }
  for (const char* name : {"logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"}) {
    if (text.NumberOr(name, 1, -1e6, 1e6) != 1) text.Fail(name, "1");
  }
}

void ReadLayerKinds(ConfigFields& linear, ModelConfig& config) {
  const int64_t count = config.num_hidden_layers;
  const std::vector<int64_t> kda = linear.Ints("kda_layers", 1, count);
  const std::vector<int64_t> full = linear.Ints("full_attn_layers", 1, count);
  if (!linear.ok()) return;
  std::vector<int> uses(static_cast<size_t>(count), 0);
  config.layers.assign(static_cast<size_t>(count), LayerKind::kKda);
  for (int64_t layer : kda) {
    if (++uses[layer - 1] > 1) linear.Fail("kda_layers", "each layer once", absl::StrCat("layer ", layer, " twice"));
  }
  for (int64_t layer : full) {
    if (++uses[layer - 1] > 1) {
      linear.Fail("full_attn_layers", "each layer in exactly one of kda_layers and full_attn_layers",
                  absl::StrCat("layer ", layer, " a second time"));
    }
    config.layers[layer - 1] = LayerKind::kMla;
  }
  for (int64_t layer = 1; layer <= count; ++layer) {
    if (uses[layer - 1] == 0) {
      linear.Fail("kda_layers",
                  absl::StrCat("each of the ", count, " layers (numbered from 1) in kda_layers or full_attn_layers"),
                  absl::StrCat("layer ", layer, " in neither"));
    }
  }
}

void ReadKda(ConfigFields& linear, ModelConfig& config) {
  config.kda_heads = static_cast<int32_t>(linear.Int("num_heads", 1, kMaxHeads));
  config.kda_head_dim = static_cast<int32_t>(linear.Int("head_dim", 1, kMaxHeadDim));
  config.conv_width = static_cast<int32_t>(linear.Int("short_conv_kernel_size", 2, 8));
  config.use_full_rank_gate = linear.BoolOr("use_full_rank_gate", false);
  if (linear.Has("gate_lower_bound")) {
    config.kda_gate = KdaGate::kBounded;
    config.gate_lower_bound = static_cast<float>(linear.Number("gate_lower_bound", -5.0, 0.0));
    if (config.gate_lower_bound == 0.0f) linear.Fail("gate_lower_bound", "a number from -5 to below 0");
  }
  ReadLayerKinds(linear, config);
  // Every field of this object shapes the recurrence: one that is not known here cannot be passed over.
  for (const std::string& name : linear.Others(LinearAttentionFields())) {
    linear.Fail(name.c_str(), "no such field (the released models have none, and it would be ignored)");
  }
}

void ReadMla(ConfigFields& text, ModelConfig& config) {
  config.num_attention_heads = static_cast<int32_t>(text.Int("num_attention_heads", 1, kMaxHeads));
  const int64_t kv_heads = text.IntOr("num_key_value_heads", config.num_attention_heads, 1, kMaxHeads);
  if (kv_heads != config.num_attention_heads) {
    text.Fail("num_key_value_heads", absl::StrCat("num_attention_heads (", config.num_attention_heads, ")"));
  }
  config.q_lora_rank = text.IntOr("q_lora_rank", 0, 1, kMaxWidth);
  config.kv_lora_rank = static_cast<int32_t>(text.Int("kv_lora_rank", 1, kMaxWidth));
  config.qk_nope_head_dim = static_cast<int32_t>(text.Int("qk_nope_head_dim", 1, kMaxHeadDim));
  config.qk_rope_head_dim = static_cast<int32_t>(text.Int("qk_rope_head_dim", 0, kMaxHeadDim));
  config.v_head_dim = static_cast<int32_t>(text.Int("v_head_dim", 1, kMaxHeadDim));
  config.mla_use_output_gate = text.BoolOr("mla_use_output_gate", false);
  if (!text.BoolOr("mla_use_nope", false)) text.Fail("mla_use_nope", "true (rotary embedding is not implemented)");
}

void ReadActivation(ConfigFields& text, ModelConfig& config) {
  const std::string act = text.String("hidden_act");
  if (act == "situ") {
    config.activation.kind = Activation::kSitu;
    config.activation.beta = static_cast<float>(text.Number("activation_situ_beta", 1e-3, 1e6));
    config.activation.linear_beta = static_cast<float>(text.NumberOr("activation_situ_linear_beta", 0, 1e-3, 1e6));
  } else if (act == "silu") {
    config.activation.kind = Activation::kSwiglu;
    config.activation.beta = 1;
    config.activation.linear_beta = 0;
  } else {
    text.Fail("hidden_act", "\"situ\" or \"silu\"");
  }
}

void ReadRouter(ConfigFields& text, ModelConfig& config) {
  const int64_t experts = config.num_experts;
  config.num_experts_per_token = static_cast<int32_t>(text.Int("num_experts_per_token", 1, experts));
  config.moe_renormalize = text.BoolOr("moe_renormalize", true);
  config.routed_scaling_factor = static_cast<float>(text.NumberOr("routed_scaling_factor", 1.0, 1e-6, 1e6));
  const std::string score = text.StringOr("moe_router_activation_func", "sigmoid");
  if (score == "softmax") {
    config.router_score = RouterScore::kSoftmax;
  } else if (score != "sigmoid") {
    text.Fail("moe_router_activation_func", "\"sigmoid\" or \"softmax\"");
  }
  if (text.StringOr("topk_method", "noaux_tc") != "noaux_tc") text.Fail("topk_method", "\"noaux_tc\"");

  config.num_expert_group = static_cast<int32_t>(text.IntOr("num_expert_group", 1, 1, experts));
  config.topk_group = static_cast<int32_t>(text.IntOr("topk_group", 1, 1, experts));
  if (!text.ok()) return;
  if (!text.BoolOr("use_grouped_topk", true)) config.num_expert_group = config.topk_group = 1;
  const int64_t groups = config.num_expert_group;
  if (experts % groups != 0) {
    text.Fail("num_expert_group", absl::StrCat("a divisor of num_experts (", experts, ")"));
  } else if (groups > 1 && experts / groups < 2) {  // a group's score is the sum of its two best
    text.Fail("num_expert_group", absl::StrCat("groups of at least 2 of the ", experts, " experts"));
  } else if (config.topk_group > groups) {
    text.Fail("topk_group", absl::StrCat("at most num_expert_group (", groups, ")"));
  } else if (config.num_experts_per_token > experts / groups * config.topk_group) {
    text.Fail("num_experts_per_token", absl::StrCat("at most the ", experts / groups * config.topk_group,
                                                    " experts of ", config.topk_group, " groups"));
  }
}

void ReadMlp(ConfigFields& text, ModelConfig& config) {
  config.num_experts = static_cast<int32_t>(text.IntOr("num_experts", 0, 0, kMaxExperts));
  config.first_k_dense_replace = static_cast<int32_t>(text.IntOr("first_k_dense_replace", 0, 0, kMaxLayers));
  config.moe_layer_freq = static_cast<int32_t>(text.IntOr("moe_layer_freq", 1, 1, kMaxLayers));
  bool any_dense = false;
  for (int32_t layer = 0; layer < config.num_hidden_layers; ++layer) any_dense |= !config.IsMoe(layer);
  if (any_dense || text.Has("intermediate_size")) {
    config.intermediate_size = text.Int("intermediate_size", 1, kMaxWidth);
  }
  if (config.num_experts == 0) return;
  ReadRouter(text, config);
  config.moe_intermediate_size = text.Int("moe_intermediate_size", 1, kMaxWidth);
  config.num_shared_experts = static_cast<int32_t>(text.IntOr("num_shared_experts", 0, 0, 1024));
  config.routed_expert_hidden_size = text.IntOr("routed_expert_hidden_size", 0, 1, kMaxWidth);
  config.latent_moe_use_norm = text.BoolOr("latent_moe_use_norm", false);
  if (config.latent_moe_use_norm && config.routed_expert_hidden_size == 0) {
    text.Fail("latent_moe_use_norm", "false without routed_expert_hidden_size");
  }
}

// Fields that K3 carries both outside and inside text_config: the inner one counts, the outer one must not contradict.
void ReadSharedFields(ConfigFields& top, ConfigFields& text, ModelConfig& config) {
  const auto id = [&](const char* name) {
    ConfigFields& owner = text.Has(name) ? text : top;
    return static_cast<int32_t>(owner.IntOr(name, -1, 0, config.vocab_size - 1));
  };
  config.bos_token_id = id("bos_token_id");
  config.pad_token_id = id("pad_token_id");
  // One id or several; those of both objects end a reply.
  for (ConfigFields* owner : {&text, &top}) {
    for (const int64_t eos : owner->IntOrInts("eos_token_id", 0, config.vocab_size - 1)) {
      const auto token = static_cast<int32_t>(eos);
      if (std::find(config.eos_token_ids.begin(), config.eos_token_ids.end(), token) == config.eos_token_ids.end()) {
        config.eos_token_ids.push_back(token);
      }
    }
  }
  const bool outer = top.BoolOr("tie_word_embeddings", false);
  config.tie_word_embeddings = text.BoolOr("tie_word_embeddings", outer);
  if (top.Has("tie_word_embeddings") && outer != config.tie_word_embeddings) {
    text.Fail("tie_word_embeddings", absl::StrCat("the outer tie_word_embeddings (", outer ? "true" : "false", ")"));
  }
}

void ReadText(ConfigFields& text, ModelConfig& config) {
  RefuseForeignSwitches(text);
  config.vocab_size = text.Int("vocab_size", 1, kMaxVocab);
  config.hidden_size = text.Int("hidden_size", 1, kMaxWidth);
  config.num_hidden_layers = static_cast<int32_t>(text.Int("num_hidden_layers", 1, kMaxLayers));
  config.rms_norm_eps = static_cast<float>(text.Number("rms_norm_eps", 1e-12, 1e-1));
  config.max_position_embeddings = text.Has("max_position_embeddings")
                                       ? text.Int("max_position_embeddings", 1, kMaxContext)
                                       : text.Int("model_max_length", 1, kMaxContext);
  config.attn_res_block_size = static_cast<int32_t>(text.IntOr("attn_res_block_size", 0, 1, kMaxLayers));
}

absl::StatusOr<Json> ParseJson(const std::string& text, const std::string& file) {
  if (NestingDepth(text) > kMaxDepth) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": nested more than ", kMaxDepth, " levels deep"));
  }
  try {
    Json root = Json::parse(text);
    if (!root.is_object()) return absl::InvalidArgumentError(absl::StrCat(file, ": expected a JSON object"));
    return root;
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": invalid JSON: ", error.what()));
  }
}

}  // namespace

int32_t ModelConfig::num_kda_layers() const {
  return static_cast<int32_t>(std::count(layers.begin(), layers.end(), LayerKind::kKda));
}

int32_t ModelConfig::num_mla_layers() const {
  return static_cast<int32_t>(std::count(layers.begin(), layers.end(), LayerKind::kMla));
}

int32_t ModelConfig::num_residual_blocks() const {
  if (attn_res_block_size == 0) return 1;
  return (num_hidden_layers + attn_res_block_size - 1) / attn_res_block_size + 1;
}

absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& json_text, const std::string& file_name) {
  auto root = ParseJson(json_text, file_name);
  if (!root.ok()) return root.status();

  absl::Status status;
  ModelConfig config;
  ConfigFields top(*root, file_name, "", &status);
  config.model_type = top.String("model_type");
  const bool nested = config.model_type == "kimi_k3";
  if (!nested && config.model_type != "kimi_linear") top.Fail("model_type", "\"kimi_k3\" or \"kimi_linear\"");
  if (!status.ok()) return status;
  config.tensor_prefix = nested ? "language_model." : "";
  config.has_vision = top.Has("vision_config");

  const std::string path = nested ? "text_config." : "";
  ConfigFields text(nested ? top.Object("text_config") : *root, file_name, path, &status);
  if (nested && text.StringOr("model_type", "kimi_linear") != "kimi_linear") {
    text.Fail("model_type", "\"kimi_linear\"");
  }
  // Each step relies on the sizes read before it.
  if (status.ok()) ReadText(text, config);
  if (status.ok()) ReadSharedFields(top, text, config);
  if (status.ok()) ReadMla(text, config);
  if (status.ok()) ReadActivation(text, config);
  if (status.ok()) ReadMlp(text, config);
  if (status.ok()) {
    const Json& linear_object = text.Object("linear_attn_config");
    ConfigFields linear(linear_object, file_name, path + "linear_attn_config.", &status);
    if (status.ok()) ReadKda(linear, config);
  }
  if (status.ok()) {
    if (nested && text.Has("quantization_config") && top.Has("quantization_config") &&
        text.Object("quantization_config") != top.Object("quantization_config")) {
      top.Fail("quantization_config", "the same as text_config.quantization_config, or none");
    }
    ConfigFields& owner = text.Has("quantization_config") ? text : top;
    if (status.ok() && owner.Has("quantization_config")) ReadQuantization(owner, config);
  }
  if (!status.ok()) return status;
  config.unknown_fields = top.Others(TopLevelFields(nested));
  if (nested) {
    for (const std::string& name : text.Others(TextFields())) config.unknown_fields.push_back(path + name);
  }
  return config;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& dir) {
  const std::string file = dir + "/config.json";
  std::error_code error;
  if (!std::filesystem::is_directory(dir, error)) {
    return absl::NotFoundError(absl::StrCat(dir, ": expected a model directory with a config.json, found none"));
  }
  // A folder reads as empty, and a pipe may never end.
  if (std::filesystem::exists(file, error) && !std::filesystem::is_regular_file(file, error)) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": expected a file, found something else"));
  }
  std::ifstream stream(file, std::ios::binary);
  if (!stream) return absl::NotFoundError(absl::StrCat(file, ": cannot be opened", DanglingLink(file)));
  std::string text(kMaxFileBytes + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(stream.gcount()));
  if (text.size() > kMaxFileBytes) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": larger than ", kMaxFileBytes, " bytes"));
  }
  auto config = ParseModelConfig(text, file);
  if (config.ok() && !config->unknown_fields.empty()) {
    NameList names;
    for (const std::string& name : config->unknown_fields) names.Add(absl::StrCat("'", EscapeName(name), "'"));
    spdlog::warn("{}: ignoring {} unknown fields: {}", file, names.count(), names.ToString());
  }
  return config;
}

absl::Status SetExpertActivations(const std::string& kind, ModelConfig& config) {
  config.mxfp8_expert_inputs = kind == "mxfp8";
  if (!config.mxfp8_expert_inputs || config.mxfp4_experts) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--expert-activations mxfp8 is for experts with MXFP4 weights, which this model's config.json does not have "
      "(quantization_config)");
}

}  // namespace k3
