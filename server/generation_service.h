#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/generation_request.h"
#include "server/health.h"
#include "server/metrics.h"
#include "server/request_batch.h"
#include "server/request_prompt.h"
#include "server/response_stream.h"
#include "server/served_model.h"
#include "server/span_exporter.h"
#include "server/trace_context.h"
#include "server/worker_pool.h"

namespace k3 {

// `prefix` and 24 random hex digits.
std::string MakeRequestId(const std::string& prefix);

// The one path from a client's wish to the engine: both front ends call it, so that no feature exists on one side only.
// It checks all that a client can get wrong, fills in the model's and the server's defaults, turns chat and text into
// token ids and opens a ResponseStream. Thread-safe.
//
// Errors carry ErrorDetails with paths as in GenerationSpec: INVALID_ARGUMENT, NOT_FOUND (model), FAILED_PRECONDITION
// (never fits the pools), RESOURCE_EXHAUSTED (queue full, deadline out of reach), UNAVAILABLE (loading, draining),
// UNIMPLEMENTED, DEADLINE_EXCEEDED (already passed).
class GenerationService {
 public:
  struct Options {
    std::string default_effort;  // low, high, max, none; empty: the model's own
    std::optional<Clock::duration> request_timeout;
    bool vendor_strict = false;
    std::optional<Clock::duration> queue_timeout;  // longest wait for the first slot
    std::optional<int64_t> max_streams_per_key;    // requests in progress of one API key
    SpanExporter* spans = nullptr;                 // outlives the service; null: no traces leave the process
    int text_threads = 2;                          // encode large prompts
    size_t max_queued_prompts = 256;               // large prompts waiting for them
    size_t max_queued_bytes = size_t{1} << 30;     // text of these and of those being encoded
  };

  // Set by the front end when its client goes away before the stream exists; work not yet begun is then skipped.
  using CancelFlag = std::shared_ptr<std::atomic<bool>>;
  using StartDone = std::function<void(absl::StatusOr<std::shared_ptr<ResponseStream>>)>;

  // `health` must outlive the service; `metrics` too, and may be null. Streams and the engine end before the service.
  GenerationService(Options options, ServerHealth* health, Metrics* metrics);
  ~GenerationService();

  // The model is loaded. Before, every call is UNAVAILABLE.
  void Install(std::shared_ptr<const ServedModel> model);
  // Null while loading.
  std::shared_ptr<const ServedModel> model() const;

  // Calls `done` exactly once: on this thread for a small prompt, else on a text thread. The stream then gets exactly
  // one final event, whatever happens.
  void Start(GenerationRequest request, const CancelFlag& cancelled, StartDone done,
             std::shared_ptr<RequestBatch> batch = nullptr);

  // For a client's request of several prompts, each of which is then started with it: what was let in is finished, also
  // when a drain begins in between. Null when nobody is let in now. Counts in active() until it is released, which must
  // be before the service ends.
  std::shared_ptr<RequestBatch> OpenBatch(Clock::time_point arrival);

  // The trace that a `traceparent` header names; begins one where traces are exported.
  TraceContext TraceOf(std::string_view traceparent) const {
    return ContinueTrace(traceparent, options_.spans != nullptr);
  }

  // Ends requests that have waited in the queue for longer than Options::queue_timeout. Called now and then.
  void EndOverdue();

  // For what a front end refuses by itself: it counts like a refusal of Start.
  void CountRefusal(const absl::Status& status);

  // Text work without a run. `done` as for Start.
  using IdsDone = std::function<void(absl::StatusOr<std::vector<int32_t>>)>;
  // Prompt ids of a request: exactly those that Start would run. Only model, input, reasoning and constraint count.
  void Render(GenerationRequest request, IdsDone done);
  void Tokenize(std::string model, std::string text, bool control_tokens, IdsDone done);
  // The bytes of the ids. INVALID_ARGUMENT names an id outside the vocabulary.
  absl::StatusOr<std::string> Detokenize(const std::string& model, const std::vector<uint32_t>& ids,
                                         bool skip_control_tokens) const;

  // Requests accepted whose final event is not yet taken, and open batches.
  size_t active() const;
  // Text of large prompts that waits to be encoded or is.
  size_t queued_bytes() const { return queued_bytes_.load(); }
  // Ends all of them with this status.
  void AbortAll(const absl::Status& status);

 private:
  struct Prepared;
  // Where a request comes from.
  struct Origin {
    Clock::time_point arrival;
    std::shared_ptr<RequestBatch> batch;  // null: it is its client's only one
  };
  struct InProgress {
    std::weak_ptr<ResponseStream> stream;
    Origin origin;
  };

  // Counts a stream of this caller and gives its key; RESOURCE_EXHAUSTED when the caller has too many. The lease ends
  // the count.
  absl::StatusOr<uint64_t> OpenStream(uint64_t caller, const Origin& origin, std::shared_ptr<void>* lease);
  RequestSpan SpanOf(const GenerationRequest& request, Clock::time_point arrival) const;

  absl::StatusOr<std::shared_ptr<const ServedModel>> ModelFor(const std::string& name) const;
  PromptDefaults prompt_defaults() const { return {options_.default_effort, options_.vendor_strict}; }
  absl::StatusOr<Prepared> Prepare(GenerationRequest& request, const CancelFlag& cancelled, const Origin& origin) const;
  // Prepares, waits for the grammar if there is one, submits.
  void StartNow(const std::shared_ptr<GenerationRequest>& request, const CancelFlag& cancelled, const Origin& origin,
                const StartDone& done);
  absl::StatusOr<std::shared_ptr<ResponseStream>> Submit(const ServedModel& model, GenerationRequest& request,
                                                         EffectiveSampling effective, RequestPrompt prompt,
                                                         std::vector<std::unique_ptr<TokenConstraint>> constraints,
                                                         const Origin& origin);
  // Runs `work` here, or on a text thread when `bytes` of text would hold this thread up.
  void RunTextWork(size_t bytes, std::function<void()> work, const std::function<void(absl::Status)>& refuse);

  const Options options_;
  ServerHealth* const health_;
  Metrics* const metrics_;

  mutable std::mutex mutex_;
  std::shared_ptr<const ServedModel> model_;                  // guarded by mutex_, as the next three
  std::unordered_map<uint64_t, InProgress> streams_;          // accepted, final event not yet taken
  std::unordered_map<uint64_t, int64_t> streams_per_caller_;  // of these
  uint64_t next_stream_ = 0;
  std::atomic<size_t> open_batches_{0};

  std::atomic<size_t> queued_bytes_{0};
  WorkerPool text_pool_;  // ends first: its tasks use all of the above
};

}  // namespace k3
