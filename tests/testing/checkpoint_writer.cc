#include "tests/testing/checkpoint_writer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "engine/model/random_weights.h"
#include "engine/model/tensor_table.h"
#include "kernels/core/bfloat16.h"
#include "nlohmann/json.hpp"

namespace k3::testing {
namespace {

using Json = nlohmann::ordered_json;

// Exact for the values the tests use (normal range); ties away from zero do not matter here.
uint16_t FloatToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const int exponent = static_cast<int>((bits >> 23) & 0xff) - 127 + 15;
  if (exponent <= 0) return static_cast<uint16_t>(sign);
  const uint32_t rounded = (static_cast<uint32_t>(exponent) << 10) + (((bits & 0x7fffff) + 0x1000) >> 13);
  return static_cast<uint16_t>(sign | std::min<uint32_t>(rounded, 0x7bff));
}

void AppendFloat(DType dtype, float value, std::vector<uint8_t>& out) {
  uint8_t bytes[4];
  if (dtype == DType::kF32) {
    std::memcpy(bytes, &value, 4);
  } else {
    const uint16_t half = dtype == DType::kBF16 ? FloatToBf16(value) : FloatToF16(value);
    std::memcpy(bytes, &half, 2);
  }
  out.insert(out.end(), bytes, bytes + SizeOf(dtype));
}

double ElementOf(const CheckpointTensor& tensor, size_t index) {
  if (tensor.dtype == "F32") {
    float value;
    std::memcpy(&value, tensor.data.data() + index * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, tensor.data.data() + index * 2, 2);
  return tensor.dtype == "BF16" ? Bf16ToFloat(bits) : F16ToFloat(bits);
}

float Element(const TensorSpec& spec, uint64_t seed, uint64_t index) {
  const float noise = RandomNormal(seed, index);
  switch (spec.form) {
    case TensorForm::kMatrix:
    case TensorForm::kExpert:
      return RandomStddev(spec) * noise;
    default:
      break;
  }
  const float value = RandomElement(spec, seed, index);
  // Norm weights away from exactly 1 and biases away from 0, so that leaving one out is seen.
  if (value == 1.0f) return 1 + 0.1f * noise;
  if (value == 0.0f) return 0.1f * noise;
  return value;
}

CheckpointTensor PlainTensor(const TensorSpec& spec, const CheckpointForm& form, const ModelConfig& config) {
  CheckpointTensor tensor;
  tensor.name = spec.name;
  tensor.shape = spec.shape;
  DType dtype = form.plain_dtype;
  int64_t padding = 0;
  if (spec.form == TensorForm::kConvTaps) {
    dtype = form.conv_dtype;
    if (form.conv_3d) tensor.shape = {spec.shape[0], 1, spec.shape[1]};
  } else if (spec.released == DType::kF32) {
    dtype = DType::kF32;
  }
  if (spec.form == TensorForm::kALog) {
    const int64_t heads = spec.shape[0];
    if (form.a_log == CheckpointForm::ALog::kFourD) tensor.shape = {1, 1, heads, 1};
    if (form.a_log == CheckpointForm::ALog::kPadded) {
      padding = std::max<int64_t>(config.kda_head_dim, heads + 1) - heads;
      tensor.shape = {heads + padding};
    }
  }
  tensor.dtype = Name(dtype);
  const uint64_t seed = RandomSeed(form.seed, spec.name, 0);
  const int64_t count = spec.elements();
  for (int64_t i = 0; i < count; ++i) AppendFloat(dtype, Element(spec, seed, i), tensor.data);
  for (int64_t i = 0; i < padding; ++i) AppendFloat(dtype, 0, tensor.data);
  return tensor;
}

void AddPacked(const TensorSpec& spec, const CheckpointForm& form, std::vector<CheckpointTensor>& out) {
  const uint64_t seed = RandomSeed(form.seed, spec.name, 0);
  const int64_t rows = spec.shape[0], cols = spec.shape[1];
  CheckpointTensor packed{spec.name + "_packed", "U8", {rows, cols / 2}, {}};
  CheckpointTensor scale{spec.name + "_scale", "U8", {rows, cols / kMxfp4BlockSize}, {}};
  packed.data.resize(static_cast<size_t>(rows * cols / 2));
  WriteRandomBytes(seed, packed.data.data(), packed.data.size());
  scale.data.resize(static_cast<size_t>(rows * cols / kMxfp4BlockSize));
  const uint8_t middle = RandomScaleCode(RandomStddev(spec));
  for (size_t i = 0; i < scale.data.size(); ++i) {
    scale.data[i] = static_cast<uint8_t>(middle - 1 + RandomBits(seed ^ 1, i) % 3);
  }
  out.push_back(std::move(packed));
  out.push_back(std::move(scale));
}

std::string DumpHeader(const std::vector<CheckpointTensor>& tensors) {
  Json header;
  header["__metadata__"] = {{"format", "pt"}};
  uint64_t offset = 0;
  for (const CheckpointTensor& tensor : tensors) {
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.data.size()}}};
    offset += tensor.data.size();
  }
  std::string text = header.dump();
  while (text.size() % 8 != 0) text += ' ';
  return text;
}

