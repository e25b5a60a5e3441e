#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "engine/request.h"

// What a front end sends to its client, in neutral form.
namespace k3 {

enum class OutputChannel : uint8_t {
  kFormat,  // tokens of the chat format itself; they have no text
  kContent,
  kReasoning,
  kTools,  // tokens of tool calls; their text comes as ToolCallPiece
};

// The parameters in force, defaults filled in.
struct EffectiveSampling {
  SamplingParams params;
  int32_t num_choices = 1;
};

// The request has left the queue. First event, unless the request ends before.
struct AcceptedEvent {
  std::string request_id;
  std::string model;
  std::string weights_version;
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;
  int32_t opening_tokens = 0;  // at the prompt's end: they only open the reply's channel
  EffectiveSampling effective;
  std::vector<int32_t> prompt_ids;  // only with prompt log-probabilities or token ids asked for
};

struct PrefillEvent {
  int32_t done = 0;
  int32_t total = 0;
};

// Log-probabilities of consecutive tokens; `top` holds top_per_token entries for each, best first, padded with token
// -1.
struct LogprobRows {
  std::vector<int32_t> token_ids;
  std::vector<float> logprobs;
  int32_t top_per_token = 0;
  std::vector<TopLogprob> top;
};

struct PromptLogprobsEvent {
  LogprobRows rows;
};

// A piece of one choice. The pieces of a choice join to its whole text, channel by channel; their token ids join to all
// that was generated.
struct DeltaEvent {
  int32_t choice = 0;
  OutputChannel channel = OutputChannel::kContent;
  std::string text;                // valid UTF-8
  int32_t tokens = 0;              // generated tokens that this piece accounts for
  std::vector<int32_t> token_ids;  // when asked for
  LogprobRows logprobs;            // when asked for
  std::string undecoded;           // at the end of a choice: bytes of a character that was cut in half
};

// A piece of one tool call: id and name with the first, then arguments, which join to a JSON object.
struct ToolCallEvent {
  int32_t choice = 0;
  int32_t index = 0;  // in order of appearance, from 0
  std::string id;
  std::string name;
  std::string arguments;
};

enum class StopKind { kStop, kLength, kToolCalls, kRepetition };

// What ended a choice with kStop.
struct MatchedNothing {};
struct MatchedEos {};
struct MatchedToken {
  int32_t token;
};
struct MatchedString {
  std::string text;
};
using Matched = std::variant<MatchedNothing, MatchedEos, MatchedToken, MatchedString>;

struct ChoiceFinishedEvent {
  int32_t choice = 0;
  StopKind reason = StopKind::kStop;
  Matched matched;
  int32_t completion_tokens = 0;
};

// Last event, exactly once. The usage is what was computed, also when the status is an error.
struct FinishedEvent {
  absl::Status status;
  RequestUsage usage;
  int32_t reasoning_tokens = 0;
};

using StreamEvent = std::variant<AcceptedEvent, PrefillEvent, PromptLogprobsEvent, DeltaEvent, ToolCallEvent,
                                 ChoiceFinishedEvent, FinishedEvent>;

}  // namespace k3
