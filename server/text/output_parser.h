#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/text/chat_renderer.h"
#include "server/text/tokenizer.h"

namespace k3 {

// Something that a generated token made known. Text is valid UTF-8 and comes in the order of generation.
struct OutputEvent {
  enum class Kind : uint8_t {
    kReasoning,      // text
    kReasoningEnd,   // the model left its reasoning
    kContent,        // text
    kContentEnd,     // the model left its answer
    kCallBegin,      // call, call_id, name
    kCallArguments,  // call, text: a piece of a JSON object
    kCallEnd,        // call, complete
  };

  Kind kind;
  std::string text;
  int call = -1;  // tool calls are numbered from 0 as they come, whatever numbers the model writes
  std::string call_id;
  std::string name;
  bool complete = false;  // false: cut off, the arguments are no whole JSON

  bool operator==(const OutputEvent&) const = default;
};

// Reads a model's answer token by token. Works on ids: markers are single tokens, so that their spelling in an answer's
// text stays text. Never scans back; one per choice of a request.
class OutputParser {
 public:
  virtual ~OutputParser() = default;

  // Appends what `id` made known; nothing while a character or a marker is incomplete.
  virtual void Append(int32_t id, std::vector<OutputEvent>* events) = 0;

  // At the end of the output, whatever ended it: half markers vanish, an open tool call is reported as incomplete, and
  // the bytes of a half character go to `undecoded`, or, when that is null, become one U+FFFD. Nothing may be appended
  // afterwards.
  virtual void Finish(std::vector<OutputEvent>* events, std::string* undecoded = nullptr) = 0;

  // Where the last token stood: reasoning, content, or kNone for tool calls, markers and what lies between channels.
  virtual OpenChannel channel() const = 0;
};

// The parser for answers to a rendered prompt: it continues in the channel that the prompt left open and counts tool
// calls from the history's. kNone gives a parser for raw prompts: all text is content.
std::unique_ptr<OutputParser> MakeOutputParser(std::shared_ptr<const Tokenizer> tokenizer, ChatFormat format,
                                               OpenChannel open_channel, int32_t history_calls);

// A whole answer, from events.
struct ParsedOutput {
  struct Call {
    std::string id;
    std::string name;
    std::string arguments;
    bool complete = false;

    bool operator==(const Call&) const = default;
  };

  std::string reasoning;
  std::string content;
  std::vector<Call> calls;

  void Add(const OutputEvent& event);
  bool operator==(const ParsedOutput&) const = default;
};

}  // namespace k3
