#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/text/chat_formats.h"
#include "server/text/encode_chunks.h"
#include "server/text/field_error.h"
#include "server/text/json_writer.h"
#include "server/text/utf8.h"
#include "server/text/xtml_markup.h"

// K3's chat format. Where a segment ends is part of the format: each is encoded by itself, and merging two changes ids.
namespace k3 {
namespace {

constexpr JsonStyle kDeclarationStyle = {.sort_keys = true};
constexpr JsonStyle kArgumentStyle = {.spaces = true};

constexpr char kToolsHeader[] = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n";
constexpr char kDynamicToolsHeader[] =
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\nYou have access to all "
    "existing "
    "and extended tools.\nHere are the specs for the extended tools.\n\n```json\n";
constexpr char kToolsFooter[] = "\n```";
constexpr char kEffortHeader[] =
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported "
    "values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort=";
constexpr char kEffortFooter[] = "`.";
constexpr char kToolsRequired[] =
    "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.";
constexpr char kToolsForbidden[] =
    "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.";
constexpr char kJsonHeader[] = "The system is invoked with `response_format=";
constexpr char kJsonRule[] =
    "`.\nYour response must be raw JSON data without markdown code blocks (```json) or any additional formatting.";
constexpr char kSchemaHeader[] = "\nThe JSON data must match the following schema:\n```json\n";
constexpr char kSchemaFooter[] = "\n```";

using Attribute = std::pair<std::string_view, std::string>;

class XtmlWriter {
 public:
  explicit XtmlWriter(std::vector<Segment>* segments) : segments_(*segments) {}

  void Open(std::string_view tag, const std::vector<Attribute>& attributes = {}) {
    Control("<|open|>");
    Text(tag);
    for (const auto& [key, value] : attributes) {
      Text(absl::StrCat(" ", std::string(key)));
      Text("=\"");
      Text(XtmlAttribute(value));
      Text("\"");
    }
    Control("<|sep|>");
  }

  void Close(std::string_view tag) {
    Control("<|close|>");
    Text(tag);
    Control("<|sep|>");
  }

  void CloseMessage() {
    Close("message");
    Control("<|end_of_msg|>");
  }

  void Text(std::string_view text) {
    if (!text.empty()) segments_.push_back({std::string(text), false});
  }

  void SystemMessage(const char* type, std::string_view body) {
    Open("message", {{"role", "system"}, {"type", type}});
    Text(body);
    CloseMessage();
  }

 private:
  void Control(const char* text) { segments_.push_back({text, true}); }

  std::vector<Segment>& segments_;
};

const char* EffortName(Effort effort) {
  switch (effort) {
    case Effort::kLow:
      return "low";
    case Effort::kHigh:
      return "high";
    case Effort::kMax:
      return "max";
    case Effort::kNone:
      break;
  }
  return "";
}

class XtmlRenderer {
 public:
  XtmlRenderer(const ChatRequest& request, RenderedChat* chat)
      : request_(request), options_(request.options), chat_(*chat), writer_(&chat->segments) {}

  absl::Status Render() {
    if (request_.tools.is_array() && !request_.tools.items.empty()) DeclareTools(request_.tools, kToolsHeader);
    if (options_.thinking && options_.effort != Effort::kNone) {
      writer_.SystemMessage("thinking-effort", absl::StrCat(kEffortHeader, EffortName(options_.effort), kEffortFooter));
    }
    const std::vector<MessageInOrder> order = OrderMessages(request_.messages);
    const bool partial = request_.messages.back().partial;
    for (size_t i = 0; i + (partial ? 1 : 0) < order.size(); ++i) {
      const absl::Status status = RenderMessage(order[i]);
      if (!status.ok()) return status;
    }
    RenderDirectives();
    if (partial) {
      OpenPartialAnswer(request_.messages.back());
    } else if (options_.add_generation_prompt) {
      writer_.Open("message", {{"role", "assistant"}});
      OpenAnswer(options_.thinking);
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
      DeclareTools(message.tools, kDynamicToolsHeader);  // the message's content is dropped
      return absl::OkStatus();
    }
    OpenMessage(message.role == "developer" ? "system" : message.role, message.name);
    RenderContent(message.content);
    writer_.CloseMessage();
    return absl::OkStatus();
  }

  absl::Status RenderAssistant(const ChatMessage& message, const std::string& path) {
    calls_ = &message.tool_calls;
    results_ = 0;
    OpenMessage("assistant", message.name);
    if (options_.thinking) {
      writer_.Open("think");
      writer_.Text(Reasoning(message));
      writer_.Close("think");
    }
    writer_.Open("response");
    RenderContent(message.content);
    writer_.Close("response");
    if (!message.tool_calls.empty()) {
      writer_.Open("tools");
      for (size_t i = 0; i < message.tool_calls.size(); ++i) {
        const absl::Status status =
            RenderCall(message.tool_calls[i], i + 1, absl::StrCat(path, ".tool_calls[", i, "].function.arguments"));
        if (!status.ok()) return status;
      }
      writer_.Close("tools");
      chat_.history_calls += static_cast<int32_t>(message.tool_calls.size());
    }
    writer_.CloseMessage();
    return absl::OkStatus();
  }

