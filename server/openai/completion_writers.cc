#include <memory>
#include <utility>
#include <vector>

#include "server/openai/logprob_json.h"
#include "server/openai/reply_json.h"
#include "server/openai/reply_writer.h"
#include "server/text/utf8.h"

namespace k3 {
namespace {

// What streams and whole replies of the completion route share: echoed prompts, and the tokens of each choice with
// their log-probabilities up to the text that they became.
class CompletionWriter : public ReplyWriter {
 public:
  CompletionWriter(ReplyHeader header, const OpenAiReplyOptions& options, int32_t prompts)
      : header_(std::move(header)), options_(options), prompts_(static_cast<size_t>(prompts)) {
    choices_.reserve(prompts_.size() * static_cast<size_t>(options.choices_per_prompt));
    for (size_t i = 0; i < choices_.capacity(); ++i) {
      choices_.emplace_back(*header_.tokenizer, options_.top_logprobs);
    }
  }

  void OnAccepted(int32_t prompt, AcceptedEvent&& event, std::string* out) override {
    prompts_[static_cast<size_t>(prompt)].accepted = std::move(event);
    AcceptPrompt(prompt, out);
  }

  void OnPromptLogprobs(int32_t prompt, PromptLogprobsEvent&& event, std::string*) override {
    Prompt& state = prompts_[static_cast<size_t>(prompt)];
    if (options_.prompt_logprobs) AppendRows(event.rows, &state.rows);
    if (!options_.echo || !options_.logprobs) return;
    for (int32_t i = 0; i < options_.choices_per_prompt; ++i) {
      Choice& choice = ChoiceOf(prompt, i);
      EchoFirstToken(state, &choice);
      choice.logprobs.Append(event.rows, /*generated=*/false);
    }
  }

  void OnDelta(int32_t prompt, DeltaEvent&& event, std::string* out) override {
    Choice& choice = ChoiceOf(prompt, event.choice);
    running_usage_.completion_tokens += event.tokens;
    if (options_.logprobs) {
      if (options_.echo) EchoFirstToken(prompts_[static_cast<size_t>(prompt)], &choice);
      choice.logprobs.Append(event.logprobs, /*generated=*/true);
    }
    if (options_.token_ids) choice.ids.insert(choice.ids.end(), event.token_ids.begin(), event.token_ids.end());
    choice.text += event.text;
    if (!event.text.empty()) TextArrived(prompt, event.choice, out);
  }

  void OnToolCall(int32_t, ToolCallEvent&&, std::string*) override {}  // raw prompts have none

  void OnFinished(int32_t prompt, FinishedEvent&& event, std::string*) override {
    AddUsage(event, prompts_[static_cast<size_t>(prompt)].accepted.opening_tokens, options_.strict_usage, &usage_);
  }

 protected:
  struct Prompt {
    AcceptedEvent accepted;
    LogprobRows rows;
  };
  struct Choice {
    Choice(const Tokenizer& tokenizer, int32_t top_logprobs) : logprobs(tokenizer, top_logprobs) {}

    std::string text;
    bool first_token_echoed = false;
    CompletionLogprobs logprobs;
    std::vector<int32_t> ids;
    ChoiceFinishedEvent finished;
  };

  // The prompt's text stands at the start of each of its choices.
  virtual void AcceptPrompt(int32_t prompt, std::string*) {
    if (!options_.echo) return;
    const std::string text =
        SanitizeUtf8(header_.tokenizer->Decode(prompts_[static_cast<size_t>(prompt)].accepted.prompt_ids));
    for (int32_t i = 0; i < options_.choices_per_prompt; ++i) ChoiceOf(prompt, i).text = text;
  }
  // ChoiceOf(prompt, choice).text is not empty any more.
  virtual void TextArrived(int32_t prompt, int32_t choice, std::string* out) = 0;

  Choice& ChoiceOf(int32_t prompt, int32_t choice) {
    return choices_[static_cast<size_t>(prompt * options_.choices_per_prompt + choice)];
  }

  // ,"logprobs":...[,"token_ids":...] of the tokens since the last call.
  void AppendTokenFields(Choice& choice, std::string* out) {
    out->append(",\"logprobs\":");
    if (options_.logprobs && !choice.logprobs.empty()) {
      choice.logprobs.Take(out);
    } else {
      out->append("null");
    }
    if (options_.token_ids) {
      out->append(",\"token_ids\":");
      AppendIds(choice.ids, out);
      choice.ids.clear();
    }
  }

  static void AppendRows(const LogprobRows& rows, LogprobRows* all) {
    all->top_per_token = rows.top_per_token;
    all->token_ids.insert(all->token_ids.end(), rows.token_ids.begin(), rows.token_ids.end());
    all->logprobs.insert(all->logprobs.end(), rows.logprobs.begin(), rows.logprobs.end());
    all->top.insert(all->top.end(), rows.top.begin(), rows.top.end());
  }

  // Nothing comes before the first token, so it has no probability.
  static void EchoFirstToken(const Prompt& prompt, Choice* choice) {
    if (std::exchange(choice->first_token_echoed, true)) return;
    choice->logprobs.AppendUnscored(prompt.accepted.prompt_ids.front());
  }

