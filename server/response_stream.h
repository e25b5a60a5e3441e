#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/engine_interface.h"
#include "engine/request.h"
#include "server/choice_reader.h"
#include "server/metrics.h"
#include "server/stream_event.h"

namespace k3 {

// One request on its way up: the engine's sink below, a queue of events for the front end above.
//
// Engine thread: the On... calls only push eight bytes a token and notify, so a slow reader never holds the engine up.
// The queue is bounded by the request's own max_new_tokens.
// Front end: Drain does the text work (detokenizing, channels, stop strings) and merges what waits for the same choice
// and channel into one event; Next takes events out. One thread at a time, any thread.
// Any thread: Cancel, Abort, SetNotify.
class ResponseStream final : public TokenSink {
 public:
  struct Options {
    AcceptedEvent accepted;  // told when the request leaves the queue; cached_tokens is filled in then
    std::vector<int32_t> eos_token_ids;
    std::vector<int32_t> prompt_tokens;                  // only when prompt log-probabilities are asked for
    std::vector<std::unique_ptr<ChoiceReader>> readers;  // one per choice
    bool token_ids = false;
    // Text is given out once this many tokens of it wait, or something else follows; 0 = at once.
    int32_t coalesce_tokens = 0;
    // A stop string or a call limit is looked for in the text, so the stream must be drained also while nothing can be
    // sent; otherwise the engine would go on for nothing.
    bool drain_eagerly = false;
    // Held until the final event is taken, or the stream goes.
    std::shared_ptr<void> lease;
    // Told once how the request ended, on whatever thread found out. May be empty.
    std::function<void(Outcome, const absl::Status&, const RequestUsage&)> on_end;
  };

  // The engine must outlive the stream.
  ResponseStream(EngineInterface* engine, Options options);
  ~ResponseStream() override;

  // Told once, when Submit has succeeded: a cancel that came before is carried out now, and tokens that came before are
  // counted. `metrics` may be null.
  void SetAccepted(RequestId id, std::unique_ptr<RequestMetrics> metrics);

  // `notify` runs when events wait, once until the next Drain, on whatever thread caused it (mostly the engine's: it
  // must return at once). Runs at once if events wait already.
  void SetNotify(std::function<void()> notify);

  // Ends the request: its client has gone. The engine frees it within one step; FinishedEvent(CANCELLED) follows.
  void Cancel();
  // The same, with this status as the final one, at once.
  void Abort(const absl::Status& status);

  // Moves what the engine has pushed into the event queue.
  void Drain();
  // The next event if one is ready to be sent.
  bool Next(StreamEvent* event);
  // Whether Next would give one.
  bool Ready() const;

  // The figures so far, or the final ones. Any thread.
  RequestUsage UsageSoFar() const;
  // The request has left the queue, or ended. Any thread.
  bool HasLeftQueue() const;

  bool drain_eagerly() const { return options_.drain_eagerly; }
  const std::string& request_id() const { return options_.accepted.request_id; }

  // TokenSink; engine thread.
  void OnAdmitted(int32_t cached_tokens) override;
  void OnPrefillProgress(int32_t done, int32_t total) override;
  void OnPromptLogprob(int32_t index, const TokenLogprob& logprob) override;
  void OnToken(int32_t choice, int32_t token, const TokenLogprob* logprob) override;
  void OnChoiceFinished(int32_t choice, FinishReason reason, int32_t stop_token) override;
  void OnFinished(const absl::Status& status, const RequestUsage& usage) override;

 private:
  enum class RawKind : uint8_t { kAdmitted, kPrefill, kPromptLogprob, kToken, kChoiceFinished, kFinished };
  struct RawEvent {
    RawKind kind;
    FinishReason reason;  // of kChoiceFinished
    uint16_t choice;
    int32_t value;  // cached tokens, prefill progress, prompt index, token, stop token
  };
  // What the engine thread and the draining thread exchange; swapped, so that both keep their capacity.
  struct Raw {
    std::vector<RawEvent> events;
    std::vector<float> logprobs;   // one per event that carries one, in order
    std::vector<TopLogprob> tops;  // top_per_token of each
    void Clear() {
      events.clear();
      logprobs.clear();
      tops.clear();
    }
  };
  struct Choice {
    std::unique_ptr<ChoiceReader> reader;
    int32_t tokens = 0;
    int32_t reasoning_tokens = 0;
    bool has_content = false;
    bool finished = false;
    uint64_t last_event = 0;  // sequence number of its latest event, 0 = none
  };

  void Push(RawEvent event, const TokenLogprob* logprob);
  void AppendLogprob(const TokenLogprob& logprob);
  // Draining thread.
  void Read(const RawEvent& event, size_t* logprob_index);
  void ReadToken(int32_t index, int32_t token, const float* logprob, const TopLogprob* top);
  void AppendPieces(int32_t index, std::vector<OutputPiece>& pieces);
  void FinishChoice(int32_t index, StopKind reason, Matched matched);
  void ReadChoiceFinished(int32_t index, FinishReason reason, int32_t stop_token);
  void ReadFinished();
  // The delta of this choice and channel that is still open, or a new one.
  DeltaEvent& OpenDelta(int32_t index, OutputChannel channel);
  void AppendRow(LogprobRows* rows, int32_t token, float logprob, const TopLogprob* top) const;
  // Once, after closed_: from then on the engine thread leaves the metrics alone.
  void ReportMetrics(bool tool_calls);

  EngineInterface* const engine_;
  Options options_;
  const int32_t top_per_token_;
  const bool logprobs_;

  mutable std::mutex mutex_;
  Raw raw_;                    // guarded by mutex_, as all up to the next blank line
  absl::Status final_status_;  // valid once closed_
  RequestUsage usage_;
  FinishReason last_reason_ = FinishReason::kCancelled;
  std::function<void()> notify_;
  bool notified_ = false;
  bool closed_ = false;  // the final event is pushed; whatever comes later is dropped
  bool cancel_requested_ = false;
  bool admitted_ = false;
  int32_t cached_tokens_ = 0;
  int32_t pushed_tokens_ = 0;
  std::unique_ptr<RequestMetrics> metrics_;
  std::vector<std::pair<int32_t, Clock::time_point>> early_tokens_;  // came before the metrics
  std::optional<RequestId> engine_id_;

  // Draining thread.
  Raw reading_;
  std::vector<Choice> choices_;
  std::vector<OutputPiece> pieces_;
  std::deque<StreamEvent> events_;
  uint64_t first_sequence_ = 1;  // of events_.front()
  bool only_reasoning_ = false;  // a choice ran into the token limit before any content
  bool finished_ = false;
};

}  // namespace k3
