#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/text/chat_types.h"
#include "server/text/tokenizer.h"

namespace k3 {

// How a model's conversations are written. Decided by its special tokens.
enum class ChatFormat : uint8_t {
  kXtml,  // K3: <|open|> tags
  kK2,    // Kimi-Linear and the K2 family: <|im_user|> and friends
  kNone,  // neither: raw prompts only
};

ChatFormat DetectChatFormat(const Tokenizer& tokenizer);
const char* ChatFormatName(ChatFormat format);

// A stretch of prompt that is encoded by itself. `control`: the server's own markup, in which special tokens are
// recognised; everything else is ordinary text and cannot become one.
struct Segment {
  std::string text;
  bool control = false;

  bool operator==(const Segment&) const = default;
};

// Which part of the answer the prompt has already opened.
enum class OpenChannel : uint8_t { kNone, kReasoning, kContent };

struct RenderedChat {
  std::vector<Segment> segments;
  OpenChannel open_channel = OpenChannel::kNone;
  // Trailing segments that do nothing but open the channel ("usage.prompt_tokens" leaves them out in strict mode).
  size_t opening_segments = 0;
  // Tool calls in the history: the next call's ordinal in ids such as get_weather_2.
  int32_t history_calls = 0;
};

struct ChatPrompt {
  std::vector<int32_t> ids;
  OpenChannel open_channel = OpenChannel::kNone;
  int32_t opening_ids = 0;  // as opening_segments, in ids
  int32_t history_calls = 0;
};

// Turns conversations into prompts of one model. Immutable; any number of threads may use one.
class ChatRenderer {
 public:
  explicit ChatRenderer(std::shared_ptr<const Tokenizer> tokenizer);

  ChatFormat format() const { return format_; }

  // Both give a FieldError naming what a client got wrong, e.g. messages[3].tool_calls[0].function.arguments;
  // FAILED_PRECONDITION when the model has no chat format.
  absl::StatusOr<RenderedChat> Render(const ChatRequest& request) const;
  absl::StatusOr<ChatPrompt> RenderToIds(const ChatRequest& request) const;

  // Ids of segments that a caller brings itself, e.g. typed prompt segments.
  absl::StatusOr<std::vector<int32_t>> EncodeSegments(const std::vector<Segment>& segments) const;

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  ChatFormat format_;
};

// Checks that no format needs repeating: known roles, content where a role must have some, known part types, named tool
// calls, a partial message only at the end, valid UTF-8. A FieldError otherwise.
absl::Status CheckChatRequest(const ChatRequest& request);

// The schema inside a response_format object, under the names that clients use: response_schema, json_schema.schema,
// json_schema.json_schema, else json_schema itself. Null when there is none.
JsonValue SchemaOfResponseFormat(const JsonValue& response_format);

// "low", "high", "max", "none". INVALID_ARGUMENT for others, with `path`.
absl::StatusOr<Effort> ParseEffort(std::string_view text, std::string_view path);

}  // namespace k3
