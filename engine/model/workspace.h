#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "engine/model/model_config.h"
#include "engine/model/parallel.h"
#include "kernels/ops.h"

namespace k3 {

// The largest step that a workspace must hold.
struct StepBounds {
  int64_t tokens = 0;       // T
  int64_t sequences = 0;    // S
  int64_t logits_rows = 0;  // R: rows of one pass over the head; more rows take several passes
  int64_t context = 0;      // longest sequence
};

// How many ranks a workspace's step is spread over.
struct WorkspaceRanks {
  int64_t tensor = 1;         // ranks of a group
  int64_t data = 1;           // groups
  int64_t expert_leaves = 1;  // groups of experts of one rank whose sums are kept apart
  bool all_to_all = false;    // room to send from

  static WorkspaceRanks Of(const ParallelLayout& layout, ExpertTransport transport) {
    return {layout.tensor, layout.data, layout.LeavesPerRank(),
            layout.data > 1 && transport == ExpertTransport::kAllToAll};
  }
};

// Memory beside the matrices, in bytes: what the ops ask for.
struct ScratchSizes {
  size_t shared = 0;        // the largest of what Kda, MlaAttention, MoeExperts and Sample use one after the other
  size_t closed_mixes = 0;  // AttnResMixesBytes where some step mixes attention residuals in two phases, else 0
};

// Every activation buffer of a step, in one device allocation made at start-up. One function (Layout in workspace.cc)
// places the buffers and reports the total, so plan and allocation cannot disagree. Letters as in op_params.h; all
// matrices are views of the full bounds, cut to the step's rows by the layers.
class Workspace {
 public:
  // Up to this many tokens every rank of a group keeps the whole residual bank (see block_residual.h).
  static constexpr int64_t kReplicatedBankTokens = 256;

  // `config` is the rank's share (RankConfig). Throws DeviceError when the memory is not there.
  Workspace(const ModelConfig& config, const StepBounds& bounds, Ops& ops, const WorkspaceRanks& ranks = {});
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  static size_t Bytes(const ModelConfig& config, const StepBounds& bounds, const Ops& ops,
                      const WorkspaceRanks& ranks = {});
  // The same where there is no device to ask for the size of the scratch memory.
  static size_t Bytes(const ModelConfig& config, const StepBounds& bounds, DType activation,
                      const ScratchSizes& scratch, const WorkspaceRanks& ranks = {});
  static ScratchSizes ScratchBytes(const ModelConfig& config, const StepBounds& bounds, const Ops& ops,
                                   const WorkspaceRanks& ranks = {});
  // ScratchSizes::closed_mixes, where `choose(rows, closed)` says how that many rows and closed blocks are mixed.
  static size_t ClosedMixesBytes(const ModelConfig& config, const StepBounds& bounds, DType activation,
                                 const WorkspaceRanks& ranks,
                                 const std::function<AttnResForm(int64_t rows, int32_t closed)>& choose);
  // The residual bank's part of Bytes: blocks * ceil(T / tensor) * D elements.
  static size_t BankBytes(const ModelConfig& config, const StepBounds& bounds, DType activation,
                          const WorkspaceRanks& ranks = {});

  const StepBounds& bounds() const { return bounds_; }

  void* bank = nullptr;             // [blocks][bank_rows, D] act, block-major; plain residuals: block 0 is the stream
  int64_t bank_rows = 0;            // T, or this rank's part of it
  int64_t block_stride = 0;         // elements
  void* closed_mixes = nullptr;     // AttnResClosedParams::mixes for bank_rows, or null: always one pass
  MatrixView hidden;                // [T, D] normed input of a sublayer
  MatrixView sublayer_out;          // [T, D]
  MatrixView projected;             // [T, widest merged input product]
  MatrixView decay;                 // [T, H*d] KDA decay logits
  MatrixView low_rank_gate;         // [T, H*d] KDA output gate of the low-rank form
  MatrixView q_latent;              // [T, q_lora_rank] normed
  MatrixView q;                     // [T, H*(nope+rope)]
  MatrixView attention_out;         // [T, widest head output]
  MatrixView mlp_act;               // [T, widest gated activation]
  MatrixView expert_in;             // [T, latent] latent MoE only
  MatrixView expert_out;            // [T, expert width]
  MatrixView router_logits;         // [T, E] F32
  int32_t* expert_ids = nullptr;    // [T, top_k]
  float* expert_weights = nullptr;  // [T, top_k]
  MatrixView head_in;               // [R, D]
  MatrixView logits;                // [R, V] F32
  // Tensor parallelism.
  MatrixView delta_shard;      // [bank_rows, D] sums of this rank's tokens
  MatrixView gathered_logits;  // [tensor][R, V / tensor] F32
  // Several groups: what Dispatch brings together, and what the experts give for it.
  MatrixView gathered_in;              // [data * T, expert width]
  MatrixView gathered_out;             // [data * T, expert width]
  int32_t* gathered_ids = nullptr;     // [data * T, top_k]
  float* gathered_weights = nullptr;   // [data * T, top_k]
  MatrixView send_slots;               // [data * T, expert width] all-to-all only
  int32_t* send_ids = nullptr;         // [data * T, top_k]
  float* send_weights = nullptr;       // [data * T, top_k]
  int32_t* send_counts = nullptr;      // [data] rows for each group
  int32_t* received_counts = nullptr;  // [data] rows from each group
  int32_t* slots = nullptr;            // [data * T] where each row lies in the groups' slots
  MatrixView leaf_out;                 // [leaves * data * T, expert width] several leaves only

  void* scratch = nullptr;  // shared by Kda, MlaAttention, MoeExperts and Sample

 private:
  size_t Layout(const ModelConfig& config, const StepBounds& bounds, DType activation, const ScratchSizes& sizes,
                const WorkspaceRanks& ranks, char* base);
  Workspace() = default;

  Ops* ops_ = nullptr;
  StepBounds bounds_;
  char* memory_ = nullptr;
};

}  // namespace k3
