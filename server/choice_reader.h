#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/stream_event.h"
#include "server/text/chat_renderer.h"
#include "server/text/output_parser.h"
#include "server/text/stop_strings.h"
#include "server/text/tokenizer.h"

namespace k3 {

// One piece of what a token completed: text of a channel, or a part of a tool call.
struct OutputPiece {
  OutputChannel channel = OutputChannel::kContent;
  std::string text;
  bool is_tool_call = false;
  ToolCallEvent call;  // without the choice
};

// Turns the tokens of one choice into pieces of its output: channels and tool calls by the model's format, and stop
// strings, which are looked for in content only. Used by one thread at a time.
class ChoiceReader {
 public:
  struct Options {
    std::shared_ptr<const Tokenizer> tokenizer;
    ChatFormat format = ChatFormat::kNone;  // kNone: all of it is content
    OpenChannel open_channel = OpenChannel::kNone;
    int32_t history_calls = 0;
    std::vector<std::string> stop_strings;
    bool parallel_tool_calls = true;  // false: the first complete call ends the choice
  };
  explicit ChoiceReader(const Options& options);

  // Reads one token, appends what it completes, and says which channel the token belongs to. Not after stopped().
  OutputChannel Push(int32_t token, std::vector<OutputPiece>* pieces);
  // The choice has ended: releases what was held back. `undecoded` gets the bytes of a character that was cut in half.
  void Finish(std::vector<OutputPiece>* pieces, std::string* undecoded);

  // The text itself ended the choice: a stop string, or the one tool call allowed.
  bool stopped() const { return stopped_; }
  // The stop string; empty when something else ended the choice.
  const std::string& stop_string() const { return stop_string_; }
  // Complete tool calls so far.
  int32_t complete_calls() const { return complete_calls_; }

 private:
  void Translate(OutputEvent& event, std::vector<OutputPiece>* pieces);
  void FlushStops(std::vector<OutputPiece>* pieces);

  const bool parallel_tool_calls_;
  const std::vector<std::string> stop_strings_;
  std::unique_ptr<OutputParser> parser_;
  StopStrings stops_;
  std::vector<OutputEvent> events_;
  std::string stop_string_;
  int32_t complete_calls_ = 0;
  bool in_call_ = false;
  bool stopped_ = false;
};

}  // namespace k3
