#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/stream_event.h"
#include "server/text/chat_renderer.h"
#include "server/text/tokenizer.h"

namespace k3 {

// One piece of what a token completed: text of a channel, or a part of a tool call.
struct OutputPiece {
  OutputChannel channel = OutputChannel::kContent;
  std::string text;
  bool is_tool_call = false;
  ToolCallEvent call;  // without the choice
};

// Turns the tokens of one choice into pieces of its output: detokenizes, splits channels, looks for stop strings. One
// per choice; used by one thread at a time.
class ChoiceReader {
 public:
  virtual ~ChoiceReader() = default;
  // Reads one token, appends what it completes, and says which channel the token belongs to.
  virtual OutputChannel Push(int32_t token, std::vector<OutputPiece>* pieces) = 0;
  // The choice has ended: releases what was held back. `undecoded` gets the bytes of a character that was cut in half.
  virtual void Finish(std::vector<OutputPiece>* pieces, std::string* undecoded) = 0;
  // The text itself ended the choice (a stop string, or the one tool call allowed). No Push after that.
  virtual bool Stopped() const = 0;
  // The stop string; empty when something else ended it.
  virtual const std::string& stop_string() const = 0;
  // Complete tool calls so far.
  virtual int32_t complete_calls() const = 0;
};

struct ChoiceReaderOptions {
  std::shared_ptr<const Tokenizer> tokenizer;
  ChatFormat format = ChatFormat::kNone;  // kNone: all of it is content, control tokens shown by name
  OpenChannel open_channel = OpenChannel::kNone;
  int32_t history_calls = 0;
  std::vector<std::string> stop_strings;  // looked for in content only
  bool parallel_tool_calls = true;
};

std::unique_ptr<ChoiceReader> MakeChoiceReader(const ChoiceReaderOptions& options);

}  // namespace k3
