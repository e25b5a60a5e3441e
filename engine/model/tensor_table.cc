#include "engine/model/tensor_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

// Collects the tensors below one name prefix.
class Table {
 public:
  explicit Table(std::string prefix) : prefix_(std::move(prefix)) {}

  TensorSpec& Add(TensorRole role, const char* name, std::vector<int64_t> shape, TensorForm form, TensorShard shard) {
    TensorSpec spec;
    spec.role = role;
    spec.name = prefix_ + name;
    spec.shape = std::move(shape);
    spec.form = form;
    spec.shard = shard;
    specs_.push_back(std::move(spec));
    return specs_.back();
  }
  TensorSpec& Matrix(TensorRole role, const char* name, int64_t rows, int64_t cols, TensorShard shard) {
    return Add(role, name, {rows, cols}, TensorForm::kMatrix, shard);
  }
  TensorSpec& Vector(TensorRole role, const char* name, int64_t size, TensorShard shard = TensorShard::kReplicated) {
    return Add(role, name, {size}, TensorForm::kVector, shard);
  }

  std::vector<TensorSpec> Take() { return std::move(specs_); }

 private:
  std::string prefix_;
  std::vector<TensorSpec> specs_;
};

using Role = TensorRole;
constexpr TensorShard kReplicated = TensorShard::kReplicated;
constexpr TensorShard kRows = TensorShard::kRows;
constexpr TensorShard kColumns = TensorShard::kColumns;

std::string LayerPrefix(const ModelConfig& c, int32_t layer) {
  return absl::StrCat(c.tensor_prefix, "model.layers.", layer, ".");
}

void AddKda(const ModelConfig& c, Table& table) {
  const int64_t d = c.hidden_size, channels = c.kda_channels(), head_dim = c.kda_head_dim;
  table.Matrix(Role::kQ, "self_attn.q_proj.weight", channels, d, kRows);
  table.Matrix(Role::kK, "self_attn.k_proj.weight", channels, d, kRows);
  table.Matrix(Role::kV, "self_attn.v_proj.weight", channels, d, kRows);
  if (c.use_full_rank_gate) {
    table.Matrix(Role::kGate, "self_attn.g_proj.weight", channels, d, kRows);
  } else {
    table.Matrix(Role::kGateA, "self_attn.g_a_proj.weight", head_dim, d, kReplicated);
    table.Matrix(Role::kGateB, "self_attn.g_b_proj.weight", channels, head_dim, kRows);
  }
  const auto conv = [&](Role role, const char* name) {
    table.Add(role, name, {channels, c.conv_width}, TensorForm::kConvTaps, kRows).released = DType::kF32;
  };
  conv(Role::kQConv, "self_attn.q_conv1d.weight");
  conv(Role::kKConv, "self_attn.k_conv1d.weight");
  conv(Role::kVConv, "self_attn.v_conv1d.weight");
  table.Matrix(Role::kDecayA, "self_attn.f_a_proj.weight", head_dim, d, kReplicated);
  table.Matrix(Role::kDecayB, "self_attn.f_b_proj.weight", channels, head_dim, kRows);
  table.Matrix(Role::kBeta, "self_attn.b_proj.weight", c.kda_heads, d, kRows);
  TensorSpec& a_log = table.Add(Role::kALog, "self_attn.A_log", {c.kda_heads}, TensorForm::kALog, kRows);
  a_log.released = DType::kF32;
  // K3 files hold one value per channel of a head, of which the first ones count.
  if (!c.tensor_prefix.empty()) a_log.padding = std::max<int64_t>(head_dim - c.kda_heads, 0);
  table.Vector(Role::kDtBias, "self_attn.dt_bias", channels, kRows).released = DType::kF32;
  table.Vector(Role::kONorm, "self_attn.o_norm.weight", head_dim).released = DType::kF32;
  table.Matrix(Role::kO, "self_attn.o_proj.weight", d, channels, kColumns);
}

void AddMla(const ModelConfig& c, Table& table) {
  const int64_t d = c.hidden_size, heads = c.num_attention_heads;
  const int64_t q_rows = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim);
  if (c.q_lora_rank > 0) {
    table.Matrix(Role::kQA, "self_attn.q_a_proj.weight", c.q_lora_rank, d, kReplicated);
    table.Vector(Role::kQANorm, "self_attn.q_a_layernorm.weight", c.q_lora_rank);
    table.Matrix(Role::kQB, "self_attn.q_b_proj.weight", q_rows, c.q_lora_rank, kRows);
  } else {
    table.Matrix(Role::kQ, "self_attn.q_proj.weight", q_rows, d, kRows);
  }
  table.Matrix(Role::kKvA, "self_attn.kv_a_proj_with_mqa.weight", c.latent_line_elements(), d, kReplicated);
  table.Vector(Role::kKvANorm, "self_attn.kv_a_layernorm.weight", c.kv_lora_rank);
  table.Matrix(Role::kKvB, "self_attn.kv_b_proj.weight", heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank,
               kRows);
  if (c.mla_use_output_gate) {
    table.Matrix(Role::kGate, "self_attn.g_proj.weight", heads * c.v_head_dim, d, kRows);
  }
  table.Matrix(Role::kO, "self_attn.o_proj.weight", d, heads * c.v_head_dim, kColumns);
}

