#include "server/request_prompt.h"

#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/grammar/answer_grammar.h"
#include "server/request_validation.h"
#include "server/text/field_error.h"
#include "server/text/json_parser.h"
#include "server/tool_checks.h"

namespace k3 {
namespace {

size_t JsonBytes(const JsonValue& value) {
  size_t bytes = sizeof(JsonValue) + value.text.size();
  for (const std::string& key : value.keys) bytes += key.size();
  for (const JsonValue& item : value.items) bytes += JsonBytes(item);
  return bytes;
}

size_t ContentBytes(const ChatContent& content) {
  size_t bytes = 0;
  for (const ContentPart& part : content.parts) bytes += part.text.size();
  return bytes;
}

// The renderer's errors name paths below the chat.
absl::Status WithChatPath(const absl::Status& status) {
  if (status.code() != absl::StatusCode::kInvalidArgument) return status;
  const std::string path = FieldErrorPath(status);
  std::string what(status.message());
  if (!path.empty() && what.rfind(path + ": ", 0) == 0) what = what.substr(path.size() + 2);
  return InvalidField(path.empty() ? "chat" : absl::StrCat("chat.", path), what);
}

absl::StatusOr<RequestPrompt> ChatPromptOf(const ServedModel& model, const GenerationRequest& request,
                                           const PromptDefaults& defaults) {
  ChatRequest chat = std::get<ChatRequest>(request.input);
  if (chat.messages.size() > kMaxMessages) {
    return InvalidField("chat.messages",
                        absl::StrCat("has ", chat.messages.size(), " messages; at most ", kMaxMessages));
  }
  const RequestedReasoning& reasoning = request.reasoning;
  chat.options.thinking = reasoning.enabled.value_or(true);
  if (defaults.vendor_strict && !chat.options.thinking) {
    return InvalidField("reasoning.enabled", "thinking cannot be switched off");
  }
  if (reasoning.effort.has_value()) {
    chat.options.effort = *reasoning.effort;
  } else if (!defaults.default_effort.empty()) {
    const auto effort = ParseEffort(defaults.default_effort, "default-effort");
    if (!effort.ok()) return effort.status();
    chat.options.effort = *effort;
  } else {
    chat.options.effort = model.renderer->format() == ChatFormat::kXtml ? Effort::kMax : Effort::kNone;
  }
  if (!reasoning.keep_history) {
    for (ChatMessage& message : chat.messages) {
      message.reasoning.clear();
      message.reasoning_content.clear();
    }
  }
  if (request.constraint.kind == RequestedConstraint::Kind::kJsonObject) {
    chat.options.response_format = ResponseFormat::kJsonObject;
  } else if (request.constraint.kind == RequestedConstraint::Kind::kJsonSchema) {
    absl::StatusOr<JsonValue> schema = SchemaOf(request.constraint);
    if (!schema.ok()) return schema.status();
    chat.options.response_format = ResponseFormat::kJsonSchema;
    chat.options.response_schema = *std::move(schema);
  }
  const absl::Status tools = CheckTools(chat, defaults.vendor_strict);
  if (!tools.ok()) return WithChatPath(tools);
  absl::StatusOr<ChatPrompt> rendered = model.renderer->RenderToIds(chat);
  if (!rendered.ok()) return WithChatPath(rendered.status());
  RequestPrompt prompt;
  prompt.ids = std::move(rendered->ids);
  prompt.is_chat = true;
  prompt.open_channel = rendered->open_channel;
  prompt.opening_ids = rendered->opening_ids;
  prompt.history_calls = rendered->history_calls;
  return prompt;
}

}  // namespace

absl::StatusOr<RequestPrompt> PromptOf(const ServedModel& model, const GenerationRequest& request,
                                       const PromptDefaults& defaults) {
  if (std::holds_alternative<ChatRequest>(request.input)) return ChatPromptOf(model, request, defaults);
  RequestPrompt prompt;
  const int32_t vocab_size = model.engine->Limits().vocab_size;
  if (const auto* ids = std::get_if<std::vector<uint32_t>>(&request.input)) {
    if (ids->empty()) return InvalidField("tokens.ids", "must hold at least one token");
    const absl::Status status = CheckTokenIds(*ids, vocab_size, "tokens.ids");
    if (!status.ok()) return status;
    prompt.ids.assign(ids->begin(), ids->end());
    return prompt;
  }
  const auto* segments = std::get_if<std::vector<PromptSegment>>(&request.input);
  if (segments == nullptr) return InvalidField("input", "one of chat, prompt or tokens is needed");
  for (size_t i = 0; i < segments->size(); ++i) {
    const PromptSegment& segment = (*segments)[i];
    const std::string path = absl::StrCat("prompt.segments[", i, "]");
    if (const auto* ids = std::get_if<std::vector<uint32_t>>(&segment.part)) {
      const absl::Status status = CheckTokenIds(*ids, vocab_size, absl::StrCat(path, ".ids.ids"));
      if (!status.ok()) return status;
      prompt.ids.insert(prompt.ids.end(), ids->begin(), ids->end());
      continue;
    }
    const absl::Status status =
        model.tokenizer->Encode(std::get<std::string>(segment.part),
                                segment.control_tokens ? EncodeMode::kControl : EncodeMode::kOrdinary, &prompt.ids);
    if (!status.ok()) return InvalidField(absl::StrCat(path, ".text"), std::string(status.message()));
  }
  if (prompt.ids.empty()) return InvalidField("prompt", "must hold at least one token");
  return prompt;
}

size_t TextBytes(const GenerationRequest& request) {
  size_t bytes = request.constraint.text.size();
  if (const auto* chat = std::get_if<ChatRequest>(&request.input)) {
    for (const ChatMessage& message : chat->messages) {
      bytes += 64 + ContentBytes(message.content) + message.reasoning_content.size() + message.reasoning.size() +
               message.name.size();
      for (const ToolCall& call : message.tool_calls) {
        bytes += 256 + call.name.size() + (call.arguments_text.has_value() ? call.arguments_text->size() : 0);
        if (call.arguments.has_value()) bytes += JsonBytes(*call.arguments);
      }
      bytes += message.tools.items.size() * 1024 + JsonBytes(message.tools);
    }
    bytes += chat->tools.items.size() * 1024 + JsonBytes(chat->tools);
  } else if (const auto* segments = std::get_if<std::vector<PromptSegment>>(&request.input)) {
    for (const PromptSegment& segment : *segments) {
      if (const auto* text = std::get_if<std::string>(&segment.part)) bytes += text->size();
    }
  }
  return bytes;
}

absl::Status WithClientPath(const absl::Status& status) {
  const std::string path = FieldErrorPath(status);
  if (status.code() != absl::StatusCode::kInvalidArgument || path.empty()) return status;
  for (const char* member : {"tools", "messages", "tool_choice", "add_generation_prompt"}) {
    if (path.rfind(member, 0) == 0) return WithChatPath(status);
  }
  std::string what(status.message());
  if (what.rfind(path + ": ", 0) == 0) what = what.substr(path.size() + 2);
  return InvalidField(path, what);
}

}  // namespace k3
