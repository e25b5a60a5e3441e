#include "engine/model/config_names.h"

namespace k3 {
namespace {

constexpr const char* kNestedTop[] = {
    // read
    "model_type", "text_config", "vision_config", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id",
    "tie_word_embeddings",
    // of images, which are not served
    "ignore_index", "image_placeholder", "media_placeholder_token_id", "image_token_id", "video_token_id",
    // about the file and its Python classes
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
    "_attn_implementation", "use_cache", "unsloth_version", "unsloth_fixed"};

constexpr const char* kText[] = {
    // read
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "rms_norm_eps",
    "max_position_embeddings", "model_max_length", "attn_res_block_size", "bos_token_id", "eos_token_id",
    "pad_token_id", "tie_word_embeddings", "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_use_output_gate", "mla_use_nope", "hidden_act",
    "activation_situ_beta", "activation_situ_linear_beta", "num_experts", "first_k_dense_replace", "moe_layer_freq",
    "num_experts_per_token", "moe_renormalize", "routed_scaling_factor", "moe_router_activation_func", "topk_method",
    "num_expert_group", "topk_group", "use_grouped_topk", "moe_intermediate_size", "num_shared_experts",
    "routed_expert_hidden_size", "latent_moe_use_norm", "linear_attn_config", "quantization_config", "attention_bias",
    "mlp_bias", "use_bias", "qk_norm", "use_qk_norm", "use_qk_layernorm", "sliding_window", "attn_logit_softcapping",
    "final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier",
    // without effect where nothing is rotated (mla_use_nope) and no draft layer is run
    "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "num_nextn_predict_layers",
    // of training
    "initializer_range", "attention_dropout", "hidden_dropout", "pretraining_tp", "aux_loss_alpha", "seq_aux",
    "router_aux_loss_coef", "output_router_logits", "ep_size",
    // about the file and its Python classes
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
    "_attn_implementation", "use_cache", "unsloth_version", "unsloth_fixed",
    // what the base class writes: tasks, pruning and generation of other models
    "add_cross_attention", "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "id2label", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty", "max_length",
    "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "prefix", "problem_type", "pruned_heads", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
    "torchscript", "typical_p", "use_bfloat16"};

constexpr const char* kLinearAttention[] = {"kda_layers",        "full_attn_layers",       "num_heads",
                                            "head_dim",          "short_conv_kernel_size", "gate_lower_bound",
                                            "use_full_rank_gate"};

}  // namespace

std::span<const char* const> TopLevelFields(bool nested) {
  return nested ? std::span<const char* const>(kNestedTop) : std::span<const char* const>(kText);
}

std::span<const char* const> TextFields() { return kText; }

std::span<const char* const> LinearAttentionFields() { return kLinearAttention; }

}  // namespace k3
