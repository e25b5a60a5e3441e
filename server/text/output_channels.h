#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/text/output_parser.h"
#include "server/text/utf8.h"

namespace k3 {

// What the parsers of all formats share: turning bytes into events of the channel they belong to. A parser keeps one of
// these per place that text can go to, so that a half character never mixes with another place's text.
class OutputChannels {
 public:
  explicit OutputChannels(int32_t history_calls) : next_ordinal_(history_calls) {}

  // All methods append to this list; set for the duration of one call of the parser.
  void set_events(std::vector<OutputEvent>* events) { events_ = events; }

  void Reasoning(std::string_view bytes) { Decode(OutputEvent::Kind::kReasoning, bytes); }
  void Content(std::string_view bytes) { Decode(OutputEvent::Kind::kContent, bytes); }

  // The channel's text is over: its half character, if any, is replaced.
  void Flush(OutputEvent::Kind kind) {
    std::string text;
    stream_.Flush(&text);
    if (!text.empty()) Emit(kind).text = std::move(text);
  }

  void EndReasoning() {
    Flush(OutputEvent::Kind::kReasoning);
    Emit(OutputEvent::Kind::kReasoningEnd);
  }
  void EndContent() {
    Flush(OutputEvent::Kind::kContent);
    Emit(OutputEvent::Kind::kContentEnd);
  }

  // `id_prefix` and the call's ordinal in the conversation make the id.
  void BeginCall(std::string name, std::string_view id_prefix) {
    ++call_;
    OutputEvent& event = Emit(OutputEvent::Kind::kCallBegin);
    event.call = call_;
    event.call_id = absl::StrCat(std::string(id_prefix), next_ordinal_++);
    event.name = std::move(name);
  }
  void Arguments(std::string text) {
    if (text.empty()) return;
    OutputEvent& event = Emit(OutputEvent::Kind::kCallArguments);
    event.call = call_;
    event.text = std::move(text);
  }
  void EndCall(bool complete) {
    OutputEvent& event = Emit(OutputEvent::Kind::kCallEnd);
    event.call = call_;
    event.complete = complete;
  }

  // At the end of the output: takes the half character out, so that nothing is left to replace.
  void TakeUndecoded(std::string* undecoded) {
    if (undecoded == nullptr) return;
    *undecoded = stream_.pending();
    stream_ = Utf8Stream();
  }

  // For argument text, which needs work between decoding and emission.
  Utf8Stream& stream() { return stream_; }

 private:
  OutputEvent& Emit(OutputEvent::Kind kind) {
    OutputEvent& event = events_->emplace_back();
    event.kind = kind;
    return event;
  }

  void Decode(OutputEvent::Kind kind, std::string_view bytes) {
    std::string text;
    stream_.Append(bytes, &text);
    if (!text.empty()) Emit(kind).text = std::move(text);
  }

  std::vector<OutputEvent>* events_ = nullptr;
  Utf8Stream stream_;
  int call_ = -1;
  int32_t next_ordinal_;
};

// Tokens that end or pad an answer and are no text in it: the stop ids, beginning of text, padding.
inline bool IsSilentToken(const Tokenizer& tokenizer, int32_t id) {
  const std::vector<int32_t>& stops = tokenizer.stop_ids();
  return std::find(stops.begin(), stops.end(), id) != stops.end() || id == tokenizer.bos_id() ||
         id == tokenizer.pad_id();
}

}  // namespace k3
