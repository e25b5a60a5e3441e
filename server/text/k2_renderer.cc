#include <string>
#include <string_view>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "server/text/chat_formats.h"
#include "server/text/field_error.h"
#include "server/text/json_writer.h"

// The K2 family's chat format, which Kimi-Linear uses. Special tokens delimit everything; between two of them the text
// is one segment, as if the whole prompt had been one string. There is no reasoning channel and no wording for tool
// choice or response format. Call ids are functions.NAME:ORDINAL over the whole conversation, whatever ids the client
// kept.
namespace k3 {
namespace {

class K2Renderer {
 public:
  K2Renderer(const ChatRequest& request, RenderedChat* chat) : request_(request), chat_(*chat) {}

  absl::Status Render() {
    if (request_.tools.is_array() && !request_.tools.items.empty()) DeclareTools(request_.tools);
    for (const MessageInOrder& entry : OrderMessages(request_.messages)) {
      const absl::Status status = RenderMessage(entry);
      if (!status.ok()) return status;
    }
    if (!request_.messages.back().partial && request_.options.add_generation_prompt) {
      Begin("<|im_assistant|>", "assistant");
      chat_.open_channel = OpenChannel::kContent;
    }
    return absl::OkStatus();
  }

 private:
  absl::Status RenderMessage(const MessageInOrder& entry) {
    const ChatMessage& message = request_.messages[entry.index];
    const std::string path = absl::StrCat("messages[", entry.index, "]");
    if (message.role == "assistant") return RenderAssistant(message, path);
    if (message.role == "tool") return RenderToolResult(message, entry.matched, path);
    if (message.tools.is_array() && !message.tools.items.empty() && message.role != "user") {
      DeclareTools(message.tools);
      return absl::OkStatus();
    }
    const bool user = message.role == "user";
    Begin(user ? "<|im_user|>" : "<|im_system|>", !message.name.empty() ? message.name : user ? "user" : "system");
    Text(ContentText(message));
    Control("<|im_end|>");
    return absl::OkStatus();
  }

  absl::Status RenderAssistant(const ChatMessage& message, const std::string& path) {
    Begin("<|im_assistant|>", message.name.empty() ? "assistant" : message.name);
    Text(ContentText(message));
    if (message.partial) {
      chat_.open_channel = OpenChannel::kContent;
      return absl::OkStatus();
    }
    canonical_ids_.clear();
    if (!message.tool_calls.empty()) Control("<|tool_calls_section_begin|>");
    for (size_t i = 0; i < message.tool_calls.size(); ++i) {
      const ToolCall& call = message.tool_calls[i];
      const auto arguments = ReadToolArguments(call, absl::StrCat(path, ".tool_calls[", i, "].function.arguments"));
      if (!arguments.ok()) return arguments.status();
      const std::string id = absl::StrCat("functions.", call.name, ":", chat_.history_calls++);
      canonical_ids_[&call] = id;
      Control("<|tool_call_begin|>");
      Text(id);
      Control("<|tool_call_argument_begin|>");
      Text(ArgumentsText(call, *arguments));
      Control("<|tool_call_end|>");
    }
    if (!message.tool_calls.empty()) Control("<|tool_calls_section_end|>");
    Control("<|im_end|>");
    return absl::OkStatus();
  }

  absl::Status RenderToolResult(const ChatMessage& message, const ToolCall* matched, const std::string& path) {
    const auto& given = message.tool_call_id.has_value() ? message.tool_call_id : message.id;
    if (matched == nullptr && !given.has_value()) {
      return FieldError(path + ".tool_call_id", "a tool message needs the id of its call");
    }
    Begin("<|im_system|>", !message.name.empty() ? message.name : "tool");
    Text(absl::StrCat("## Return of ", matched != nullptr ? canonical_ids_[matched] : *given, "\n",
                      ContentText(message)));
    Control("<|im_end|>");
    return absl::OkStatus();
  }

  // Arguments that came as text stay as the client sent them.
  static std::string ArgumentsText(const ToolCall& call, const ToolArguments& arguments) {
    if (arguments.unparsed.has_value()) return *arguments.unparsed;
    if (call.arguments_text.has_value() && !arguments.object.keys.empty()) return *call.arguments_text;
    return WriteJson(arguments.object, {.spaces = true});
  }

  static std::string ContentText(const ChatMessage& message) {
    std::string text;
    for (const ContentPart& part : message.content.parts) text += part.text;
    return text;
  }

  void DeclareTools(const JsonValue& tools) {
    Begin("<|im_system|>", "tool_declare");
    Text(WriteJson(tools, {}));
    Control("<|im_end|>");
  }

  void Begin(const char* marker, std::string_view role) {
    Control(marker);
    Text(role);
    Control("<|im_middle|>");
  }

  void Control(const char* text) { chat_.segments.push_back({text, true}); }
  void Text(std::string_view text) {
    if (!text.empty()) chat_.segments.push_back({std::string(text), false});
  }

  const ChatRequest& request_;
  RenderedChat& chat_;
  std::unordered_map<const ToolCall*, std::string> canonical_ids_;  // of the last assistant message's calls
};

}  // namespace

absl::StatusOr<RenderedChat> RenderK2(const ChatRequest& request) {
  RenderedChat chat;
  const absl::Status status = K2Renderer(request, &chat).Render();
  if (!status.ok()) return status;
  return chat;
}

}  // namespace k3