  const ReplyHeader header_;
  const OpenAiReplyOptions options_;
  std::vector<Prompt> prompts_;
  std::vector<Choice> choices_;
  ReplyUsage usage_;          // of finished prompts
  ReplyUsage running_usage_;  // so far
};

class CompletionReplyWriter final : public CompletionWriter {
 public:
  using CompletionWriter::CompletionWriter;

  void OnChoiceFinished(int32_t prompt, ChoiceFinishedEvent&& event, std::string*) override {
    Choice& choice = ChoiceOf(prompt, event.choice);
    if (options_.echo && options_.logprobs) EchoFirstToken(prompts_[static_cast<size_t>(prompt)], &choice);
    choice.finished = std::move(event);
  }

  void OnEnd(std::string* out) override {
    out->append(OpenReply(header_, "text_completion")).append(",\"choices\":[");
    for (size_t i = 0; i < choices_.size(); ++i) {
      if (i > 0) out->push_back(',');
      AppendChoice(i, out);
    }
    out->append("],\"usage\":").append(usage_.Json()).push_back('}');
  }

 private:
  void TextArrived(int32_t, int32_t, std::string*) override {}

  void AppendChoice(size_t index, std::string* out) {
    Choice& choice = choices_[index];
    out->append("{\"index\":");
    AppendInteger(static_cast<int64_t>(index), out);
    out->append(",\"text\":");
    AppendJsonString(choice.text, out);
    AppendTokenFields(choice, out);
    out->append(",\"finish_reason\":\"").append(FinishReasonWord(choice.finished.reason)).append("\"");
    AppendStopReason(choice.finished, out);
    const Prompt& prompt = prompts_[index / static_cast<size_t>(options_.choices_per_prompt)];
    if (options_.prompt_logprobs) {
      out->append(",\"prompt_logprobs\":");
      out->append(PromptLogprobsJson(prompt.accepted.prompt_ids, prompt.rows, *header_.tokenizer,
                                     options_.prompt_top_logprobs));
    }
    if (options_.token_ids) {
      out->append(",\"prompt_token_ids\":");
      AppendIds(prompt.accepted.prompt_ids, out);
    }
    out->push_back('}');
  }
};

class CompletionStreamWriter final : public CompletionWriter {
 public:
  CompletionStreamWriter(ReplyHeader header, const OpenAiReplyOptions& options, int32_t prompts)
      : CompletionWriter(std::move(header), options, prompts),
        open_("data: " + OpenReply(header_, "text_completion") + ",\"choices\":[") {}

  void OnChoiceFinished(int32_t prompt, ChoiceFinishedEvent&& event, std::string* out) override {
    Choice& choice = ChoiceOf(prompt, event.choice);
    if (options_.echo && options_.logprobs) EchoFirstToken(prompts_[static_cast<size_t>(prompt)], &choice);
    // An echoed prompt that nothing followed has not been sent yet.
    if (!choice.text.empty()) AppendChunk(prompt, event.choice, nullptr, out);
    AppendChunk(prompt, event.choice, &event, out);
  }

  void OnEnd(std::string* out) override {
    if (options_.include_usage) out->append(open_).append("],\"usage\":").append(usage_.Json()).append("}\n\n");
    out->append(kStreamEnd);
  }

 private:
  void AcceptPrompt(int32_t prompt, std::string* out) override {
    const AcceptedEvent& accepted = prompts_[static_cast<size_t>(prompt)].accepted;
    running_usage_.prompt_tokens += accepted.prompt_tokens;
    running_usage_.cached_tokens += accepted.cached_tokens;
    CompletionWriter::AcceptPrompt(prompt, out);
  }

  void TextArrived(int32_t prompt, int32_t choice, std::string* out) override {
    AppendChunk(prompt, choice, nullptr, out);
  }

  void AppendChunk(int32_t prompt, int32_t index, const ChoiceFinishedEvent* end, std::string* out) {
    Choice& choice = ChoiceOf(prompt, index);
    out->append(open_).append("{\"index\":");
    AppendInteger(prompt * options_.choices_per_prompt + index, out);
    out->append(",\"text\":");
    AppendJsonString(choice.text, out);
    choice.text.clear();
    AppendTokenFields(choice, out);
    if (end == nullptr) {
      out->append(",\"finish_reason\":null}]");
    } else {
      out->append(",\"finish_reason\":\"").append(FinishReasonWord(end->reason)).append("\"");
      AppendStopReason(*end, out);
      out->append("}]");
    }
    if (options_.continuous_usage) out->append(",\"usage\":").append(running_usage_.Json());
    out->append("}\n\n");
  }

  const std::string open_;
};

}  // namespace

std::unique_ptr<ReplyWriter> MakeCompletionStreamWriter(ReplyHeader header, const OpenAiReplyOptions& options,
                                                        int32_t prompts) {
  return std::make_unique<CompletionStreamWriter>(std::move(header), options, prompts);
}

std::unique_ptr<ReplyWriter> MakeCompletionReplyWriter(ReplyHeader header, const OpenAiReplyOptions& options,
                                                       int32_t prompts) {
  return std::make_unique<CompletionReplyWriter>(std::move(header), options, prompts);
}

}  // namespace k3