void AddMoe(const ModelConfig& c, Table& table) {
  const int64_t d = c.hidden_size;
  table.Matrix(Role::kRouter, "block_sparse_moe.gate.weight", c.num_experts, d, kReplicated);
  table.Vector(Role::kRouterBias, "block_sparse_moe.gate.e_score_correction_bias", c.num_experts).released =
      DType::kF32;
  if (const int64_t latent = c.routed_expert_hidden_size; latent > 0) {
    table.Matrix(Role::kLatentDown, "block_sparse_moe.routed_expert_down_proj.weight", latent, d, kReplicated);
    if (c.latent_moe_use_norm) table.Vector(Role::kLatentNorm, "block_sparse_moe.routed_expert_norm.weight", latent);
    table.Matrix(Role::kLatentUp, "block_sparse_moe.routed_expert_up_proj.weight", d, latent, kColumns);
  }
  if (const int64_t width = c.shared_intermediate_size(); width > 0) {
    table.Matrix(Role::kSharedGate, "block_sparse_moe.shared_experts.gate_proj.weight", width, d, kRows);
    table.Matrix(Role::kSharedUp, "block_sparse_moe.shared_experts.up_proj.weight", width, d, kRows);
    table.Matrix(Role::kSharedDown, "block_sparse_moe.shared_experts.down_proj.weight", d, width, kColumns);
  }
}

}  // namespace

int64_t TensorSpec::elements() const {
  int64_t count = 1;
  for (int64_t dim : shape) count *= dim;
  return count;
}

std::vector<TensorSpec> ModelTensors(const ModelConfig& c) {
  Table table(c.tensor_prefix);
  table.Matrix(Role::kEmbedding, "model.embed_tokens.weight", c.vocab_size, c.hidden_size, kRows);
  table.Matrix(Role::kLmHead, "lm_head.weight", c.vocab_size, c.hidden_size, kRows).required = !c.tie_word_embeddings;
  table.Vector(Role::kFinalNorm, "model.norm.weight", c.hidden_size);
  if (c.attn_res_block_size > 0) {
    table.Vector(Role::kOutputMixNorm, "model.output_attn_res_norm.weight", c.hidden_size);
    table.Add(Role::kOutputMixProj, "model.output_attn_res_proj.weight", {1, c.hidden_size}, TensorForm::kVector,
              kReplicated);
  }
  return table.Take();
}

std::vector<TensorSpec> LayerTensors(const ModelConfig& c, int32_t layer) {
  const int64_t d = c.hidden_size;
  Table table(LayerPrefix(c, layer));
  table.Vector(Role::kInputNorm, "input_layernorm.weight", d);
  table.Vector(Role::kPostAttentionNorm, "post_attention_layernorm.weight", d);
  if (c.attn_res_block_size > 0) {
    // Before layer 0 there is nothing to mix: the released checkpoint holds its pair, the model never reads it.
    table.Vector(Role::kAttentionMixNorm, "self_attention_res_norm.weight", d).required = layer > 0;
    table.Add(Role::kAttentionMixProj, "self_attention_res_proj.weight", {1, d}, TensorForm::kVector, kReplicated)
        .required = layer > 0;
    table.Vector(Role::kMlpMixNorm, "mlp_res_norm.weight", d);
    table.Add(Role::kMlpMixProj, "mlp_res_proj.weight", {1, d}, TensorForm::kVector, kReplicated);
  }
  if (c.layers[layer] == LayerKind::kKda) {
    AddKda(c, table);
  } else {
    AddMla(c, table);
  }
  if (c.IsMoe(layer)) {
    AddMoe(c, table);
  } else {
    table.Matrix(Role::kMlpGate, "mlp.gate_proj.weight", c.intermediate_size, d, kRows);
    table.Matrix(Role::kMlpUp, "mlp.up_proj.weight", c.intermediate_size, d, kRows);
    table.Matrix(Role::kMlpDown, "mlp.down_proj.weight", d, c.intermediate_size, kColumns);
  }
  return table.Take();
}

std::vector<TensorSpec> ExpertTensors(const ModelConfig& c, int32_t layer, int32_t expert) {
  const int64_t width = c.expert_width(), inner = c.moe_intermediate_size;
  Table table(absl::StrCat(LayerPrefix(c, layer), "block_sparse_moe.experts.", expert, "."));
  const auto add = [&](Role role, const char* name, int64_t rows, int64_t cols) {
    table.Add(role, name, {rows, cols}, TensorForm::kExpert, TensorShard::kExperts);
  };
  add(Role::kExpertW1, "w1.weight", inner, width);
  add(Role::kExpertW3, "w3.weight", inner, width);
  add(Role::kExpertW2, "w2.weight", width, inner);
  return table.Take();
}

}  // namespace k3