  absl::Status RenderCall(const ToolCall& call, size_t number, const std::string& path) {
    const auto arguments = ReadToolArguments(call, path);
    if (!arguments.ok()) return arguments.status();
    writer_.Open("call", {{"tool", call.name}, {"index", std::to_string(number)}});
    if (arguments->unparsed.has_value()) {
      writer_.Open("json", {{"type", "object"}});
      writer_.Text(*arguments->unparsed);
      writer_.Close("json");
    }
    const JsonValue& object = arguments->object;
    for (size_t i = 0; i < object.keys.size(); ++i) {
      const JsonValue& value = object.items[i];
      writer_.Open("argument", {{"key", object.keys[i]}, {"type", XtmlType(value)}});
      writer_.Text(value.is_string() ? value.text : WriteJson(value, kArgumentStyle));
      writer_.Close("argument");
    }
    writer_.Close("call");
    return absl::OkStatus();
  }

  absl::Status RenderToolResult(const ChatMessage& message, const ToolCall* matched, const std::string& path) {
    ++results_;
    std::string name = matched != nullptr ? matched->name : !message.tool.empty() ? message.tool : message.name;
    if (name.empty() && calls_ != nullptr && results_ <= calls_->size()) name = (*calls_)[results_ - 1].name;
    if (name.empty()) {
      return FieldError(path + ".tool_call_id",
                        "names no call of the preceding assistant message, and the message carries no tool name");
    }
    writer_.Open("message", {{"role", "tool"}, {"tool", name}, {"index", std::to_string(results_)}});
    RenderContent(message.content);
    writer_.CloseMessage();
    return absl::OkStatus();
  }

  void RenderDirectives() {
    if (options_.tool_choice == ToolChoice::kRequired) writer_.SystemMessage("tool-choice", kToolsRequired);
    if (options_.tool_choice == ToolChoice::kNone) writer_.SystemMessage("tool-choice", kToolsForbidden);
    if (options_.response_format == ResponseFormat::kJsonObject) {
      writer_.SystemMessage("response-format", absl::StrCat(kJsonHeader, "json_object", kJsonRule));
    } else if (options_.response_format == ResponseFormat::kJsonSchema) {
      writer_.SystemMessage("response-format",
                            absl::StrCat(kJsonHeader, "json_schema", kJsonRule, kSchemaHeader,
                                         WriteJson(options_.response_schema, kDeclarationStyle), kSchemaFooter));
    }
  }

  // A message to continue stays open where its text ends: in the response when it has one, else in the reasoning.
  void OpenPartialAnswer(const ChatMessage& message) {
    OpenMessage("assistant", message.name);
    bool has_content = false;
    for (const ContentPart& part : message.content.parts) has_content = has_content || !part.text.empty();
    const std::string_view reasoning = options_.thinking ? Reasoning(message) : std::string_view();
    if (has_content && options_.thinking) {
      writer_.Open("think");
      writer_.Text(reasoning);
      writer_.Close("think");
    }
    OpenAnswer(options_.thinking && !has_content);
    if (!has_content && reasoning.empty()) return;
    if (has_content) {
      RenderContent(message.content);
    } else {
      writer_.Text(reasoning);
    }
    chat_.opening_segments = 0;
  }

  void OpenAnswer(bool reasoning) {
    const size_t before = chat_.segments.size();
    writer_.Open(reasoning ? "think" : "response");
    chat_.open_channel = reasoning ? OpenChannel::kReasoning : OpenChannel::kContent;
    chat_.opening_segments = chat_.segments.size() - before;
  }

  void OpenMessage(std::string_view role, const std::string& name) {
    std::vector<Attribute> attributes = {{"role", std::string(role)}};
    if (!name.empty()) attributes.emplace_back("name", name);
    writer_.Open("message", attributes);
  }

  void RenderContent(const ChatContent& content) {
    for (const ContentPart& part : content.parts) writer_.Text(part.text);
  }

  void DeclareTools(const JsonValue& tools, const char* header) {
    writer_.SystemMessage("tool-declare", absl::StrCat(header, WriteJson(tools, kDeclarationStyle), kToolsFooter));
  }

  // Reasoning of white space alone counts as none.
  static std::string_view Reasoning(const ChatMessage& message) {
    const std::string_view text = message.reasoning_content.empty() ? message.reasoning : message.reasoning_content;
    return IsPythonBlank(text) ? std::string_view() : text;
  }

  const ChatRequest& request_;
  const ChatOptions& options_;
  RenderedChat& chat_;
  XtmlWriter writer_;
  const std::vector<ToolCall>* calls_ = nullptr;  // of the last assistant message
  size_t results_ = 0;                            // tool results since then
};

}  // namespace

absl::StatusOr<RenderedChat> RenderXtml(const ChatRequest& request) {
  RenderedChat chat;
  const absl::Status status = XtmlRenderer(request, &chat).Render();
  if (!status.ok()) return status;
  return chat;
}

}  // namespace k3
