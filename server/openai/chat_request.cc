#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/openai/field_reader.h"
#include "server/openai/openai_request.h"
#include "server/openai/request_fields.h"
#include "server/request_validation.h"
#include "server/text/chat_renderer.h"
#include "server/text/field_error.h"
#include "server/text/json_parser.h"

namespace k3 {
namespace {

void ReadPart(const JsonValue& value, const std::string& path, FieldReader& message, ChatContent* content) {
  FieldReader fields(value, path);
  ContentPart part;
  const std::optional<std::string> type = fields.String("type");
  if (fields.ok() && !type) fields.Fail("type", "a content part needs a type");
  if (type) part.type = *type;
  if (part.type == "text") {
    const std::optional<std::string> text = fields.String("text");
    if (fields.ok() && !text) fields.Fail("text", "a text part needs a text");
    part.text = text.value_or("");
  }
  message.Adopt(fields.status());
  content->parts.push_back(std::move(part));
}

void ReadContent(FieldReader& message, ChatContent* content) {
  const JsonValue* value = message.Get("content");
  if (value == nullptr) return;
  if (value->is_string()) {
    *content = ChatContent::Text(value->text);
  } else if (value->is_array()) {
    content->form = ChatContent::Form::kParts;
    for (size_t i = 0; i < value->items.size(); ++i) {
      ReadPart(value->items[i], absl::StrCat(message.Path("content"), "[", i, "]"), message, content);
    }
  } else {
    message.Fail("content", absl::StrCat("expected a string or a list of parts, not ", std::string(KindName(*value))));
  }
}

void ReadToolCall(const JsonValue& value, const std::string& path, FieldReader& message, ChatMessage* out) {
  FieldReader fields(value, path);
  ToolCall call;
  call.id = fields.String("id").value_or("");
  if (const auto type = fields.String("type"); type && *type != "function") {
    fields.Fail("type", absl::StrCat("\"", Excerpt(*type), "\" is not supported, only \"function\""));
  }
  const JsonValue* function = fields.Object("function");
  if (fields.ok() && function == nullptr) fields.Fail("function", "a tool call needs a function");
  if (function != nullptr) {
    FieldReader inner(*function, path + ".function");
    call.name = inner.String("name").value_or("");
    if (const JsonValue* arguments = inner.Get("arguments")) {
      if (arguments->is_string()) {
        call.arguments_text = arguments->text;
      } else if (arguments->is_object()) {
        call.arguments = *arguments;
      } else {
        inner.Fail("arguments",
                   absl::StrCat("expected a string that holds a JSON object, not ", Described(*arguments)));
      }
    }
    fields.Adopt(inner.status());
  }
  message.Adopt(fields.status());
  out->tool_calls.push_back(std::move(call));
}

ChatMessage ReadMessage(const JsonValue& value, const std::string& path, FieldReader& body) {
  ChatMessage out;
  FieldReader message(value, path);
  const std::optional<std::string> role = message.String("role");
  if (message.ok() && !role) message.Fail("role", "a message needs a role");
  out.role = role.value_or("");
  ReadContent(message, &out.content);
  out.name = message.String("name").value_or("");
  out.reasoning_content = message.String("reasoning_content").value_or("");
  out.reasoning = message.String("reasoning").value_or("");
  if (const JsonValue* calls = message.Array("tool_calls")) {
    for (size_t i = 0; i < calls->items.size(); ++i) {
      ReadToolCall(calls->items[i], absl::StrCat(path, ".tool_calls[", i, "]"), message, &out);
    }
  }
  if (message.Has("function_call")) message.Fail("function_call", "was replaced by tool_calls");
  out.tool_call_id = message.String("tool_call_id");
  if (out.role == "tool") {
    out.id = message.String("id");
    out.tool = message.String("tool").value_or("");
  }
  out.partial = message.Bool("partial").value_or(false);
  if (const JsonValue* tools = message.Array("tools")) out.tools = *tools;
  body.Adopt(message.status());
  return out;
}

void ReadMessages(FieldReader& body, ChatRequest* chat) {
  const JsonValue* messages = body.Array("messages");
  if (messages == nullptr) return body.Fail("messages", "a list of messages is required");
  if (messages->items.empty()) return body.Fail("messages", "at least one message is needed");
  for (size_t i = 0; i < messages->items.size() && body.ok(); ++i) {
    chat->messages.push_back(ReadMessage(messages->items[i], absl::StrCat("messages[", i, "]"), body));
  }
  if (!body.ok()) return;
  if (body.Bool("continue_final_message").value_or(false)) chat->messages.back().partial = true;
  chat->options.add_generation_prompt = body.Bool("add_generation_prompt").value_or(true);
}

void ReadToolChoice(FieldReader& body, ChatOptions* options) {
  const JsonValue* choice = body.Get("tool_choice");
  if (choice == nullptr) return;
  if (choice->is_string()) {
    if (choice->text == "auto") {
      options->tool_choice = ToolChoice::kAuto;
    } else if (choice->text == "none") {
      options->tool_choice = ToolChoice::kNone;
    } else if (choice->text == "required") {
      options->tool_choice = ToolChoice::kRequired;
    } else {
      body.Fail("tool_choice", absl::StrCat("\"", Excerpt(choice->text),
                                            "\" is not known, expected auto, none, required or a named function"));
    }
    return;
  }
  const JsonValue* type = choice->Find("type");
  const JsonValue* function = choice->Find("function");
  const JsonValue* name = function == nullptr ? nullptr : function->Find("name");
  if (type == nullptr || !type->is_string() || type->text != "function" || name == nullptr || !name->is_string()) {
    return body.Fail("tool_choice", absl::StrCat("expected auto, none, required or {\"type\":\"function\",\"function\":"
                                                 "{\"name\":...}}, not ",
                                                 Described(*choice)));
  }
  options->tool_choice = ToolChoice::kNamed;
  options->tool_choice_name = name->text;
}

// OpenAI's further words are mapped to the nearest that the models know.
std::optional<Effort> EffortFromWord(const std::string& word, bool strict) {
  if (word == "low") return Effort::kLow;
  if (word == "high") return Effort::kHigh;
  if (word == "max") return Effort::kMax;
  if (strict) return std::nullopt;
  if (word == "none") return Effort::kNone;
  if (word == "minimal") return Effort::kLow;
  if (word == "medium") return Effort::kHigh;
  if (word == "xhigh") return Effort::kMax;
  return std::nullopt;
}

void ReadEffort(FieldReader& fields, std::string_view key, bool strict, RequestedReasoning* reasoning) {
  const std::optional<std::string> word = fields.String(key);
  if (!word) return;
  const std::optional<Effort> effort = EffortFromWord(*word, strict);
  if (!effort) {
    return fields.Fail(key, absl::StrCat("\"", Excerpt(*word), "\" is not known, expected low, high or max",
                                         strict ? "" : " (or none, minimal, medium, xhigh)"));
  }
  // The spellings are read from the strongest to the weakest.
  if (!reasoning->effort) reasoning->effort = effort;
}

void ReadThinking(FieldReader& body, bool strict, RequestedReasoning* reasoning) {
  const JsonValue* value = body.Object("thinking");
  if (value == nullptr) return;
  FieldReader thinking(*value, "thinking");
  if (const auto type = thinking.String("type")) {
    if (*type != "enabled" && *type != "disabled") {
      thinking.Fail("type", absl::StrCat("\"", Excerpt(*type), "\" is not known, expected enabled or disabled"));
    }
    reasoning->enabled = *type == "enabled";
  }
  ReadEffort(thinking, "effort", strict, reasoning);
  if (const JsonValue* keep = thinking.Get("keep")) {
    if (keep->is_bool()) {
      reasoning->keep_history = keep->boolean;
    } else if (keep->is_string() && (keep->text == "all" || keep->text == "none")) {
      reasoning->keep_history = keep->text == "all";
    } else {
      thinking.Fail("keep", absl::StrCat("expected \"all\" or \"none\", not ", Described(*keep)));
    }
  }
  if (const auto budget = thinking.CappedInteger("budget_tokens", 0, std::numeric_limits<uint32_t>::max())) {
    reasoning->token_budget = static_cast<uint32_t>(*budget);
  }
  body.Adopt(thinking.status());
}

void ReadTemplateArguments(FieldReader& body, bool strict, RequestedReasoning* reasoning) {
  const JsonValue* value = body.Object("chat_template_kwargs");
  if (value == nullptr) return;
  FieldReader fields(*value, "chat_template_kwargs");
  std::optional<bool> enabled = fields.Bool("thinking");
  if (!enabled) enabled = fields.Bool("enable_thinking");
  if (!reasoning->enabled) reasoning->enabled = enabled;
  ReadEffort(fields, "thinking_effort", strict, reasoning);
  if (const auto keep = fields.Bool("preserve_thinking")) reasoning->keep_history = *keep;
  body.Adopt(fields.status());
}

void ReadReasoning(FieldReader& body, bool strict, RequestedReasoning* reasoning) {
  // The order is that of precedence.
  const bool keep_given = body.Get("thinking") != nullptr && body.Get("thinking")->Find("keep") != nullptr;
  ReadThinking(body, strict, reasoning);
  const bool keep = reasoning->keep_history;
  const bool decided = reasoning->effort.has_value();
  ReadEffort(body, "reasoning_effort", strict, reasoning);
  // What OpenAI means by it, unless something else says whether to think.
  const bool no_reasoning = !decided && reasoning->effort == Effort::kNone;
  ReadTemplateArguments(body, strict, reasoning);
  if (no_reasoning && !reasoning->enabled) reasoning->enabled = false;
  if (keep_given) reasoning->keep_history = keep;
}

void ReadChatPrompt(FieldReader& body, const OpenAiOptions& options, GenerationRequest* request) {
  ChatRequest chat;
  ReadMessages(body, &chat);
  if (const JsonValue* tools = body.Array("tools")) chat.tools = *tools;
  ReadToolChoice(body, &chat.options);
  ReadReasoning(body, options.vendor_strict, &request->reasoning);
  ReadConstraint(body, request, options);
  if (!body.ok()) return;
  body.Adopt(CheckChatRequest(chat));
  request->input = std::move(chat);
}

}  // namespace

absl::StatusOr<JsonValue> ParseBody(std::string_view body) {
  if (body.empty()) return FieldError("", "the request body is empty, expected a JSON object");
  absl::StatusOr<JsonValue> value = ParseJson(body, {.max_depth = 64, .max_values = 4'000'000, .python = false});
  if (value.ok() && !value->is_object()) {
    return FieldError("", absl::StrCat("the request body must be a JSON object, not ", std::string(KindName(*value))));
  }
  return value;
}

absl::StatusOr<OpenAiRequest> ParseChatRequest(const JsonValue& value, const OpenAiOptions& options) {
  FieldReader body(value, "");
  OpenAiRequest out;
  OpenAiReplyOptions& reply = out.reply;
  reply.route = OpenAiRoute::kChat;
  reply.strict_usage = options.vendor_strict;
  GenerationRequest request;
  ReadChatPrompt(body, options, &request);
  RefuseUnsupported(body, OpenAiRoute::kChat);
  ReadCommonFields(body, &request, &reply);
  ReadStreamFields(body, &reply);
  request.parallel_tool_calls = body.Bool("parallel_tool_calls").value_or(true);

  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  std::optional<int64_t> limit = body.CappedInteger("max_tokens", 1, kMost);
  if (const auto completion = body.CappedInteger("max_completion_tokens", 1, kMost)) {
    limit = completion;
    out.max_tokens_field = "max_completion_tokens";
  }
  if (limit) request.stopping.max_new_tokens = static_cast<uint32_t>(*limit);

  reply.logprobs = body.Bool("logprobs").value_or(false);
  if (const auto top = body.Integer("top_logprobs", 0, kMaxTopLogprobs)) {
    if (*top > 0 && !reply.logprobs) body.Fail("top_logprobs", "needs logprobs: true");
    reply.top_logprobs = static_cast<int32_t>(*top);
  }
  ReadOutputFields(body, &request, &reply);
  if (!body.ok()) return body.status();
  out.prompts.push_back(std::exchange(request.input, {}));
  out.common = std::move(request);
  return out;
}

absl::StatusOr<GenerationRequest> ParseChatPrompt(const JsonValue& value, const OpenAiOptions& options) {
  FieldReader body(value, "");
  GenerationRequest request;
  ReadChatPrompt(body, options, &request);
  request.model = body.String("model").value_or("");
  if (!body.ok()) return body.status();
  return request;
}

}  // namespace k3