Json TextConfig(const ModelConfig& c) {
  Json json;
  json["model_type"] = "kimi_linear";
  json["vocab_size"] = c.vocab_size;
  json["hidden_size"] = c.hidden_size;
  json["num_hidden_layers"] = c.num_hidden_layers;
  json["intermediate_size"] = c.intermediate_size;
  json["rms_norm_eps"] = c.rms_norm_eps;
  json["tie_word_embeddings"] = c.tie_word_embeddings;
  json["max_position_embeddings"] = c.max_position_embeddings;
  json["bos_token_id"] = c.bos_token_id;
  json["eos_token_id"] = c.eos_token_ids;
  json["pad_token_id"] = c.pad_token_id;
  json["num_attention_heads"] = c.num_attention_heads;
  json["num_key_value_heads"] = c.num_attention_heads;
  json["q_lora_rank"] = c.q_lora_rank > 0 ? Json(c.q_lora_rank) : Json(nullptr);
  json["kv_lora_rank"] = c.kv_lora_rank;
  json["qk_nope_head_dim"] = c.qk_nope_head_dim;
  json["qk_rope_head_dim"] = c.qk_rope_head_dim;
  json["v_head_dim"] = c.v_head_dim;
  json["mla_use_nope"] = true;
  json["mla_use_output_gate"] = c.mla_use_output_gate;
  const bool situ = c.activation.kind == Activation::kSitu;
  json["hidden_act"] = situ ? "situ" : "silu";
  if (situ) {
    json["activation_situ_beta"] = c.activation.beta;
    if (c.activation.linear_beta > 0) json["activation_situ_linear_beta"] = c.activation.linear_beta;
  }
  json["num_experts"] = c.num_experts;
  if (c.num_experts > 0) {
    json["num_experts_per_token"] = c.num_experts_per_token;
    json["num_shared_experts"] = c.num_shared_experts;
    json["moe_intermediate_size"] = c.moe_intermediate_size;
    if (c.routed_expert_hidden_size > 0) json["routed_expert_hidden_size"] = c.routed_expert_hidden_size;
    json["latent_moe_use_norm"] = c.latent_moe_use_norm;
    json["first_k_dense_replace"] = c.first_k_dense_replace;
    json["moe_layer_freq"] = c.moe_layer_freq;
    json["moe_renormalize"] = c.moe_renormalize;
    json["moe_router_activation_func"] = c.router_score == RouterScore::kSigmoid ? "sigmoid" : "softmax";
    json["num_expert_group"] = c.num_expert_group;
    json["topk_group"] = c.topk_group;
    json["use_grouped_topk"] = true;
    json["routed_scaling_factor"] = c.routed_scaling_factor;
  }
  if (c.attn_res_block_size > 0) json["attn_res_block_size"] = c.attn_res_block_size;
  Json linear;
  linear["kda_layers"] = Json::array();
  linear["full_attn_layers"] = Json::array();
  for (size_t layer = 0; layer < c.layers.size(); ++layer) {
    linear[c.layers[layer] == LayerKind::kKda ? "kda_layers" : "full_attn_layers"].push_back(layer + 1);
  }
  linear["head_dim"] = c.kda_head_dim;
  linear["num_heads"] = c.kda_heads;
  linear["short_conv_kernel_size"] = c.conv_width;
  linear["use_full_rank_gate"] = c.use_full_rank_gate;
  if (c.kda_gate == KdaGate::kBounded) linear["gate_lower_bound"] = c.gate_lower_bound;
  json["linear_attn_config"] = linear;
  if (c.mxfp4_experts) {
    json["quantization_config"] = {
        {"quant_method", "compressed-tensors"},
        {"format", "mxfp4-pack-quantized"},
        {"ignore", {"re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"}},
        {"config_groups",
         {{"group_0",
           {{"targets", {"Linear"}},
            {"weights", {{"num_bits", 4}, {"type", "float"}, {"group_size", 32}, {"symmetric", true}}}}}}}};
  }
  return json;
}

}  // namespace

