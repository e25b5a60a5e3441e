#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/openai/openai_request.h"
#include "server/stream_event.h"
#include "server/text/tokenizer.h"

namespace k3 {

// What all parts of one reply have in common.
struct ReplyHeader {
  std::string id;       // chatcmpl-... or cmpl-...
  int64_t created = 0;  // seconds since 1970
  std::string model;
  std::string fingerprint;
  std::shared_ptr<const Tokenizer> tokenizer;
};

// Token counts of a reply, summed over its prompts.
struct ReplyUsage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t reasoning_tokens = 0;

  // The usage object.
  std::string Json() const;
};

// Turns the events of one request's streams into the text of its reply. One per reply, used by one thread at a time.
// `prompt` counts the prompts of a batch; the choice index that a client sees is prompt * n + choice.
class ReplyWriter {
 public:
  virtual ~ReplyWriter() = default;

  // In the order in which the stream gives them. What can be sent is appended to `out`; a writer of whole replies only
  // collects.
  virtual void OnAccepted(int32_t prompt, AcceptedEvent&& event, std::string* out) = 0;
  virtual void OnPromptLogprobs(int32_t prompt, PromptLogprobsEvent&& event, std::string* out) = 0;
  virtual void OnDelta(int32_t prompt, DeltaEvent&& event, std::string* out) = 0;
  virtual void OnToolCall(int32_t prompt, ToolCallEvent&& event, std::string* out) = 0;
  virtual void OnChoiceFinished(int32_t prompt, ChoiceFinishedEvent&& event, std::string* out) = 0;
  virtual void OnFinished(int32_t prompt, FinishedEvent&& event, std::string* out) = 0;
  // All prompts have finished: the end of the stream, or the whole body.
  virtual void OnEnd(std::string* out) = 0;
};

std::unique_ptr<ReplyWriter> MakeChatStreamWriter(ReplyHeader header, const OpenAiReplyOptions& options);
std::unique_ptr<ReplyWriter> MakeChatReplyWriter(ReplyHeader header, const OpenAiReplyOptions& options);
std::unique_ptr<ReplyWriter> MakeCompletionStreamWriter(ReplyHeader header, const OpenAiReplyOptions& options,
                                                        int32_t prompts);
std::unique_ptr<ReplyWriter> MakeCompletionReplyWriter(ReplyHeader header, const OpenAiReplyOptions& options,
                                                       int32_t prompts);

// Shared by the writers.

// Counts a finished prompt; in strict mode the ids that only open the reply's channel do not count.
void AddUsage(const FinishedEvent& event, int32_t opening_tokens, bool strict, ReplyUsage* usage);
// "stop", "length" or "tool_calls": the words that clients know.
std::string_view FinishReasonWord(StopKind reason);
// ,"stop_reason":... - what ended the choice beyond that word; nothing for a plain end.
void AppendStopReason(const ChoiceFinishedEvent& event, std::string* out);
// [1,2,3]
void AppendIds(const std::vector<int32_t>& ids, std::string* out);
// {"id":...,"object":`object`,"created":...,"model":...,"system_fingerprint":... without a closing brace.
std::string OpenReply(const ReplyHeader& header, std::string_view object);

inline constexpr std::string_view kStreamEnd = "data: [DONE]\n\n";

}  // namespace k3
