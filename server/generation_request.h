#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "engine/request.h"
#include "server/text/chat_types.h"
#include "server/trace_context.h"

// What a client asks for, in neutral form: both front ends fill one in and hand it to GenerationService. Absent values
// are filled in there; nothing here is checked yet. The members mirror GenerationSpec of the gRPC contract, whose field
// names error messages use as paths.
namespace k3 {

// A piece of a raw prompt; pieces are encoded one by one and their ids joined.
struct PromptSegment {
  std::variant<std::string, std::vector<uint32_t>> part;
  bool control_tokens = false;  // spellings of control tokens in the text become those tokens
};

struct RequestedSampling {
  std::optional<float> temperature;
  std::optional<float> top_p;
  std::optional<uint32_t> top_k;
  std::optional<float> min_p;
  std::optional<float> presence_penalty;
  std::optional<float> frequency_penalty;
  std::optional<float> repetition_penalty;
  std::optional<uint64_t> seed;
  std::optional<uint32_t> n;
  std::vector<std::pair<uint32_t, float>> logit_bias;
};

struct RequestedStopping {
  std::optional<uint32_t> max_new_tokens;
  uint32_t max_new_tokens_if_absent = 0;  // then at most this many, as far as there is room; 0: all the room
  std::optional<uint32_t> min_new_tokens;
  std::vector<std::string> stop;
  std::vector<uint32_t> stop_token_ids;
  bool ignore_eos = false;
  uint32_t repetition_max_period = 0;
  uint32_t repetition_count = 0;
};

// What the reply must look like.
struct RequestedConstraint {
  enum class Kind { kNone, kJsonSchema, kRegex, kEbnf, kJsonObject, kStructuralTag };
  Kind kind = Kind::kNone;
  std::string text;
  std::string path;    // the client's name for it; empty: the member of GenerationSpec
  bool strict = true;  // of a schema: refuse what cannot be enforced instead of ignoring it
};

struct RequestedReasoning {
  std::optional<bool> enabled;
  std::optional<Effort> effort;  // absent: --default-effort
  bool keep_history = true;
  std::optional<uint32_t> token_budget;
};

struct RequestedOutput {
  bool token_ids = false;
  std::optional<uint32_t> top_logprobs;
  bool has_logprob_token_ids = false;
  bool prompt_logprobs = false;
  uint32_t prompt_copies = 1;  // how often the reply repeats the prompt's log-probabilities
  uint32_t coalesce_tokens = 0;
};

struct RequestedCache {
  std::string salt;
  bool bypass = false;
  bool has_pin_name = false;
};

struct GenerationRequest {
  using Input = std::variant<std::monostate, ChatRequest, std::vector<PromptSegment>, std::vector<uint32_t>>;

  std::string request_id;  // set by the front end: the client's, or MakeRequestId
  std::string model;       // empty: the served model
  // Of a chat, `options` holds tool choice only: reasoning and response format follow from the members below.
  Input input;
  bool parallel_tool_calls = true;  // false: the reply ends after one complete call
  RequestedSampling sampling;
  RequestedStopping stopping;
  RequestedConstraint constraint;
  RequestedReasoning reasoning;
  RequestedOutput output;
  RequestedCache cache;
  int32_t priority = 0;
  std::string session_id;
  std::optional<Clock::time_point> deadline;
  uint64_t caller = 0;       // stands for the API key; 0: none is required
  bool comes_again = false;  // refused for want of room the front end tries it again, and counts what it gives up
  TraceContext trace;
};

}  // namespace k3
