#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "server/text/chat_formats.h"
#include "server/text/chat_renderer.h"
#include "server/text/encode_chunks.h"
#include "server/text/field_error.h"
#include "server/text/json_parser.h"
#include "server/text/utf8.h"

namespace k3 {
namespace {

absl::Status CheckUtf8(std::string_view text, const std::string& path) {
  const size_t valid = ValidUtf8Prefix(text);
  if (valid == text.size()) return absl::OkStatus();
  return FieldError(path, absl::StrCat("invalid UTF-8 at byte ", valid));
}

absl::Status CheckJsonUtf8(const JsonValue& value, const std::string& path) {
  absl::Status status = CheckUtf8(value.text, path);
  for (size_t i = 0; status.ok() && i < value.keys.size(); ++i) status = CheckUtf8(value.keys[i], path);
  for (size_t i = 0; status.ok() && i < value.items.size(); ++i) status = CheckJsonUtf8(value.items[i], path);
  return status;
}

bool HasTools(const ChatMessage& message) { return message.tools.is_array() && !message.tools.items.empty(); }

absl::Status CheckContent(const ChatMessage& message, const std::string& path) {
  const ChatContent& content = message.content;
  const bool may_be_empty = message.role == "assistant" || HasTools(message);
  if (!may_be_empty && content.form == ChatContent::Form::kNone) {
    return FieldError(path, absl::StrCat("a ", message.role, " message needs content"));
  }
  if (!may_be_empty && content.parts.empty()) return FieldError(path, "the list of content parts is empty");
  for (size_t i = 0; i < content.parts.size(); ++i) {
    const ContentPart& part = content.parts[i];
    const std::string part_path = content.form == ChatContent::Form::kParts ? absl::StrCat(path, "[", i, "]") : path;
    if (part.type != "text") {
      return FieldError(part_path + ".type",
                        absl::StrCat("\"", SanitizeUtf8(part.type), "\" parts are not supported, only text"));
    }
    if (const absl::Status status = CheckUtf8(part.text, part_path); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckToolCalls(const ChatMessage& message, const std::string& path) {
  for (size_t i = 0; i < message.tool_calls.size(); ++i) {
    const ToolCall& call = message.tool_calls[i];
    const std::string call_path = absl::StrCat(path, ".tool_calls[", i, "]");
    if (call.name.empty()) return FieldError(call_path + ".function.name", "a tool call needs a name");
    absl::Status status = CheckUtf8(call.name, call_path + ".function.name");
    if (status.ok()) status = CheckUtf8(call.id, call_path + ".id");
    const std::string arguments_path = call_path + ".function.arguments";
    if (status.ok() && call.arguments_text.has_value()) status = CheckUtf8(*call.arguments_text, arguments_path);
    if (status.ok() && call.arguments.has_value()) status = CheckJsonUtf8(*call.arguments, arguments_path);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckMessage(const ChatMessage& message, const std::string& path, bool last) {
  const bool assistant = message.role == "assistant";
  if (!assistant && message.role != "system" && message.role != "developer" && message.role != "user" &&
      message.role != "tool") {
    return FieldError(path + ".role", absl::StrCat("unknown role \"", SanitizeUtf8(message.role),
                                                   "\", expected system, developer, user, assistant or tool"));
  }
  if (!assistant && !message.tool_calls.empty()) {
    return FieldError(path + ".tool_calls", absl::StrCat("a ", message.role, " message cannot call tools"));
  }
  if (message.partial) {
    if (!assistant) return FieldError(path + ".partial", "only an assistant message can be continued");
    if (!last) return FieldError(path + ".partial", "only the last message can be continued");
    if (!message.tool_calls.empty()) return FieldError(path + ".partial", "a message with tool calls is complete");
  }
  if (!message.tools.is_null() && !message.tools.is_array()) return FieldError(path + ".tools", "expected an array");

  absl::Status status = CheckContent(message, path + ".content");
  if (status.ok()) status = CheckUtf8(message.name, path + ".name");
  if (status.ok()) status = CheckUtf8(message.tool, path + ".tool");
  if (status.ok()) status = CheckUtf8(message.reasoning_content, path + ".reasoning_content");
  if (status.ok()) status = CheckUtf8(message.reasoning, path + ".reasoning");
  if (status.ok()) status = CheckJsonUtf8(message.tools, path + ".tools");
  if (status.ok() && message.tool_call_id) status = CheckUtf8(*message.tool_call_id, path + ".tool_call_id");
  if (status.ok() && message.id) status = CheckUtf8(*message.id, path + ".id");
  if (status.ok()) status = CheckToolCalls(message, path);
  return status;
}

}  // namespace

absl::Status CheckChatRequest(const ChatRequest& request) {
  if (request.messages.empty()) return FieldError("messages", "at least one message is needed");
  for (size_t i = 0; i < request.messages.size(); ++i) {
    const absl::Status status =
        CheckMessage(request.messages[i], absl::StrCat("messages[", i, "]"), i + 1 == request.messages.size());
    if (!status.ok()) return status;
  }
  if (!request.tools.is_null() && !request.tools.is_array()) return FieldError("tools", "expected an array");
  absl::Status status = CheckJsonUtf8(request.tools, "tools");
  if (status.ok() && request.options.response_format == ResponseFormat::kJsonSchema &&
      request.options.response_schema.is_null()) {
    return FieldError("response_format.json_schema", "a schema is needed");
  }
  if (status.ok()) status = CheckJsonUtf8(request.options.response_schema, "response_format.json_schema");
  return status;
}

absl::StatusOr<ToolArguments> ReadToolArguments(const ToolCall& call, const std::string& path) {
  ToolArguments result;
  JsonValue parsed;
  if (call.arguments.has_value()) {
    if (call.arguments->is_null()) return result;
    parsed = *call.arguments;
  } else {
    if (!call.arguments_text.has_value() || IsPythonBlank(*call.arguments_text)) return result;
    auto value = ParseJson(*call.arguments_text, {.python = true});
    if (!value.ok()) {
      result.unparsed = *call.arguments_text;
      return result;
    }
    parsed = *std::move(value);
  }
  if (!parsed.is_object()) return FieldError(path, "expected a JSON object");
  result.object = std::move(parsed);
  return result;
}

std::vector<MessageInOrder> OrderMessages(const std::vector<ChatMessage>& messages) {
  std::vector<MessageInOrder> order;
  std::unordered_map<std::string_view, const ToolCall*> calls;  // of the last assistant message, by id
  for (size_t i = 0; i < messages.size();) {
    const ChatMessage& message = messages[i];
    if (message.role != "tool") {
      if (message.role == "assistant") {
        calls.clear();
        for (const ToolCall& call : message.tool_calls) {
          if (!call.id.empty()) calls.emplace(call.id, &call);  // of equal ids the first counts
        }
      }
      order.push_back({i++});
      continue;
    }
    const size_t run = order.size();
    bool resolved = true;
    for (; i < messages.size() && messages[i].role == "tool"; ++i) {
      const auto& id = messages[i].tool_call_id.has_value() ? messages[i].tool_call_id : messages[i].id;
      const auto it = id.has_value() ? calls.find(*id) : calls.end();
      order.push_back({i, it == calls.end() ? nullptr : it->second});
      resolved = resolved && it != calls.end();
    }
    if (resolved) {  // calls of one message lie in one array
      std::stable_sort(order.begin() + run, order.end(),
                       [](const MessageInOrder& a, const MessageInOrder& b) { return a.matched < b.matched; });
    } else {
      for (size_t k = run; k < order.size(); ++k) order[k].matched = nullptr;
    }
  }
  return order;
}

JsonValue SchemaOfResponseFormat(const JsonValue& response_format) {
  if (const JsonValue* schema = response_format.Find("response_schema"); schema != nullptr && !schema->is_null()) {
    return *schema;
  }
  const JsonValue* json_schema = response_format.Find("json_schema");
  if (json_schema == nullptr) return {};
  for (const char* key : {"schema", "json_schema"}) {
    if (const JsonValue* schema = json_schema->Find(key)) return *schema;
  }
  return *json_schema;
}

absl::StatusOr<Effort> ParseEffort(std::string_view text, std::string_view path) {
  if (text == "low") return Effort::kLow;
  if (text == "high") return Effort::kHigh;
  if (text == "max") return Effort::kMax;
  if (text == "none") return Effort::kNone;
  return FieldError(path, absl::StrCat("\"", SanitizeUtf8(text), "\" is not an effort; low, high, max and none are"));
}

}  // namespace k3
