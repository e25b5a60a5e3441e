#pragma once

#include <memory>
#include <vector>

#include "engine/model/model_config.h"
#include "kernels/ops.h"

namespace k3 {

// Weights of one rank, per layer, named after what they do. Immutable after load. Pointers marked optional are null
// when the configuration has no such part. Merged products list their row blocks in order.
struct KdaWeights {
  std::unique_ptr<LinearWeight> in_proj;   // rows q | k | v [3*H*d] | f_a [d] | b [H] | full-rank gate [H*d] or g_a [d]
  std::unique_ptr<LinearWeight> f_b_proj;  // [H*d, d]
  std::unique_ptr<LinearWeight> g_b_proj;  // [H*d, d], optional: low-rank output gate
  std::unique_ptr<LinearWeight> o_proj;    // [D, H*d]
  const float* conv_taps = nullptr;        // [3*H*d, W]: q, k, v
  const float* dt_bias = nullptr;          // [H*d]
  const float* a_log = nullptr;            // [H]
  const float* o_norm = nullptr;           // [d]
};

struct MlaWeights {
  std::unique_ptr<LinearWeight>
      in_proj;                      // rows (q_a [q_lora_rank] or q [H*192]) | kv_a [latent + rope] | gate [H*v], if any
  const float* q_a_norm = nullptr;  // [q_lora_rank], optional
  std::unique_ptr<LinearWeight> q_b_proj;  // [H*192, q_lora_rank], optional
  const float* kv_a_norm = nullptr;        // [latent]
  std::unique_ptr<LatentProjection> kv_b;
  std::unique_ptr<LinearWeight> o_proj;  // [D, H*v]
};

struct MlpWeights {
  std::unique_ptr<LinearWeight> gate_up;  // rows gate | up
  std::unique_ptr<LinearWeight> down;
};

struct MoeWeights {
  std::unique_ptr<LinearWeight> router;       // [E, D]
  const float* router_bias = nullptr;         // [E]
  std::unique_ptr<LinearWeight> latent_down;  // [latent, D], optional
  const float* latent_norm = nullptr;         // [latent], optional
  std::unique_ptr<LinearWeight> latent_up;    // [D, latent], optional; a rank's share of the columns
  // This rank's experts, in ascending id: one group, or more where a test wants the sums of more ranks.
  std::vector<std::unique_ptr<ExpertWeights>> experts;
  MlpWeights shared;  // null members without shared experts
};

struct LayerWeights {
  const float* input_norm = nullptr;           // [D]
  const float* post_attention_norm = nullptr;  // [D]
  const float* attention_mix_query = nullptr;  // [D] res_norm * res_proj, optional: attention residuals
  const float* mlp_mix_query = nullptr;        // [D] likewise
  std::unique_ptr<KdaWeights> kda;             // exactly one of kda and mla
  std::unique_ptr<MlaWeights> mla;
  std::unique_ptr<MlpWeights> mlp;  // exactly one of mlp and moe
  std::unique_ptr<MoeWeights> moe;
};

struct Weights {
  MatrixView embedding;  // [V, D]
  std::vector<LayerWeights> layers;
  const float* output_mix_query = nullptr;  // [D], optional
  const float* final_norm = nullptr;        // [D]
  std::unique_ptr<LinearWeight> lm_head;    // [V, D]
  size_t bytes = 0;                         // device memory of all of the above
};

}  // namespace k3
