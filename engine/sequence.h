#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/cache/cache_manager.h"
#include "engine/repetition_detector.h"
#include "engine/request.h"
#include "engine/sampler.h"

namespace k3 {

struct LiveRequest;

enum class SequencePhase : uint8_t {
  kQueued,     // never admitted; its request is in the AdmissionQueue, or it is a later choice whose prompt another
               // computes
  kForking,    // has its first token; takes over a copy of the prompt's pages and state when the next step is planned
  kRunning,    // holds a lease
  kPreempted,  // gave up its lease; recomputes when there is room
  kFinished,
};

// One choice of an accepted request: its tokens and how far they are computed. Engine thread only.
//   computed <= tokens.size(); tokens[0, computed) are in the lease once all planned steps have run.
// Planning a step advances `computed` at once and appends what the step will draw as a TokenOfRow; the commit puts the
// token in its place. So everything that is planned meanwhile sees lengths and positions as they will be.
struct Sequence {
  LiveRequest* request = nullptr;
  int32_t choice = 0;
  SequencePhase phase = SequencePhase::kQueued;

  std::vector<int32_t> tokens;  // prompt, then generated; empty before the first admission
  int32_t unknown = 0;          // of them at the end, drawn by steps that are not committed yet
  int32_t prompt_length = 0;
  int32_t length_limit = 0;  // ends with kLength when it holds this many tokens
  int32_t computed = 0;
  int32_t rank = -1;
  uint64_t admission = 0;  // order of first admission: "newest first" when pages run out
  CacheLease lease;
  uint32_t leases = 0;                // how many it has had: tells a step's results which one they were computed for
  std::vector<uint64_t> page_hashes;  // ChainHash of each full page of tokens that was asked for so far

  Sampler sampler;
  RepetitionDetector repetition;
  int32_t divergence = 0;     // a cached page run outlived its last snapshot here; 0 = no such place
  int32_t prompt_scores = 1;  // prompt log-probabilities below this index were reported
  bool streams_prompt_scores = false;

  // Of the step being planned.
  int32_t planned = 0;  // tokens

  // Before first admission: copies the prompt, sets up sampling. Does nothing the second time.
  void Begin(const std::vector<int32_t>& eos, int32_t vocab_size, int64_t pool_tokens);
  void ExtendHashes(int32_t page_size);
  // Makes room in the lists for the tokens that Begin made room for, so that decoding does not allocate.
  void ReservePages(int32_t page_size);
  PrefixKey Key() const;

  int32_t remaining() const { return static_cast<int32_t>(tokens.size()) - computed; }
  // Tokens whose ids are known.
  int32_t known() const { return static_cast<int32_t>(tokens.size()) - unknown; }
  // Its next step computes one token and samples the next.
  bool decoding() const { return remaining() == 1 && static_cast<int32_t>(tokens.size()) > prompt_length; }
  // Whatever the steps in flight draw, nothing is left to compute: their commit ends it.
  bool ending() const {
    return remaining() == 0 || (unknown > 0 && static_cast<int32_t>(tokens.size()) >= length_limit);
  }
};

// Why a repetition of a prefix hit from scratch is compared with the hit (EngineConfig::verify_hits).
struct HitCheck {
  int32_t token = 0;
  float logprob = 0;
};

// An accepted request, from Submit to its final event. Owned by the Scheduler. Engine thread only.
struct LiveRequest {
  RequestId id = 0;
  std::unique_ptr<Request> request;
  Clock::time_point arrival;
  Clock::time_point admitted_at;  // first admission
  Clock::time_point first_token_at;
  bool admitted = false;
  bool has_first_token = false;
  bool finished = false;

  std::vector<Sequence> choices;  // never resized after Submit: pointers to them stay valid
  int32_t source = 0;             // the choice that computes the prompt until `forked`
  bool forked = false;            // the prompt is computed and every choice has its first token
  int32_t open_choices = 0;
  int32_t running = 0;  // choices with a lease
  int64_t backlog = 0;  // its part of Scheduler::Backlog::prompt_tokens
  RequestUsage usage;
  int32_t prefill_reported = 0;

  std::string broken;  // why the request must end although nobody asked: its sink or constraint failed
  bool sink_failed = false;

  // The bias epoch of the routers that everything of it is computed under: that of a rank, from first admission to the
  // end, also when it is preempted meanwhile.
  struct PinnedEpoch {
    int32_t rank = -1;  // -1: not pinned yet
    int32_t slot = 0;
    uint64_t number = 0;
  } epoch;

  bool check_hit = false;  // sampled for verify_hits
  bool is_shadow = false;  // recomputes another request's hit; has no sink and counts nowhere
  HitCheck expected;       // shadow: what the hit gave

  // Place in the AdmissionQueue.
  struct Ticket {
    bool queued = false;
    int32_t level = 0;
    bool long_prompt = false;
    double tag = 0;
    uint64_t order = 0;
  } ticket;

  const SamplingParams& sampling() const { return request->sampling; }
  TokenConstraint* constraint(int32_t choice) const {
    return request->constraints.empty() ? nullptr : request->constraints[static_cast<size_t>(choice)].get();
  }
  bool caches() const { return !request->bypass_prefix_cache && !is_shadow; }
};

// Runs `call` on the request's sink. A sink that throws gets nothing more except its final event, and its request is
// ended by the next commit; nobody else notices.
template <typename Call>
void Notify(LiveRequest& live, Call&& call) {
  if (live.is_shadow || live.sink_failed) return;
  try {
    call(*live.request->sink);
  } catch (const std::exception& error) {
    live.sink_failed = true;
    live.broken = std::string("the token sink threw: ") + error.what();
  } catch (...) {
    live.sink_failed = true;
    live.broken = "the token sink threw";
  }
}

}  // namespace k3
