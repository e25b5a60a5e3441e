#include "server/choice_reader.h"

#include <utility>

namespace k3 {
namespace {

OutputPiece TextPiece(OutputChannel channel, std::string text) {
  OutputPiece piece;
  piece.channel = channel;
  piece.text = std::move(text);
  return piece;
}

}  // namespace

ChoiceReader::ChoiceReader(const Options& options)
    : parallel_tool_calls_(options.parallel_tool_calls),
      stop_strings_(options.stop_strings),
      parser_(MakeOutputParser(options.tokenizer, options.format, options.open_channel, options.history_calls)),
      stops_(options.stop_strings) {}

OutputChannel ChoiceReader::Push(int32_t token, std::vector<OutputPiece>* pieces) {
  events_.clear();
  const bool was_in_call = in_call_;
  parser_->Append(token, &events_);
  for (OutputEvent& event : events_) Translate(event, pieces);
  if (was_in_call || in_call_) return OutputChannel::kTools;
  switch (parser_->channel()) {
    case OpenChannel::kReasoning:
      return OutputChannel::kReasoning;
    case OpenChannel::kContent:
      return OutputChannel::kContent;
    case OpenChannel::kNone:
      break;
  }
  return OutputChannel::kFormat;
}

void ChoiceReader::Finish(std::vector<OutputPiece>* pieces, std::string* undecoded) {
  if (stopped_) return;
  events_.clear();
  parser_->Finish(&events_, undecoded);
  for (OutputEvent& event : events_) Translate(event, pieces);
  FlushStops(pieces);
}

void ChoiceReader::FlushStops(std::vector<OutputPiece>* pieces) {
  std::string held;
  stops_.Flush(&held);
  if (!held.empty()) pieces->push_back(TextPiece(OutputChannel::kContent, std::move(held)));
}

void ChoiceReader::Translate(OutputEvent& event, std::vector<OutputPiece>* pieces) {
  if (stopped_) return;  // later in the same token
  switch (event.kind) {
    case OutputEvent::Kind::kReasoning:
      pieces->push_back(TextPiece(OutputChannel::kReasoning, std::move(event.text)));
      break;
    case OutputEvent::Kind::kReasoningEnd:
      break;
    case OutputEvent::Kind::kContent: {
      if (stop_strings_.empty()) {
        pieces->push_back(TextPiece(OutputChannel::kContent, std::move(event.text)));
        break;
      }
      std::string text;
      const int matched = stops_.Append(event.text, &text);
      if (!text.empty()) pieces->push_back(TextPiece(OutputChannel::kContent, std::move(text)));
      if (matched != StopStrings::kNoMatch) {
        stop_string_ = stop_strings_[static_cast<size_t>(matched)];
        stopped_ = true;
      }
      break;
    }
    case OutputEvent::Kind::kContentEnd:
      FlushStops(pieces);
      break;
    case OutputEvent::Kind::kCallBegin: {
      FlushStops(pieces);
      in_call_ = true;
      OutputPiece piece;
      piece.is_tool_call = true;
      piece.call.index = event.call;
      piece.call.id = std::move(event.call_id);
      piece.call.name = std::move(event.name);
      pieces->push_back(std::move(piece));
      break;
    }
    case OutputEvent::Kind::kCallArguments: {
      OutputPiece piece;
      piece.is_tool_call = true;
      piece.call.index = event.call;
      piece.call.arguments = std::move(event.text);
      pieces->push_back(std::move(piece));
      break;
    }
    case OutputEvent::Kind::kCallEnd:
      in_call_ = false;
      if (event.complete) ++complete_calls_;
      if (event.complete && !parallel_tool_calls_) stopped_ = true;
      break;
  }
}

}  // namespace k3