std::string ConfigJson(const ModelConfig& config) {
  Json text = TextConfig(config);
  if (config.tensor_prefix.empty()) return text.dump(1);
  Json root;
  root["model_type"] = config.model_type;
  root["tie_word_embeddings"] = config.tie_word_embeddings;
  if (config.has_vision) root["vision_config"] = {{"vt_hidden_size", 8}};
  root["text_config"] = std::move(text);
  return root.dump(1);
}

ModelConfig SmallK3Config() {
  ModelConfig c = SmallKimiLinearConfig();
  c.model_type = "kimi_k3";
  c.tensor_prefix = "language_model.";
  c.layers[4] = LayerKind::kMla;
  c.kda_gate = KdaGate::kBounded;
  c.gate_lower_bound = -5;
  c.use_full_rank_gate = true;
  c.q_lora_rank = 24;
  c.mla_use_output_gate = true;
  c.activation = {Activation::kSitu, 4, 25};
  c.num_shared_experts = 2;
  c.routed_expert_hidden_size = 32;
  c.latent_moe_use_norm = true;
  c.routed_scaling_factor = 1;
  c.mxfp4_experts = true;
  c.attn_res_block_size = 2;
  return c;
}

ModelConfig SmallKimiLinearConfig() {
  ModelConfig c;
  c.model_type = "kimi_linear";
  c.vocab_size = 256;
  c.hidden_size = 64;
  c.num_hidden_layers = 5;
  c.intermediate_size = 96;
  c.max_position_embeddings = 4096;
  c.bos_token_id = 250;
  c.eos_token_ids = {251};
  c.pad_token_id = 255;
  c.layers = {LayerKind::kKda, LayerKind::kKda, LayerKind::kKda, LayerKind::kMla, LayerKind::kKda};
  c.kda_heads = 2;
  c.kda_head_dim = 16;
  c.conv_width = 4;
  c.num_attention_heads = 2;
  c.kv_lora_rank = 40;
  c.qk_nope_head_dim = 16;
  c.qk_rope_head_dim = 8;
  c.v_head_dim = 16;
  c.activation = {Activation::kSwiglu, 1, 0};
  c.num_experts = 8;
  c.num_experts_per_token = 2;
  c.num_shared_experts = 1;
  c.moe_intermediate_size = 32;
  c.first_k_dense_replace = 1;
  c.routed_scaling_factor = 2.446f;
  return c;
}

