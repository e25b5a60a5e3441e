#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/openai/field_reader.h"
#include "server/openai/openai_request.h"
#include "server/openai/request_fields.h"
#include "server/request_validation.h"

namespace k3 {
namespace {

constexpr size_t kMaxPrompts = 4096;
constexpr uint32_t kDefaultMaxTokens = 16;

using Prompt = GenerationRequest::Input;

// A failed read names the item.
std::optional<Prompt> TokenPrompt(const JsonValue& list, const std::string& path, FieldReader& body) {
  std::vector<uint32_t> ids;
  ids.reserve(list.items.size());
  for (const JsonValue& item : list.items) {
    const std::optional<int64_t> id = WholeNumber(item);
    if (!id || *id < 0 || *id > std::numeric_limits<uint32_t>::max()) {
      body.Fail(path, absl::StrCat("expected token ids, whole numbers from 0 up, not ", Described(item)));
      return std::nullopt;
    }
    ids.push_back(static_cast<uint32_t>(*id));
  }
  return Prompt(std::move(ids));
}

Prompt TextPrompt(std::string text, bool control_tokens) {
  std::vector<PromptSegment> segments(1);
  segments[0].part = std::move(text);
  segments[0].control_tokens = control_tokens;
  return segments;
}

// A string, a list of strings, a list of ids, or a list of lists of ids.
std::vector<Prompt> ReadPrompts(FieldReader& body) {
  std::vector<Prompt> prompts;
  const bool control_tokens = body.Bool("control_tokens").value_or(false);
  const JsonValue* value = body.Get("prompt");
  if (value == nullptr) {
    body.Fail("prompt", "a prompt is required");
    return prompts;
  }
  if (value->is_string()) {
    if (value->text.empty()) body.Fail("prompt", "must not be empty");
    prompts.push_back(TextPrompt(value->text, control_tokens));
    return prompts;
  }
  constexpr std::string_view kForms =
      "expected a string, a list of strings, a list of token ids, or a list of such lists";
  if (!value->is_array()) {
    body.Fail("prompt", absl::StrCat(std::string(kForms), ", not ", Described(*value)));
    return prompts;
  }
  if (value->items.empty()) {
    body.Fail("prompt", "must not be empty");
    return prompts;
  }
  if (value->items[0].is_number()) {
    std::optional<Prompt> ids = TokenPrompt(*value, "prompt", body);
    if (!ids) return prompts;
    prompts.push_back(std::move(*ids));
    return prompts;
  }
  if (value->items.size() > kMaxPrompts) {
    body.Fail("prompt", absl::StrCat("has ", value->items.size(), " prompts; at most ", kMaxPrompts));
    return prompts;
  }
  const bool texts = value->items[0].is_string();
  for (size_t i = 0; i < value->items.size(); ++i) {
    const JsonValue& item = value->items[i];
    const std::string path = absl::StrCat("prompt[", i, "]");
    if (texts ? !item.is_string() : !item.is_array()) {
      body.Fail("prompt", absl::StrCat(std::string(kForms), ", not one with ", Described(item), " at ", i));
      return prompts;
    }
    if (texts ? item.text.empty() : item.items.empty()) {
      body.Fail(path, "must not be empty");
      return prompts;
    }
    std::optional<Prompt> prompt = texts ? TextPrompt(item.text, control_tokens) : TokenPrompt(item, path, body);
    if (!prompt) return prompts;
    prompts.push_back(std::move(*prompt));
  }
  return prompts;
}

}  // namespace

absl::StatusOr<OpenAiRequest> ParseCompletionRequest(const JsonValue& value, const OpenAiOptions& options) {
  FieldReader body(value, "");
  OpenAiRequest out;
  OpenAiReplyOptions& reply = out.reply;
  reply.route = OpenAiRoute::kCompletions;
  reply.strict_usage = options.vendor_strict;
  GenerationRequest request;
  std::vector<Prompt> prompts = ReadPrompts(body);
  RefuseUnsupported(body, OpenAiRoute::kCompletions);
  ReadCommonFields(body, &request, &reply);
  ReadStreamFields(body, &reply);
  ReadConstraint(body, &request, options);
  reply.echo = body.Bool("echo").value_or(false);

  const int64_t least = reply.echo ? 0 : 1;
  const auto limit = body.CappedInteger("max_tokens", least, std::numeric_limits<uint32_t>::max());
  if (limit) {
    request.stopping.max_new_tokens = static_cast<uint32_t>(*limit);
  } else {
    request.stopping.max_new_tokens_if_absent = kDefaultMaxTokens;
  }
  if (const auto top = body.Integer("logprobs", 0, kMaxTopLogprobs)) {
    reply.logprobs = true;
    reply.top_logprobs = static_cast<int32_t>(*top);
  }
  ReadOutputFields(body, &request, &reply);
  if (body.ok() && prompts.size() * static_cast<size_t>(reply.choices_per_prompt) > kMaxPrompts) {
    body.Fail("n", absl::StrCat(prompts.size(), " prompts with ", reply.choices_per_prompt, " choices each; at most ",
                                kMaxPrompts, " choices in all"));
  }
  if (!body.ok()) return body.status();
  out.common = std::move(request);
  out.prompts = std::move(prompts);
  return out;
}

}  // namespace k3
