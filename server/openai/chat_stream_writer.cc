#include <utility>
#include <vector>

#include "server/openai/logprob_json.h"
#include "server/openai/reply_json.h"
#include "server/openai/reply_writer.h"

namespace k3 {
namespace {

// chat.completion.chunk events. A chunk carries one choice and one kind of delta; null fields are left out of deltas.
class ChatStreamWriter final : public ReplyWriter {
 public:
  ChatStreamWriter(ReplyHeader header, const OpenAiReplyOptions& options)
      : header_(std::move(header)),
        options_(options),
        open_("data: " + OpenReply(header_, "chat.completion.chunk") + ",\"choices\":["),
        choices_(static_cast<size_t>(options.choices_per_prompt)) {}

  void OnAccepted(int32_t, AcceptedEvent&& event, std::string*) override {
    accepted_ = std::move(event);
    usage_.prompt_tokens = accepted_.prompt_tokens - (options_.strict_usage ? accepted_.opening_tokens : 0);
    usage_.cached_tokens = accepted_.cached_tokens;
  }

  void OnPromptLogprobs(int32_t, PromptLogprobsEvent&&, std::string*) override {}  // refused for streams

  void OnDelta(int32_t, DeltaEvent&& event, std::string* out) override {
    Choice& choice = choices_[static_cast<size_t>(event.choice)];
    usage_.completion_tokens += event.tokens;
    if (event.channel == OutputChannel::kReasoning) usage_.reasoning_tokens += event.tokens;
    if (options_.token_ids) choice.ids.insert(choice.ids.end(), event.token_ids.begin(), event.token_ids.end());
    if (options_.logprobs && event.channel == OutputChannel::kContent) {
      AppendChatLogprobs(event.logprobs, *header_.tokenizer, options_.top_logprobs, &choice.logprobs);
    }
    // Tokens without text yet, such as half a character, go with the text that they become part of.
    if (event.text.empty()) return;
    Begin(event.choice, out);
    OpenChunk(event.choice, out);
    out->append(event.channel == OutputChannel::kReasoning ? "{\"reasoning_content\":" : "{\"content\":");
    AppendJsonString(event.text, out);
    out->push_back('}');
    CloseChunk(event.choice, event.channel == OutputChannel::kContent, out);
  }

  void OnToolCall(int32_t, ToolCallEvent&& event, std::string* out) override {
    Begin(event.choice, out);
    if (!event.name.empty() || !event.id.empty()) {
      OpenChunk(event.choice, out);
      out->append("{\"tool_calls\":[{\"index\":");
      AppendInteger(event.index, out);
      out->append(",\"id\":");
      AppendJsonString(event.id, out);
      out->append(",\"type\":\"function\",\"function\":{\"name\":");
      AppendJsonString(event.name, out);
      out->append(",\"arguments\":\"\"}}]}");
      CloseChunk(event.choice, false, out);
    }
    if (event.arguments.empty()) return;
    OpenChunk(event.choice, out);
    out->append("{\"tool_calls\":[{\"index\":");
    AppendInteger(event.index, out);
    out->append(",\"function\":{\"arguments\":");
    AppendJsonString(event.arguments, out);
    out->append("}}]}");
    CloseChunk(event.choice, false, out);
  }

  void OnChoiceFinished(int32_t, ChoiceFinishedEvent&& event, std::string* out) override {
    if (options_.strict_usage) {
      ended_.push_back(std::move(event));  // its chunk carries the usage, which comes last
      return;
    }
    AppendEnd(event, "", out);
  }

  void OnFinished(int32_t, FinishedEvent&& event, std::string* out) override {
    usage_ = ReplyUsage();
    AddUsage(event, accepted_.opening_tokens, options_.strict_usage, &usage_);
    const std::string usage = ",\"usage\":" + usage_.Json();
    for (const ChoiceFinishedEvent& ended : ended_) AppendEnd(ended, usage, out);
  }

  void OnEnd(std::string* out) override {
    if (options_.include_usage) {
      out->append(open_).append("],\"usage\":").append(usage_.Json()).append("}\n\n");
    }
    out->append(kStreamEnd);
  }

 private:
  struct Choice {
    bool begun = false;
    std::string logprobs;      // of tokens not yet sent
    std::vector<int32_t> ids;  // likewise
  };

  // The role comes once, together with the first token, so that a client's clock for it is right.
  void Begin(int32_t index, std::string* out) {
    Choice& choice = choices_[static_cast<size_t>(index)];
    if (choice.begun) return;
    choice.begun = true;
    out->append(open_).append("{\"index\":");
    AppendInteger(index, out);
    out->append(",\"delta\":{\"role\":\"assistant\",\"content\":\"\"}");
    if (options_.logprobs) out->append(",\"logprobs\":null");
    out->append(",\"finish_reason\":null}]");
    if (options_.token_ids) {
      out->append(",\"prompt_token_ids\":");
      AppendIds(accepted_.prompt_ids, out);
    }
    AppendRunningUsage(out);
    out->append("}\n\n");
  }

  void OpenChunk(int32_t index, std::string* out) const {
    out->append(open_).append("{\"index\":");
    AppendInteger(index, out);
    out->append(",\"delta\":");
  }

  void CloseChunk(int32_t index, bool with_logprobs, std::string* out) {
    AppendTokenFields(index, with_logprobs, out);
    out->append(",\"finish_reason\":null}]");
    AppendRunningUsage(out);
    out->append("}\n\n");
  }

  void AppendTokenFields(int32_t index, bool with_logprobs, std::string* out) {
    Choice& choice = choices_[static_cast<size_t>(index)];
    if (options_.logprobs) {
      if (with_logprobs && !choice.logprobs.empty()) {
        out->append(",\"logprobs\":{\"content\":[").append(choice.logprobs).append("],\"refusal\":null}");
        choice.logprobs.clear();
      } else {
        out->append(",\"logprobs\":null");
      }
    }
    if (options_.token_ids) {
      out->append(",\"token_ids\":");
      AppendIds(choice.ids, out);
      choice.ids.clear();
    }
  }

  void AppendEnd(const ChoiceFinishedEvent& event, std::string_view usage, std::string* out) {
    Begin(event.choice, out);
    OpenChunk(event.choice, out);
    out->append("{}");
    AppendTokenFields(event.choice, true, out);
    out->append(",\"finish_reason\":\"").append(FinishReasonWord(event.reason)).append("\"");
    AppendStopReason(event, out);
    out->append(usage).append("}]");
    AppendRunningUsage(out);
    out->append("}\n\n");
  }

  void AppendRunningUsage(std::string* out) const {
    if (options_.continuous_usage) out->append(",\"usage\":").append(usage_.Json());
  }

  const ReplyHeader header_;
  const OpenAiReplyOptions options_;
  const std::string open_;  // of every chunk, up to its choice
  AcceptedEvent accepted_;
  std::vector<Choice> choices_;
  std::vector<ChoiceFinishedEvent> ended_;
  ReplyUsage usage_;
};

}  // namespace

std::unique_ptr<ReplyWriter> MakeChatStreamWriter(ReplyHeader header, const OpenAiReplyOptions& options) {
  return std::make_unique<ChatStreamWriter>(std::move(header), options);
}

}  // namespace k3
