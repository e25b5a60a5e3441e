#include "tests/server/text/chat_json.h"

#include "server/text/chat_renderer.h"

namespace k3::testing {
namespace {

std::string StringOf(const JsonValue& object, const char* key) {
  const JsonValue* value = object.Find(key);
  return value != nullptr && value->is_string() ? value->text : "";
}

ChatContent ReadContent(const JsonValue* value) {
  if (value == nullptr || value->is_null()) return {};
  if (value->is_string()) return ChatContent::Text(value->text);
  ChatContent content;
  content.form = ChatContent::Form::kParts;
  for (const JsonValue& part : value->items) content.parts.push_back({StringOf(part, "type"), StringOf(part, "text")});
  return content;
}

ChatMessage ReadMessage(const JsonValue& value) {
  ChatMessage message;
  message.role = StringOf(value, "role");
  message.content = ReadContent(value.Find("content"));
  message.name = StringOf(value, "name");
  message.reasoning_content = StringOf(value, "reasoning_content");
  message.reasoning = StringOf(value, "reasoning");
  message.tool = StringOf(value, "tool");
  if (const JsonValue* id = value.Find("tool_call_id")) message.tool_call_id = id->text;
  if (const JsonValue* id = value.Find("id")) message.id = id->text;
  if (const JsonValue* tools = value.Find("tools")) message.tools = *tools;
  if (const JsonValue* partial = value.Find("partial")) message.partial = partial->boolean;
  if (const JsonValue* calls = value.Find("tool_calls")) {
    for (const JsonValue& item : calls->items) {
      ToolCall& call = message.tool_calls.emplace_back();
      call.id = StringOf(item, "id");
      const JsonValue* function = item.Find("function");
      if (function == nullptr) continue;
      call.name = StringOf(*function, "name");
      const JsonValue* arguments = function->Find("arguments");
      if (arguments == nullptr) continue;
      if (arguments->is_string()) {
        call.arguments_text = arguments->text;
      } else {
        call.arguments = *arguments;
      }
    }
  }
  return message;
}

}  // namespace

ChatRequest ReadChatJson(const JsonValue& conversation) {
  ChatRequest request;
  if (const JsonValue* messages = conversation.Find("messages")) {
    for (const JsonValue& message : messages->items) request.messages.push_back(ReadMessage(message));
  }
  const JsonValue* options = conversation.Find("options");
  if (options == nullptr) return request;
  if (const JsonValue* tools = options->Find("tools")) request.tools = *tools;
  if (const JsonValue* thinking = options->Find("thinking")) request.options.thinking = thinking->boolean;
  if (const JsonValue* prompt = options->Find("add_generation_prompt")) {
    request.options.add_generation_prompt = prompt->boolean;
  }
  const std::string effort = StringOf(*options, "thinking_effort");
  if (!effort.empty()) request.options.effort = ParseEffort(effort, "thinking_effort").value_or(Effort::kNone);
  const std::string choice = StringOf(*options, "tool_choice");
  if (choice == "required") request.options.tool_choice = ToolChoice::kRequired;
  if (choice == "none") request.options.tool_choice = ToolChoice::kNone;
  if (const JsonValue* format = options->Find("response_format")) {
    if (StringOf(*format, "type") == "json_object") request.options.response_format = ResponseFormat::kJsonObject;
    if (StringOf(*format, "type") == "json_schema") {
      request.options.response_format = ResponseFormat::kJsonSchema;
      request.options.response_schema = SchemaOfResponseFormat(*format);
    }
  }
  return request;
}

}  // namespace k3::testing
