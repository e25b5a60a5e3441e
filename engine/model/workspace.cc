#include "engine/model/workspace.h"

#include <algorithm>

namespace k3 {
namespace {

// Hands out aligned pieces of one allocation; with a null base it only counts.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}
  void* Take(size_t bytes) {
    void* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (bytes + 255) / 256 * 256;
    return piece;
  }
  MatrixView Matrix(int64_t rows, int64_t cols, DType dtype) {
    if (cols == 0) return {};
    return {Take(static_cast<size_t>(rows * cols) * SizeOf(dtype)), dtype, rows, cols, cols};
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

int64_t KdaProjectedWidth(const ModelConfig& c) {
  if (c.num_kda_layers() == 0) return 0;
  const int64_t gate = c.use_full_rank_gate ? c.kda_channels() : c.kda_head_dim;
  return 3 * c.kda_channels() + c.kda_head_dim + c.kda_heads + gate;
}

int64_t MlaQueryWidth(const ModelConfig& c) {
  return static_cast<int64_t>(c.num_attention_heads) * (c.qk_nope_head_dim + c.qk_rope_head_dim);
}

int64_t MlaProjectedWidth(const ModelConfig& c) {
  if (c.num_mla_layers() == 0) return 0;
  const int64_t q = c.q_lora_rank > 0 ? c.q_lora_rank : MlaQueryWidth(c);
  const int64_t gate = c.mla_use_output_gate ? static_cast<int64_t>(c.num_attention_heads) * c.v_head_dim : 0;
  return q + c.latent_line_elements() + gate;
}

int64_t BankRows(const StepBounds& bounds, const WorkspaceRanks& ranks) {
  return (bounds.tokens + ranks.tensor - 1) / ranks.tensor;
}

// Widest gated activation: the dense layers' or the shared experts'.
int64_t MlpWidth(const ModelConfig& c) {
  int64_t width = 0;
  for (int32_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    width = std::max(width, c.IsMoe(layer) ? c.shared_intermediate_size() : c.intermediate_size);
  }
  return width;
}

}  // namespace

size_t Workspace::BankBytes(const ModelConfig& config, const StepBounds& bounds, DType activation,
                            const WorkspaceRanks& ranks) {
  return static_cast<size_t>(config.num_residual_blocks() * BankRows(bounds, ranks) * config.hidden_size) *
         SizeOf(activation);
}

size_t Workspace::ClosedMixesBytes(const ModelConfig& config, const StepBounds& bounds, DType activation,
                                   const WorkspaceRanks& ranks,
                                   const std::function<AttnResForm(int64_t rows, int32_t closed)>& choose) {
  const int64_t rows = BankRows(bounds, ranks);
  for (int32_t closed = 1; closed < config.num_residual_blocks(); ++closed) {
    // More rows never go back to one pass.
    if (choose(rows, closed) == AttnResForm::kTwoPhases) return AttnResMixesBytes(rows, config.hidden_size, activation);
  }
  return 0;
}

size_t Workspace::Layout(const ModelConfig& c, const StepBounds& bounds, DType act, const ScratchSizes& sizes,
                         const WorkspaceRanks& ranks, char* base) {
  const int64_t t = bounds.tokens;
  Carver carver(base);
  bank = carver.Take(BankBytes(c, bounds, act, ranks));
  bank_rows = BankRows(bounds, ranks);
  block_stride = bank_rows * c.hidden_size;
  if (sizes.closed_mixes > 0) closed_mixes = carver.Take(sizes.closed_mixes);
  // Equal parts of a step's tokens may reach beyond the last token.
  const int64_t padded = bank_rows * ranks.tensor;
  hidden = carver.Matrix(padded, c.hidden_size, act);
  sublayer_out = carver.Matrix(padded, c.hidden_size, act);
  if (ranks.tensor > 1) delta_shard = carver.Matrix(bank_rows, c.hidden_size, act);
  projected = carver.Matrix(t, std::max({KdaProjectedWidth(c), MlaProjectedWidth(c), 2 * MlpWidth(c)}), act);
  if (c.num_kda_layers() > 0) {
    decay = carver.Matrix(t, c.kda_channels(), act);
    if (!c.use_full_rank_gate) low_rank_gate = carver.Matrix(t, c.kda_channels(), act);
  }
  if (c.num_mla_layers() > 0 && c.q_lora_rank > 0) {
    q_latent = carver.Matrix(t, c.q_lora_rank, act);
    q = carver.Matrix(t, MlaQueryWidth(c), act);
  }
  attention_out =
      carver.Matrix(t, std::max(c.kda_channels(), static_cast<int64_t>(c.num_attention_heads) * c.v_head_dim), act);
  mlp_act = carver.Matrix(t, MlpWidth(c), act);
  if (c.num_experts > 0) {
    expert_in = carver.Matrix(t, c.routed_expert_hidden_size, act);
    expert_out = carver.Matrix(t, c.expert_width(), act);
    router_logits = carver.Matrix(t, c.num_experts, DType::kF32);
    expert_ids = static_cast<int32_t*>(carver.Take(static_cast<size_t>(t * c.num_experts_per_token) * 4));
    expert_weights = static_cast<float*>(carver.Take(static_cast<size_t>(t * c.num_experts_per_token) * 4));
  }
  const int64_t all = t * ranks.data;
  if (c.num_experts > 0 && ranks.data > 1) {
    const size_t pick_bytes = static_cast<size_t>(all * c.num_experts_per_token) * 4;
    gathered_in = carver.Matrix(all, c.expert_width(), act);
    gathered_out = carver.Matrix(all, c.expert_width(), act);
    gathered_ids = static_cast<int32_t*>(carver.Take(pick_bytes));
    gathered_weights = static_cast<float*>(carver.Take(pick_bytes));
    if (ranks.all_to_all) {
      send_slots = carver.Matrix(all, c.expert_width(), act);
      send_ids = static_cast<int32_t*>(carver.Take(pick_bytes));
      send_weights = static_cast<float*>(carver.Take(pick_bytes));
      send_counts = static_cast<int32_t*>(carver.Take(static_cast<size_t>(ranks.data) * 4));
      received_counts = static_cast<int32_t*>(carver.Take(static_cast<size_t>(ranks.data) * 4));
      slots = static_cast<int32_t*>(carver.Take(static_cast<size_t>(all) * 4));
    }
  }
  if (c.num_experts > 0 && ranks.expert_leaves > 1) {
    leaf_out = carver.Matrix(ranks.expert_leaves * all, c.expert_width(), act);
  }
  head_in = carver.Matrix(bounds.logits_rows, c.hidden_size, act);
  logits = carver.Matrix(bounds.logits_rows, c.vocab_size, DType::kF32);
  if (ranks.tensor > 1) gathered_logits = carver.Matrix(bounds.logits_rows, c.vocab_size, DType::kF32);

  scratch = carver.Take(sizes.shared);
  return carver.used();
}

ScratchSizes Workspace::ScratchBytes(const ModelConfig& c, const StepBounds& bounds, const Ops& ops,
                                     const WorkspaceRanks& ranks) {
  const int64_t t = bounds.tokens;
  ScratchSizes sizes;
  sizes.closed_mixes = ClosedMixesBytes(c, bounds, ops.activation_dtype(), ranks, [&](int64_t rows, int32_t closed) {
    return ops.ChooseAttnResForm(rows, c.hidden_size, closed, kAttnResSites);
  });
  size_t& bytes = sizes.shared;
  bytes = ops.SampleScratchBytes(bounds.logits_rows, c.vocab_size);
  if (c.num_kda_layers() > 0) {
    bytes = std::max(bytes, ops.KdaScratchBytes(t, bounds.sequences, c.kda_heads, c.kda_head_dim, c.conv_width));
  }
  if (c.num_mla_layers() > 0) {
    bytes = std::max(bytes, ops.MlaScratchBytes(t, bounds.sequences, c.num_attention_heads, c.kv_lora_rank,
                                                c.qk_rope_head_dim, c.qk_nope_head_dim, c.v_head_dim, bounds.context));
  }
  if (c.num_experts > 0) {
    bytes = std::max(bytes, ops.MoeScratchBytes(t * ranks.data, c.num_experts_per_token, c.num_experts,
                                                c.expert_width(), c.moe_intermediate_size));
  }
  return sizes;
}

size_t Workspace::Bytes(const ModelConfig& config, const StepBounds& bounds, DType activation,
                        const ScratchSizes& scratch, const WorkspaceRanks& ranks) {
  return Workspace().Layout(config, bounds, activation, scratch, ranks, nullptr);
}

size_t Workspace::Bytes(const ModelConfig& config, const StepBounds& bounds, const Ops& ops,
                        const WorkspaceRanks& ranks) {
  return Bytes(config, bounds, ops.activation_dtype(), ScratchBytes(config, bounds, ops, ranks), ranks);
}

Workspace::Workspace(const ModelConfig& config, const StepBounds& bounds, Ops& ops, const WorkspaceRanks& ranks)
    : ops_(&ops), bounds_(bounds) {
  memory_ = static_cast<char*>(ops.Allocate(Bytes(config, bounds, ops, ranks)));
  Layout(config, bounds, ops.activation_dtype(), ScratchBytes(config, bounds, ops, ranks), ranks, memory_);
}

Workspace::~Workspace() {
  if (memory_ != nullptr) ops_->Free(memory_);
}

}  // namespace k3
