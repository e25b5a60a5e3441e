#include "server/request_validation.h"

#include <algorithm>
#include <limits>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/text/utf8.h"

namespace k3 {
namespace {

absl::Status InRange(const std::optional<float>& value, float low, float high, const std::string& path) {
  if (value.has_value() && !(*value >= low && *value <= high)) {  // also NaN
    return InvalidField(path, absl::StrCat("must be from ", low, " to ", high, ", not ", *value));
  }
  return absl::OkStatus();
}

absl::Status CheckSampling(const RequestedSampling& sampling, const EngineLimits& limits) {
  absl::Status status = InRange(sampling.temperature, 0, 100, "sampling.temperature");
  if (status.ok() && sampling.top_p.has_value() && !(*sampling.top_p > 0 && *sampling.top_p <= 1)) {
    status = InvalidField("sampling.top_p", absl::StrCat("must be above 0 and at most 1, not ", *sampling.top_p));
  }
  if (status.ok() && sampling.min_p.has_value() && !(*sampling.min_p >= 0 && *sampling.min_p < 1)) {
    status = InvalidField("sampling.min_p", absl::StrCat("must be at least 0 and below 1, not ", *sampling.min_p));
  }
  if (status.ok()) status = InRange(sampling.presence_penalty, -2, 2, "sampling.presence_penalty");
  if (status.ok()) status = InRange(sampling.frequency_penalty, -2, 2, "sampling.frequency_penalty");
  if (status.ok() && sampling.repetition_penalty.has_value() &&
      !(*sampling.repetition_penalty > 0 && *sampling.repetition_penalty <= 10)) {
    status = InvalidField("sampling.repetition_penalty",
                          absl::StrCat("must be above 0 and at most 10, not ", *sampling.repetition_penalty));
  }
  if (status.ok() && sampling.n.has_value() && (*sampling.n < 1 || *sampling.n > kMaxChoices)) {
    status = InvalidField("sampling.n", absl::StrCat("must be from 1 to ", kMaxChoices, ", not ", *sampling.n));
  }
  if (!status.ok()) return status;
  if (sampling.logit_bias.size() > kMaxLogitBias) {
    return InvalidField("sampling.logit_bias",
                        absl::StrCat("has ", sampling.logit_bias.size(), " entries; at most ", kMaxLogitBias));
  }
  for (const auto& [id, bias] : sampling.logit_bias) {
    const std::string path = absl::StrCat("sampling.logit_bias[", id, "]");
    if (id >= static_cast<uint32_t>(limits.vocab_size)) {
      return InvalidField(path, absl::StrCat("expected a token id from 0 to ", limits.vocab_size - 1, ", not ", id));
    }
    status = InRange(bias, -100, 100, path);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// The vendor fixes these for its model and answers other values with an error.
absl::Status CheckFixedSampling(const RequestedSampling& sampling) {
  const auto fixed = [](const std::optional<float>& value, float wanted, const char* path) {
    if (!value.has_value() || *value == wanted) return absl::OkStatus();
    return InvalidField(path, absl::StrCat("this model runs with ", wanted, " only, not ", *value));
  };
  absl::Status status = fixed(sampling.temperature, 1.0f, "sampling.temperature");
  if (status.ok()) status = fixed(sampling.top_p, 0.95f, "sampling.top_p");
  if (status.ok()) status = fixed(sampling.presence_penalty, 0.0f, "sampling.presence_penalty");
  if (status.ok()) status = fixed(sampling.frequency_penalty, 0.0f, "sampling.frequency_penalty");
  if (status.ok() && sampling.n.value_or(1) != 1) {
    status = InvalidField("sampling.n", absl::StrCat("this model gives 1 choice only, not ", *sampling.n));
  }
  return status;
}

absl::Status CheckStopping(const RequestedStopping& stopping, const EngineLimits& limits,
                           const ValidationOptions& options) {
  const int max_strings = options.vendor_strict ? 5 : kMaxStopStrings;
  const size_t max_bytes = options.vendor_strict ? 32 : kMaxStopBytes;
  if (stopping.stop.size() > static_cast<size_t>(max_strings)) {
    return InvalidField("stopping.stop", absl::StrCat("has ", stopping.stop.size(), " strings; at most ", max_strings));
  }
  for (size_t i = 0; i < stopping.stop.size(); ++i) {
    const std::string path = absl::StrCat("stopping.stop[", i, "]");
    const std::string& stop = stopping.stop[i];
    if (stop.empty()) return InvalidField(path, "must not be empty");
    if (stop.size() > max_bytes) {
      return InvalidField(path, absl::StrCat("has ", stop.size(), " bytes; at most ", max_bytes));
    }
    if (!IsValidUtf8(stop)) return InvalidField(path, "is not valid UTF-8");
  }
  if (stopping.stop_token_ids.size() > kMaxStopTokenIds) {
    return InvalidField("stopping.stop_token_ids",
                        absl::StrCat("has ", stopping.stop_token_ids.size(), " ids; at most ", kMaxStopTokenIds));
  }
  const absl::Status ids = CheckTokenIds(stopping.stop_token_ids, limits.vocab_size, "stopping.stop_token_ids");
  if (!ids.ok()) return ids;
  if (stopping.max_new_tokens.has_value() && stopping.min_new_tokens.value_or(0) > *stopping.max_new_tokens) {
    return InvalidField(
        "stopping.min_new_tokens",
        absl::StrCat(*stopping.min_new_tokens == std::numeric_limits<uint32_t>::max() ? "at least " : "",
                     *stopping.min_new_tokens, " is more than the limit of ", *stopping.max_new_tokens, " new tokens"));
  }
  if ((stopping.repetition_count == 0) != (stopping.repetition_max_period == 0) || stopping.repetition_count == 1) {
    return InvalidField("stopping.repetition", "needs max_period of at least 1 and count of at least 2");
  }
  if (stopping.repetition_max_period > 4096 || stopping.repetition_count > 4096) {
    return InvalidField("stopping.repetition", "max_period and count are at most 4096");
  }
  return absl::OkStatus();
}

uint64_t RandomSeed() {
  static thread_local std::mt19937_64 generator{std::random_device{}()};
  return generator();
}

}  // namespace

absl::Status CheckImplemented(const GenerationRequest& request) {
  if (request.reasoning.token_budget.has_value()) {
    return UnimplementedFeature("reasoning.token_budget", "this server has no separate budget for reasoning");
  }
  if (request.output.has_logprob_token_ids) {
    return UnimplementedFeature("output.logprob_token_ids", "this server reports the chosen and the best tokens only");
  }
  if (request.cache.has_pin_name) {
    return UnimplementedFeature("cache.pin_name", "this server does not pin prefix-cache entries");
  }
  return absl::OkStatus();
}

absl::StatusOr<EffectiveSampling> ResolveSampling(const GenerationRequest& request, const ServedModel& model,
                                                  const EngineLimits& limits, const ValidationOptions& options) {
  const RequestedSampling& wanted = request.sampling;
  const RequestedStopping& stopping = request.stopping;
  absl::Status status = CheckSampling(wanted, limits);
  if (!status.ok()) return status;
  if (options.vendor_strict) status = CheckFixedSampling(wanted);
  if (!status.ok()) return status;
  status = CheckStopping(stopping, limits, options);
  if (!status.ok()) return status;
  if (request.output.top_logprobs.has_value() && *request.output.top_logprobs > kMaxTopLogprobs) {
    return InvalidField("output.top_logprobs",
                        absl::StrCat("must be from 0 to ", kMaxTopLogprobs, ", not ", *request.output.top_logprobs));
  }
  if (request.session_id.size() > kMaxIdBytes) {
    return InvalidField("session_id", absl::StrCat("has more than ", kMaxIdBytes, " bytes"));
  }
  if (request.cache.salt.size() > kMaxIdBytes) {
    return InvalidField("cache.salt", absl::StrCat("has more than ", kMaxIdBytes, " bytes"));
  }

  EffectiveSampling effective;
  SamplingParams& params = effective.params;
  const SamplingDefaults& defaults = model.defaults;
  params.temperature = wanted.temperature.value_or(defaults.temperature.value_or(1.0f));
  params.top_p = wanted.top_p.value_or(defaults.top_p.value_or(1.0f));
  // A top_k above the vocabulary keeps every token.
  const int64_t top_k = wanted.top_k.has_value() ? *wanted.top_k : defaults.top_k.value_or(0);
  params.top_k = static_cast<int32_t>(top_k >= limits.vocab_size ? 0 : top_k);
  params.min_p = wanted.min_p.value_or(defaults.min_p.value_or(0.0f));
  params.presence_penalty = wanted.presence_penalty.value_or(0.0f);
  params.frequency_penalty = wanted.frequency_penalty.value_or(0.0f);
  params.repetition_penalty = wanted.repetition_penalty.value_or(defaults.repetition_penalty.value_or(1.0f));
  params.seed = wanted.seed.has_value() ? *wanted.seed : RandomSeed();
  for (const auto& [id, bias] : wanted.logit_bias) params.logit_bias.emplace_back(static_cast<int32_t>(id), bias);
  params.ignore_eos = stopping.ignore_eos;
  params.stop_token_ids.assign(stopping.stop_token_ids.begin(), stopping.stop_token_ids.end());
  params.repetition_max_period = static_cast<int32_t>(stopping.repetition_max_period);
  params.repetition_count = static_cast<int32_t>(stopping.repetition_count);
  params.top_logprobs =
      request.output.top_logprobs.has_value() ? static_cast<int32_t>(*request.output.top_logprobs) : -1;
  params.prompt_logprobs = request.output.prompt_logprobs;
  effective.num_choices = static_cast<int32_t>(wanted.n.value_or(1));
  return effective;
}

absl::Status ResolveLength(const GenerationRequest& request, int64_t prompt_tokens, const EngineLimits& limits,
                           EffectiveSampling* effective) {
  const std::optional<uint32_t>& wanted = request.stopping.max_new_tokens;
  if (wanted == 0u && !request.output.prompt_logprobs) {
    return InvalidField("stopping.max_new_tokens", "must be at least 1 (0 only with output.prompt_logprobs)");
  }
  const int64_t reply = wanted.has_value() ? *wanted : 1;
  if (prompt_tokens + reply > limits.max_model_len) {
    ErrorDetails details;
    details.reason = "context_length_exceeded";
    details.numbers = {{"prompt_tokens", absl::StrCat(prompt_tokens)},
                       {"max_new_tokens", absl::StrCat(reply)},
                       {"max_model_len", absl::StrCat(limits.max_model_len)}};
    // What a front end could not hold came as the largest number there is.
    const bool capped = reply == std::numeric_limits<uint32_t>::max();
    const std::string message = absl::StrCat(
        "the prompt has ", prompt_tokens, " tokens; with ", capped ? "at least " : "", reply, " to generate that is ",
        capped ? "" : absl::StrCat(prompt_tokens + reply, ", "), "over the context limit of ", limits.max_model_len);
    details.fields.push_back({prompt_tokens < limits.max_model_len ? "stopping.max_new_tokens" : "input", message});
    return WithDetails(absl::InvalidArgumentError(message), details);
  }
  const int64_t copies = request.output.prompt_copies;
  const int64_t scores = prompt_tokens * (int64_t{request.output.top_logprobs.value_or(0)} + 1) * copies;
  if (request.output.prompt_logprobs && copies > 1 && scores > kMaxPromptLogprobs) {
    return InvalidField("sampling.n", absl::StrCat("the prompt's log-probabilities in ", copies, " choices would be ",
                                                   scores, " numbers; at most ", kMaxPromptLogprobs));
  }
  const int64_t pool_tokens = limits.latent_pages * limits.page_size;
  if (prompt_tokens + reply > pool_tokens) {
    ErrorDetails details;
    details.reason = "capacity_exceeded";
    details.numbers = {{"prompt_tokens", absl::StrCat(prompt_tokens)},
                       {"max_new_tokens", absl::StrCat(reply)},
                       {"latent_pages", absl::StrCat(limits.latent_pages)},
                       {"page_size", absl::StrCat(limits.page_size)}};
    const std::string message =
        absl::StrCat("the prompt has ", prompt_tokens, " tokens; with ", reply, " to generate that is ",
                     prompt_tokens + reply, ", more than the ", pool_tokens, " that the latent pages hold (",
                     limits.latent_pages, " pages of ", limits.page_size, ")");
    details.preconditions.push_back({"latent_pages", "k3serve", message});
    return WithDetails(absl::FailedPreconditionError(message), details);
  }
  int64_t room = std::min<int64_t>(limits.max_model_len, pool_tokens) - prompt_tokens;
  const uint32_t usual = request.stopping.max_new_tokens_if_absent;
  if (usual > 0) room = std::min<int64_t>(room, usual);
  effective->params.max_new_tokens = static_cast<int32_t>(wanted.has_value() ? reply : room);
  const int64_t least = request.stopping.min_new_tokens.value_or(0);
  if (least > effective->params.max_new_tokens) {
    return InvalidField("stopping.min_new_tokens",
                        absl::StrCat(least == std::numeric_limits<uint32_t>::max() ? "at least " : "", least,
                                     " is more than the ", effective->params.max_new_tokens, " that have room"));
  }
  effective->params.min_new_tokens = static_cast<int32_t>(least);
  return absl::OkStatus();
}

absl::Status CheckTokenIds(const std::vector<uint32_t>& ids, int32_t vocab_size, const std::string& path) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= static_cast<uint32_t>(vocab_size)) {
      return InvalidField(absl::StrCat(path, "[", i, "]"),
                          absl::StrCat(ids[i], " is no token; the vocabulary has ", vocab_size));
    }
  }
  return absl::OkStatus();
}

}  // namespace k3
