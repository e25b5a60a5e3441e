#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

// The engine's whole public vocabulary: what a front end hands in and what it gets back. Token ids only, no text.
namespace k3 {

using RequestId = uint64_t;
using Clock = std::chrono::steady_clock;

// Restricts the next token, e.g. to a grammar. Owned by one choice of one request; called on the engine thread only, so
// both calls must be fast (microseconds).
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // Writes one bit per vocabulary id (bit i of word i/32; set = allowed). Returns false when every id is allowed and
  // the mask was left alone.
  virtual bool FillMask(std::span<uint32_t> mask) = 0;
  // Told each token after it was chosen. Returns false when the token is impossible here (a bug or a forced token).
  virtual bool Accept(int32_t token) = 0;
  // A fresh copy at the start state, for another choice of the same request or for recomputation.
  virtual std::unique_ptr<TokenConstraint> Fork() const = 0;
};

// Limits of a request for which every step has room.
inline constexpr int kMaxTopLogprobs = 20;
inline constexpr int kMaxChoices = 128;

struct SamplingParams {
  float temperature = 1.0f;         // 0 = greedy, ties to the lowest id
  float top_p = 1.0f;               // (0, 1]
  int32_t top_k = 0;                // 0 = off
  float min_p = 0.0f;               // [0, 1)
  float presence_penalty = 0.0f;    // generated tokens only
  float frequency_penalty = 0.0f;   // generated tokens only
  float repetition_penalty = 1.0f;  // prompt and generated tokens
  uint64_t seed = 0;  // always resolved by the front end; the stream depends on (seed, choice, position) only
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<int32_t> banned_ids;
  std::vector<int32_t> allowed_ids;  // empty = all

  int32_t max_new_tokens = 16;  // >= 0; 0 only together with prompt_logprobs
  int32_t min_new_tokens = 0;   // stop tokens are banned before this many
  bool ignore_eos = false;
  std::vector<int32_t> stop_token_ids;  // besides the model's own
  // Ends the choice with kRepetition when its last tokens are `repetition_count` copies of one period of at most
  // `repetition_max_period` tokens. 0 = off.
  int32_t repetition_max_period = 0;
  int32_t repetition_count = 0;

  int32_t top_logprobs = -1;  // -1: no log-probabilities; 0: of the chosen token; n <= 20: n best besides
  bool prompt_logprobs =
      false;  // also for every prompt token after the first; such a prompt is recomputed, not resumed
};

// Immutable after Submit; owns its tokens and shares its sink.
class TokenSink;
struct Request {
  std::string external_id;             // for logs: x-request-id
  std::vector<int32_t> prompt_tokens;  // at least one
  SamplingParams sampling;
  int32_t num_choices = 1;  // n: share the prompt's pages and state
  int32_t priority = 0;     // higher runs sooner
  std::string session_id;   // fairness across sessions; empty = its own session
  std::string cache_salt;   // prefix-cache entries are shared only under equal salts
  bool bypass_prefix_cache = false;
  std::optional<Clock::time_point> deadline;
  std::vector<std::unique_ptr<TokenConstraint>> constraints;  // empty, or one per choice
  std::shared_ptr<TokenSink> sink;
};

enum class FinishReason : uint8_t {
  kStop,    // a stop token, or the front end's stop string (see Engine::StopChoice)
  kLength,  // max_new_tokens, or the context limit
  kRepetition,
  kCancelled,
  kError,  // e.g. non-finite logits
};

struct TopLogprob {
  int32_t token = 0;
  float logprob = 0;
};

struct TokenLogprob {
  float logprob = 0;
  std::span<const TopLogprob> top;  // best first; valid during the call only
};

struct RequestUsage {
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;      // resumed from, not recomputed
  int32_t completion_tokens = 0;  // over all choices
  int32_t preemptions = 0;
  double queue_seconds = 0;
  double prefill_seconds = 0;
  double decode_seconds = 0;
  // The bias epoch of the routers that it was computed under, and whose: 0 is no bias (see quantile_control.h).
  int32_t routing_rank = -1;  // -1: experts are chosen exactly
  uint64_t routing_epoch = 0;
};

// Receives everything that happens to one accepted request. All calls come from the engine thread, in order, and must
// not block: push and return. After OnFinished no further call comes.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  // The request got its first slot and pages; `cached_tokens` of its prompt are resumed from the prefix cache. At most
  // once (not repeated after preemption).
  virtual void OnAdmitted(int32_t cached_tokens) { (void)cached_tokens; }
  virtual void OnPrefillProgress(int32_t done, int32_t total) { (void)done, (void)total; }
  // Log-probability of prompt token `index` (>= 1) given the tokens before it, in ascending order.
  virtual void OnPromptLogprob(int32_t index, const TokenLogprob& logprob) { (void)index, (void)logprob; }
  // A generated token, stop tokens included. `logprob` is null unless asked for.
  virtual void OnToken(int32_t choice, int32_t token, const TokenLogprob* logprob) = 0;
  // Exactly once per choice. `stop_token` is the id that ended it, or -1.
  virtual void OnChoiceFinished(int32_t choice, FinishReason reason, int32_t stop_token) = 0;
  // Exactly once, last. OK when every choice ended by kStop, kLength or kRepetition; CANCELLED, DEADLINE_EXCEEDED,
  // INTERNAL, UNAVAILABLE otherwise.
  virtual void OnFinished(const absl::Status& status, const RequestUsage& usage) = 0;
};

}  // namespace k3
