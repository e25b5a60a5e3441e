#pragma once

#include "absl/status/statusor.h"
#include "server/text/chat_renderer.h"
#include "server/text/chat_types.h"

// One function per chat format; ChatRenderer chooses. Each takes a request that passed CheckChatRequest.
namespace k3 {

absl::StatusOr<RenderedChat> RenderXtml(const ChatRequest& request);
absl::StatusOr<RenderedChat> RenderK2(const ChatRequest& request);

// What a tool call's arguments are, after the rules for strings: empty or blank text is no arguments; text that is not
// JSON stays as it is; JSON that is no object is an error.
struct ToolArguments {
  JsonValue object = JsonValue::Object();
  std::optional<std::string> unparsed;
};
absl::StatusOr<ToolArguments> ReadToolArguments(const ToolCall& call, const std::string& path);

// The order in which messages are rendered, and each tool result's matched call. A run of tool results is put into the
// order of the last assistant message's calls when every one names one of those by id; otherwise it stays as it is,
// unmatched.
struct MessageInOrder {
  size_t index;                       // in the request
  const ToolCall* matched = nullptr;  // tool results only
};
std::vector<MessageInOrder> OrderMessages(const std::vector<ChatMessage>& messages);

}  // namespace k3