TestCheckpoint::TestCheckpoint(const ModelConfig& model_config, const CheckpointForm& form) : config(model_config) {
  for (const TensorSpec& spec : ModelTensors(config)) {
    if (spec.role == TensorRole::kLmHead && config.tie_word_embeddings) continue;
    tensors.push_back(PlainTensor(spec, form, config));
  }
  for (int32_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    for (const TensorSpec& spec : LayerTensors(config, layer)) tensors.push_back(PlainTensor(spec, form, config));
    if (!config.IsMoe(layer)) continue;
    for (int32_t expert = 0; expert < config.num_experts; ++expert) {
      for (const TensorSpec& spec : ExpertTensors(config, layer, expert)) {
        if (config.mxfp4_experts) {
          AddPacked(spec, form, tensors);
        } else {
          tensors.push_back(PlainTensor(spec, form, config));
        }
      }
    }
  }
}

CheckpointTensor* TestCheckpoint::Find(const std::string& name) {
  for (CheckpointTensor& tensor : tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

void TestCheckpoint::Remove(const std::string& name) {
  std::erase_if(tensors, [&](const CheckpointTensor& tensor) { return tensor.name == name; });
}

std::vector<double> TestCheckpoint::Doubles(const std::string& short_name) const {
  const std::string name = config.tensor_prefix + short_name;
  const CheckpointTensor* plain = nullptr;
  const CheckpointTensor* packed = nullptr;
  const CheckpointTensor* scale = nullptr;
  for (const CheckpointTensor& tensor : tensors) {
    if (tensor.name == name) plain = &tensor;
    if (tensor.name == name + "_packed") packed = &tensor;
    if (tensor.name == name + "_scale") scale = &tensor;
  }
  std::vector<double> values;
  if (plain != nullptr) {
    size_t count = 1;
    for (int64_t dim : plain->shape) count *= static_cast<size_t>(dim);
    if (name.ends_with(".A_log")) count = static_cast<size_t>(config.kda_heads);
    for (size_t i = 0; i < count; ++i) values.push_back(ElementOf(*plain, i));
  } else if (packed != nullptr && scale != nullptr) {
    constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (size_t i = 0; i < packed->data.size() * 2; ++i) {
      const int code = (packed->data[i / 2] >> (4 * (i % 2))) & 15;
      const double value = kMagnitudes[code & 7] * std::ldexp(1.0, scale->data[i / 32] - 127);
      values.push_back((code & 8) != 0 ? -value : value);
    }
  }
  return values;
}

void TestCheckpoint::Write(const std::string& dir, int shards) const {
  WriteFile(dir + "/config.json", ConfigJson(config));
  if (shards == 1) {
    WriteSafetensors(dir + "/model.safetensors", tensors);
    return;
  }
  Json map = Json::object();
  uint64_t total = 0;
  for (int shard = 0; shard < shards; ++shard) {
    const size_t begin = tensors.size() * shard / shards, end = tensors.size() * (shard + 1) / shards;
    const std::vector<CheckpointTensor> part(tensors.begin() + begin, tensors.begin() + end);
    for (const CheckpointTensor& tensor : part) {
      map[tensor.name] = ShardName(shard, shards);
      total += tensor.data.size();
    }
    WriteSafetensors(dir + "/" + ShardName(shard, shards), part);
  }
  Json index;
  index["metadata"] = {{"total_size", total}};
  index["weight_map"] = map;
  WriteFile(dir + "/model.safetensors.index.json", index.dump(1));
}

std::string ShardName(int shard, int shards) {
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05d-of-%06d.safetensors", shard + 1, shards);
  return name;
}

void WriteSafetensors(const std::string& path, const std::vector<CheckpointTensor>& tensors) {
  std::vector<uint8_t> data;
  for (const CheckpointTensor& tensor : tensors) data.insert(data.end(), tensor.data.begin(), tensor.data.end());
  WriteRawSafetensors(path, DumpHeader(tensors), data);
}

void WriteRawSafetensors(const std::string& path, const std::string& header, const std::vector<uint8_t>& data) {
  const uint64_t length = header.size();
  std::string bytes(reinterpret_cast<const char*>(&length), 8);
  bytes += header;
  bytes.append(reinterpret_cast<const char*>(data.data()), data.size());
  WriteFile(path, bytes);
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!stream.flush()) throw std::runtime_error("cannot write " + path);
}

std::string ReadFile(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot read " + path);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

}  // namespace k3::testing
