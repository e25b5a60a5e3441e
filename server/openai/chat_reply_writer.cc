#include <utility>
#include <vector>

#include "server/openai/logprob_json.h"
#include "server/openai/reply_json.h"
#include "server/openai/reply_writer.h"

namespace k3 {
namespace {

class ChatReplyWriter final : public ReplyWriter {
 public:
  ChatReplyWriter(ReplyHeader header, const OpenAiReplyOptions& options)
      : header_(std::move(header)), options_(options), choices_(static_cast<size_t>(options.choices_per_prompt)) {}

  void OnAccepted(int32_t, AcceptedEvent&& event, std::string*) override { accepted_ = std::move(event); }

  void OnPromptLogprobs(int32_t, PromptLogprobsEvent&& event, std::string*) override {
    LogprobRows& rows = event.rows;
    prompt_rows_.top_per_token = rows.top_per_token;
    prompt_rows_.token_ids.insert(prompt_rows_.token_ids.end(), rows.token_ids.begin(), rows.token_ids.end());
    prompt_rows_.logprobs.insert(prompt_rows_.logprobs.end(), rows.logprobs.begin(), rows.logprobs.end());
    prompt_rows_.top.insert(prompt_rows_.top.end(), rows.top.begin(), rows.top.end());
  }

  void OnDelta(int32_t, DeltaEvent&& event, std::string*) override {
    Choice& choice = choices_[static_cast<size_t>(event.choice)];
    (event.channel == OutputChannel::kReasoning ? choice.reasoning : choice.content) += event.text;
    if (options_.token_ids) choice.ids.insert(choice.ids.end(), event.token_ids.begin(), event.token_ids.end());
    if (options_.logprobs && event.channel == OutputChannel::kContent) {
      AppendChatLogprobs(event.logprobs, *header_.tokenizer, options_.top_logprobs, &choice.logprobs);
    }
  }

  void OnToolCall(int32_t, ToolCallEvent&& event, std::string*) override {
    std::vector<ToolCallEvent>& calls = choices_[static_cast<size_t>(event.choice)].calls;
    if (calls.empty() || calls.back().index != event.index) {
      calls.push_back(std::move(event));
    } else {
      calls.back().arguments += event.arguments;
    }
  }

  void OnChoiceFinished(int32_t, ChoiceFinishedEvent&& event, std::string*) override {
    choices_[static_cast<size_t>(event.choice)].finished = std::move(event);
  }

  void OnFinished(int32_t, FinishedEvent&& event, std::string*) override {
    AddUsage(event, accepted_.opening_tokens, options_.strict_usage, &usage_);
  }

  void OnEnd(std::string* out) override {
    out->append(OpenReply(header_, "chat.completion")).append(",\"choices\":[");
    for (size_t i = 0; i < choices_.size(); ++i) {
      if (i > 0) out->push_back(',');
      AppendChoice(static_cast<int32_t>(i), choices_[i], out);
    }
    out->append("],\"usage\":").append(usage_.Json());
    if (options_.prompt_logprobs) {
      out->append(",\"prompt_logprobs\":");
      out->append(
          PromptLogprobsJson(accepted_.prompt_ids, prompt_rows_, *header_.tokenizer, options_.prompt_top_logprobs));
    }
    if (options_.token_ids) {
      out->append(",\"prompt_token_ids\":");
      AppendIds(accepted_.prompt_ids, out);
    }
    out->push_back('}');
  }

 private:
  struct Choice {
    std::string content;
    std::string reasoning;
    std::vector<ToolCallEvent> calls;
    std::string logprobs;
    std::vector<int32_t> ids;
    ChoiceFinishedEvent finished;
  };

  void AppendChoice(int32_t index, const Choice& choice, std::string* out) const {
    out->append("{\"index\":");
    AppendInteger(index, out);
    out->append(",\"message\":{\"role\":\"assistant\",\"content\":");
    if (choice.content.empty() && !choice.calls.empty()) {
      out->append("null");
    } else {
      AppendJsonString(choice.content, out);
    }
    if (!choice.reasoning.empty()) {
      out->append(",\"reasoning_content\":");
      AppendJsonString(choice.reasoning, out);
    }
    if (!choice.calls.empty()) AppendCalls(choice.calls, out);
    out->append(",\"refusal\":null},\"logprobs\":");
    if (options_.logprobs) {
      out->append("{\"content\":[").append(choice.logprobs).append("],\"refusal\":null}");
    } else {
      out->append("null");
    }
    out->append(",\"finish_reason\":\"").append(FinishReasonWord(choice.finished.reason)).append("\"");
    AppendStopReason(choice.finished, out);
    if (options_.token_ids) {
      out->append(",\"token_ids\":");
      AppendIds(choice.ids, out);
    }
    if (options_.strict_usage) out->append(",\"usage\":").append(usage_.Json());
    out->push_back('}');
  }

  static void AppendCalls(const std::vector<ToolCallEvent>& calls, std::string* out) {
    out->append(",\"tool_calls\":[");
    for (size_t i = 0; i < calls.size(); ++i) {
      if (i > 0) out->push_back(',');
      out->append("{\"id\":");
      AppendJsonString(calls[i].id, out);
      out->append(",\"type\":\"function\",\"function\":{\"name\":");
      AppendJsonString(calls[i].name, out);
      out->append(",\"arguments\":");
      AppendJsonString(calls[i].arguments, out);
      out->append("}}");
    }
    out->push_back(']');
  }

  const ReplyHeader header_;
  const OpenAiReplyOptions options_;
  AcceptedEvent accepted_;
  LogprobRows prompt_rows_;
  std::vector<Choice> choices_;
  ReplyUsage usage_;
};

}  // namespace

std::unique_ptr<ReplyWriter> MakeChatReplyWriter(ReplyHeader header, const OpenAiReplyOptions& options) {
  return std::make_unique<ChatReplyWriter>(std::move(header), options);
}

}  // namespace k3
