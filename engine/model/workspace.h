#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/model/model_config.h"
#include "kernels/ops.h"

namespace k3 {

// The largest step that a workspace must hold.
struct StepBounds {
  int64_t tokens = 0;       // T
  int64_t sequences = 0;    // S
  int64_t logits_rows = 0;  // R: rows of one pass over the head; more rows take several passes
  int64_t context = 0;      // longest sequence
};

// Every activation buffer of a step, in one device allocation made at start-up. One function (Layout in workspace.cc)
// places the buffers and reports the total, so plan and allocation cannot disagree. Letters as in op_params.h; all
// matrices are views of the full bounds, cut to the step's rows by the layers.
class Workspace {
 public:
  // Throws DeviceError when the memory is not there.
  Workspace(const ModelConfig& config, const StepBounds& bounds, Ops& ops);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  static size_t Bytes(const ModelConfig& config, const StepBounds& bounds, const Ops& ops);
  // The same where there is no device to ask for the size of the scratch memory.
  static size_t Bytes(const ModelConfig& config, const StepBounds& bounds, DType activation, size_t scratch_bytes);
  static size_t ScratchBytes(const ModelConfig& config, const StepBounds& bounds, const Ops& ops);
  // The residual bank's part of Bytes.
  static size_t BankBytes(const ModelConfig& config, const StepBounds& bounds, DType activation);

  const StepBounds& bounds() const { return bounds_; }

  void* bank = nullptr;             // [blocks][T, D] act, block-major; plain residuals use block 0 as the stream
  int64_t block_stride = 0;         // elements
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
  void* scratch = nullptr;          // shared by Kda, MlaAttention, MoeExperts and Sample

 private:
  size_t Layout(const ModelConfig& config, const StepBounds& bounds, DType activation, size_t scratch_bytes,
                char* base);
  Workspace() = default;

  Ops* ops_ = nullptr;
  StepBounds bounds_;
  char* memory_ = nullptr;
};

}  // namespace k3
