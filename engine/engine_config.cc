#include "engine/engine_config.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

absl::Status AtLeast(const char* field, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, ", must be at least ", least));
}

absl::Status CheckIds(const char* field, const std::vector<int32_t>& ids, int32_t vocab_size) {
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, " holds token id ", id, ", the vocabulary has ids 0 to ", vocab_size - 1));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status EngineConfig::Resolve() {
  if (prefill_chunk == 0) prefill_chunk = max_num_batched_tokens;
  if (long_prompt_tokens == 0) {
    long_prompt_tokens = static_cast<int32_t>(std::min<int64_t>(int64_t{4} * prefill_chunk, INT32_MAX));
  }
  for (const absl::Status& status :
       {AtLeast("vocab_size", vocab_size, 1), AtLeast("max_model_len", max_model_len, 2),
        AtLeast("max_num_seqs", max_num_seqs, 1), AtLeast("max_num_batched_tokens", max_num_batched_tokens, 1),
        AtLeast("prefill_chunk", prefill_chunk, 1), AtLeast("prefill_alignment", prefill_alignment, 1),
        AtLeast("short_tail", short_tail, 0), AtLeast("max_queue", max_queue, 1),
        AtLeast("data_parallel", data_parallel, 1), AtLeast("page_size", page_size, 1),
        AtLeast("latent_pages", latent_pages, 1), AtLeast("state_slots", state_slots, 1),
        AtLeast("snapshot_slots", snapshot_slots, 0), AtLeast("page_bytes", page_bytes, 1),
        AtLeast("state_bytes", state_bytes, 1), AtLeast("snapshot_interval", snapshot_interval, 1),
        AtLeast("max_long_prefills", max_long_prefills, 1), AtLeast("long_prompt_tokens", long_prompt_tokens, 1),
        CheckIds("eos_token_ids", eos_token_ids, vocab_size)}) {
    if (!status.ok()) return status;
  }
  if (prefill_chunk > max_num_batched_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "prefill_chunk (", prefill_chunk, ") is larger than max_num_batched_tokens (", max_num_batched_tokens, ")"));
  }
  if (snapshot_interval % page_size != 0) {
    return absl::InvalidArgumentError(absl::StrCat("snapshot_interval (", snapshot_interval,
                                                   ") must be a multiple of page_size (", page_size,
                                                   "): snapshots lie at page boundaries"));
  }
  if (prefill_alignment > 1) {
    // Beside every decode a prompt must still get a block and what may have to stay with it; hits end at pages.
    const int32_t least = 2 * prefill_alignment + short_tail;
    const absl::Status aligned[] = {AtLeast("with prefill_alignment, prefill_chunk", prefill_chunk, least),
                                    AtLeast("with prefill_alignment, max_num_batched_tokens", max_num_batched_tokens,
                                            int64_t{max_num_seqs} + least)};
    for (const absl::Status& status : aligned) {
      if (!status.ok()) return status;
    }
    if (page_size % prefill_alignment != 0) {
      return absl::InvalidArgumentError(absl::StrCat("page_size (", page_size,
                                                     ") must be a multiple of prefill_alignment (", prefill_alignment,
                                                     "): prompts go on at page boundaries"));
    }
  }
  if (!(verify_hits >= 0 && verify_hits <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("verify_hits is ", verify_hits, ", must be in [0, 1]"));
  }
  if (!(ageing_seconds > 0)) {
    return absl::InvalidArgumentError(absl::StrCat("ageing_seconds is ", ageing_seconds, ", must be positive"));
  }
  return absl::OkStatus();
}

EngineLimits EngineConfig::Limits() const {
  EngineLimits limits;
  limits.vocab_size = vocab_size;
  limits.max_model_len = max_model_len;
  limits.latent_pages = latent_pages;
  limits.page_size = page_size;
  limits.state_slots = state_slots;
  limits.snapshot_slots = snapshot_slots;
  limits.max_num_seqs = max_num_seqs;
  limits.max_queue = max_queue;
  return limits;
}

absl::Status CheckRequest(const EngineConfig& config, const Request& request) {
  const SamplingParams& sampling = request.sampling;
  const int64_t prompt = static_cast<int64_t>(request.prompt_tokens.size());
  if (prompt == 0) return absl::InvalidArgumentError("prompt_tokens is empty, at least one token is needed");
  if (request.sink == nullptr) return absl::InvalidArgumentError("the request has no sink");
  if (request.num_choices < 1) {
    return absl::InvalidArgumentError(absl::StrCat("num_choices is ", request.num_choices, ", must be at least 1"));
  }
  if (!request.constraints.empty() && request.constraints.size() != static_cast<size_t>(request.num_choices)) {
    return absl::InvalidArgumentError(
        absl::StrCat("there are ", request.constraints.size(), " constraints for ", request.num_choices, " choices"));
  }
  if (sampling.max_new_tokens < 0 || (sampling.max_new_tokens == 0 && !sampling.prompt_logprobs)) {
    return absl::InvalidArgumentError(absl::StrCat("max_new_tokens is ", sampling.max_new_tokens,
                                                   ", must be at least 1 (0 only together with prompt_logprobs)"));
  }
  if (prompt + sampling.max_new_tokens > config.max_model_len) {
    return absl::InvalidArgumentError(absl::StrCat("prompt (", prompt, " tokens) plus max_new_tokens (",
                                                   sampling.max_new_tokens, ") exceeds the context limit of ",
                                                   config.max_model_len, " tokens"));
  }
  for (const absl::Status& status : {CheckIds("prompt_tokens", request.prompt_tokens, config.vocab_size),
                                     CheckIds("stop_token_ids", sampling.stop_token_ids, config.vocab_size),
                                     CheckIds("banned_ids", sampling.banned_ids, config.vocab_size),
                                     CheckIds("allowed_ids", sampling.allowed_ids, config.vocab_size)}) {
    if (!status.ok()) return status;
  }
  for (const auto& [id, bias] : sampling.logit_bias) {
    if (absl::Status status = CheckIds("logit_bias", {id}, config.vocab_size); !status.ok()) return status;
  }
  // The last generated token is never fed back, so a prompt that fills every page still yields one token. What goes
  // beyond ends with kLength when the pool is full.
  if (prompt > config.pool_tokens()) {
    return absl::FailedPreconditionError(absl::StrCat("prompt needs ", config.PagesFor(prompt), " latent pages (",
                                                      prompt, " tokens), the whole pool has ", config.latent_pages,
                                                      " pages (", config.pool_tokens(), " tokens)"));
  }
  return absl::OkStatus();
}

}  // namespace k3
