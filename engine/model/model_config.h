#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/op_params.h"

namespace k3 {

enum class LayerKind : uint8_t { kKda, kMla };

// The shape of a K3 or Kimi-Linear text model, from config.json (spec 1). Immutable. Field names follow the file where
// it has them.
struct ModelConfig {
  std::string model_type;     // outermost "model_type": kimi_k3 or kimi_linear
  std::string tensor_prefix;  // "language_model." for K3, "" for Kimi-Linear
  bool has_vision = false;    // vision tensors are skipped

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int32_t num_hidden_layers = 0;
  int64_t intermediate_size = 0;  // dense MLP
  float rms_norm_eps = 1e-5f;
  bool tie_word_embeddings = false;
  int64_t max_position_embeddings = 0;  // or model_max_length
  int32_t bos_token_id = -1;
  std::vector<int32_t> eos_token_ids;  // one id or a list in the file
  int32_t pad_token_id = -1;

  std::vector<LayerKind> layers;  // [num_hidden_layers], from the 1-based lists

  // KDA
  int32_t kda_heads = 0;
  int32_t kda_head_dim = 0;  // K = V
  int32_t conv_width = 0;    // short_conv_kernel_size
  KdaGate kda_gate = KdaGate::kSoftplus;
  float gate_lower_bound = 0;  // kBounded only
  bool use_full_rank_gate = false;

  // MLA
  int32_t num_attention_heads = 0;
  int64_t q_lora_rank = 0;  // 0: a single q_proj
  int32_t kv_lora_rank = 0;
  int32_t qk_nope_head_dim = 0;
  int32_t qk_rope_head_dim = 0;  // never rotated
  int32_t v_head_dim = 0;
  bool mla_use_output_gate = false;
  float latent_norm_eps = 1e-6f;  // not in the file: --latent-norm-eps

  // MLP and MoE
  ActivationSpec activation;
  int32_t num_experts = 0;  // 0: dense everywhere
  int32_t num_experts_per_token = 0;
  int32_t num_shared_experts = 0;
  int64_t moe_intermediate_size = 0;
  int64_t routed_expert_hidden_size = 0;  // 0: experts act on hidden_size
  bool latent_moe_use_norm = false;
  int32_t first_k_dense_replace = 0;
  int32_t moe_layer_freq = 1;
  bool moe_renormalize = true;
  RouterScore router_score = RouterScore::kSigmoid;
  int32_t num_expert_group = 1;
  int32_t topk_group = 1;
  float routed_scaling_factor = 1.0f;
  bool biased_router_weights = false;  // not in the file: --kl-router-weights
  bool mxfp4_experts = false;          // quantization_config is mxfp4-pack-quantized
  bool mxfp8_expert_inputs = false;    // not in the file: --expert-activations

  // Not in the file: this configuration is one of so many tensor-parallel ranks' share (RankConfig). Heads and
  // intermediate_size are the share already; the shared experts' width is divided below, routed experts are not cut.
  int32_t tensor_shares = 1;

  std::vector<std::string> unknown_fields;  // of the file, by path: nobody here knows what they mean

  // Residuals
  int32_t attn_res_block_size = 0;  // 0: plain residuals

  bool IsMoe(int32_t layer) const {
    return num_experts > 0 && layer >= first_k_dense_replace && layer % moe_layer_freq == 0;
  }
  int64_t expert_width() const { return routed_expert_hidden_size > 0 ? routed_expert_hidden_size : hidden_size; }
  int64_t shared_intermediate_size() const { return moe_intermediate_size * num_shared_experts / tensor_shares; }
  int64_t kda_channels() const { return static_cast<int64_t>(kda_heads) * kda_head_dim; }
  int32_t num_kda_layers() const;
  int32_t num_mla_layers() const;
  // Residual blocks a step keeps: banked ones plus the live one. 1 with plain residuals.
  int32_t num_residual_blocks() const;

  // Sizes of what a sequence keeps, per rank without tensor parallelism.
  int64_t latent_line_elements() const { return kv_lora_rank + qk_rope_head_dim; }  // per token and MLA layer
  int64_t kda_state_elements() const {                                              // per KDA layer
    return static_cast<int64_t>(kda_heads) * kda_head_dim * kda_head_dim;
  }
  int64_t conv_state_elements() const { return 3 * kda_channels() * (conv_width - 1); }  // per KDA layer
};

// Reads `dir`/config.json. Errors name the field, what was expected and what is there. A field that would change the
// computation in a way that is not implemented is such an error; a wholly unknown one is a warning.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& dir);
absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& json_text, const std::string& file_name);

// What --expert-activations says, "full" or "mxfp8", which only experts in MXFP4 have a use for: an error otherwise.
absl::Status SetExpertActivations(const std::string& kind, ModelConfig& config);

}  // namespace k3
