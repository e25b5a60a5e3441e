#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/generation_request.h"
#include "server/text/json_value.h"

// The bodies of /v1/chat/completions and /v1/completions, translated to what the generation service takes. All errors
// are FieldErrors whose path is the OpenAI name of the field, e.g. messages[2].content[0].text, or statuses of the
// common path (see error_details.h).
namespace k3 {

struct OpenAiOptions {
  bool vendor_strict = false;
};

enum class OpenAiRoute : uint8_t { kChat, kCompletions };

// How the reply is to be written.
struct OpenAiReplyOptions {
  OpenAiRoute route = OpenAiRoute::kChat;
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;  // usage so far in every chunk
  bool heartbeat = true;
  bool strict_usage = false;  // --vendor-strict: usage also on the choice that ends
  int32_t choices_per_prompt = 1;

  bool logprobs = false;         // of generated tokens
  int32_t top_logprobs = 0;      // how many besides
  bool echo = false;             // completions: the prompt is part of the text
  bool prompt_logprobs = false;  // vLLM's field of that name
  int32_t prompt_top_logprobs = 0;
  bool token_ids = false;
};

struct OpenAiRequest {
  GenerationRequest common;  // all but the input
  // One for chat; for completions one or more, in order. Choice index = prompt * n + choice. Apart from `common`, whose
  // strings may be as long as the body: thousands of prompts must not mean thousands of copies.
  std::vector<GenerationRequest::Input> prompts;
  OpenAiReplyOptions reply;
  // What the client called the token limit, for messages about it.
  std::string max_tokens_field = "max_tokens";
};

// JSON as the HTTP routes take it: strict, and no deeper than the recursion that later code may use.
absl::StatusOr<JsonValue> ParseBody(std::string_view body);

absl::StatusOr<OpenAiRequest> ParseChatRequest(const JsonValue& body, const OpenAiOptions& options);
absl::StatusOr<OpenAiRequest> ParseCompletionRequest(const JsonValue& body, const OpenAiOptions& options);

// The part of a chat body that makes the prompt: messages, tools, tool choice, reasoning, response format. For /render
// and for /tokenize with messages; the other members are not looked at.
absl::StatusOr<GenerationRequest> ParseChatPrompt(const JsonValue& body, const OpenAiOptions& options);

}  // namespace k3
