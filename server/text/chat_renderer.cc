#include "server/text/chat_renderer.h"

#include "server/text/chat_formats.h"
#include "server/text/field_error.h"

namespace k3 {

ChatFormat DetectChatFormat(const Tokenizer& tokenizer) {
  const auto has_all = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (!tokenizer.SpecialId(name).has_value()) return false;
    }
    return true;
  };
  if (has_all({"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"})) return ChatFormat::kXtml;
  if (has_all({"<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>",
               "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
               "<|tool_call_argument_begin|>", "<|tool_call_end|>"})) {
    return ChatFormat::kK2;
  }
  return ChatFormat::kNone;
}

const char* ChatFormatName(ChatFormat format) {
  switch (format) {
    case ChatFormat::kXtml:
      return "kimi-k3 xtml";
    case ChatFormat::kK2:
      return "kimi-k2";
    case ChatFormat::kNone:
      break;
  }
  return "none";
}

ChatRenderer::ChatRenderer(std::shared_ptr<const Tokenizer> tokenizer)
    : tokenizer_(std::move(tokenizer)), format_(DetectChatFormat(*tokenizer_)) {}

absl::StatusOr<RenderedChat> ChatRenderer::Render(const ChatRequest& request) const {
  if (format_ == ChatFormat::kNone) {
    return absl::FailedPreconditionError("the model's vocabulary has no chat tokens: only raw prompts are possible");
  }
  const absl::Status status = CheckChatRequest(request);
  if (!status.ok()) return status;
  return format_ == ChatFormat::kXtml ? RenderXtml(request) : RenderK2(request);
}

absl::StatusOr<ChatPrompt> ChatRenderer::RenderToIds(const ChatRequest& request) const {
  auto chat = Render(request);
  if (!chat.ok()) return chat.status();
  ChatPrompt prompt;
  prompt.open_channel = chat->open_channel;
  prompt.history_calls = chat->history_calls;
  size_t opening_begin = 0;
  for (size_t i = 0; i < chat->segments.size(); ++i) {
    if (i == chat->segments.size() - chat->opening_segments) opening_begin = prompt.ids.size();
    const Segment& segment = chat->segments[i];
    const absl::Status status =
        tokenizer_->Encode(segment.text, segment.control ? EncodeMode::kControl : EncodeMode::kOrdinary, &prompt.ids);
    if (!status.ok()) return FieldError("messages", std::string(status.message()));
  }
  if (chat->opening_segments > 0) prompt.opening_ids = static_cast<int32_t>(prompt.ids.size() - opening_begin);
  return prompt;
}

absl::StatusOr<std::vector<int32_t>> ChatRenderer::EncodeSegments(const std::vector<Segment>& segments) const {
  std::vector<int32_t> ids;
  for (const Segment& segment : segments) {
    const absl::Status status =
        tokenizer_->Encode(segment.text, segment.control ? EncodeMode::kControl : EncodeMode::kOrdinary, &ids);
    if (!status.ok()) return status;
  }
  return ids;
}

}  // namespace k3
