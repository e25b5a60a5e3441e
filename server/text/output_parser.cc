#include "server/text/output_parser.h"

#include <utility>

#include "server/text/k2_output_parser.h"
#include "server/text/output_channels.h"
#include "server/text/xtml_output_parser.h"

namespace k3 {
namespace {

class RawOutputParser : public OutputParser {
 public:
  explicit RawOutputParser(std::shared_ptr<const Tokenizer> tokenizer)
      : tokenizer_(std::move(tokenizer)), channels_(/*history_calls=*/0) {}

  void Append(int32_t id, std::vector<OutputEvent>* events) override {
    channels_.set_events(events);
    if (!IsSilentToken(*tokenizer_, id)) channels_.Content(tokenizer_->TokenBytes(id));
  }

  void Finish(std::vector<OutputEvent>* events, std::string* undecoded) override {
    channels_.set_events(events);
    channels_.TakeUndecoded(undecoded);
    channels_.Flush(OutputEvent::Kind::kContent);
  }

  OpenChannel channel() const override { return OpenChannel::kContent; }

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  OutputChannels channels_;
};

}  // namespace

std::unique_ptr<OutputParser> MakeOutputParser(std::shared_ptr<const Tokenizer> tokenizer, ChatFormat format,
                                               OpenChannel open_channel, int32_t history_calls) {
  switch (format) {
    case ChatFormat::kXtml:
      return std::make_unique<XtmlOutputParser>(std::move(tokenizer), open_channel, history_calls);
    case ChatFormat::kK2:
      return std::make_unique<K2OutputParser>(std::move(tokenizer), history_calls);
    case ChatFormat::kNone:
      break;
  }
  return std::make_unique<RawOutputParser>(std::move(tokenizer));
}

void ParsedOutput::Add(const OutputEvent& event) {
  switch (event.kind) {
    case OutputEvent::Kind::kReasoning:
      reasoning += event.text;
      break;
    case OutputEvent::Kind::kContent:
      content += event.text;
      break;
    case OutputEvent::Kind::kCallBegin:
      calls.push_back({event.call_id, event.name, "", false});
      break;
    case OutputEvent::Kind::kCallArguments:
      calls[event.call].arguments += event.text;
      break;
    case OutputEvent::Kind::kCallEnd:
      calls[event.call].complete = event.complete;
      break;
    case OutputEvent::Kind::kReasoningEnd:
    case OutputEvent::Kind::kContentEnd:
      break;
  }
}

}  // namespace k3
