#include <algorithm>
#include <chrono>

#include "server/metrics.h"

namespace k3 {
namespace {

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

const char* OutcomeName(Outcome outcome) {
  switch (outcome) {
    case Outcome::kStop:
      return "stop";
    case Outcome::kLength:
      return "length";
    case Outcome::kToolCalls:
      return "tool_calls";
    case Outcome::kRepetition:
      return "repetition";
    case Outcome::kAbort:
      return "abort";
    case Outcome::kDeadline:
      return "deadline";
    case Outcome::kError:
      return "error";
  }
  return "error";
}

Outcome OutcomeOf(const absl::Status& status, FinishReason last_reason) {
  if (absl::IsCancelled(status)) return Outcome::kAbort;
  if (absl::IsDeadlineExceeded(status)) return Outcome::kDeadline;
  if (!status.ok()) return Outcome::kError;
  switch (last_reason) {
    case FinishReason::kStop:
      return Outcome::kStop;
    case FinishReason::kLength:
      return Outcome::kLength;
    case FinishReason::kRepetition:
      return Outcome::kRepetition;
    case FinishReason::kCancelled:
      return Outcome::kAbort;
    case FinishReason::kError:
      return Outcome::kError;
  }
  return Outcome::kError;
}

RequestMetrics::RequestMetrics(Metrics* metrics, int32_t prompt_tokens, int32_t num_choices, Clock::time_point arrival)
    : metrics_(metrics),
      prompt_tokens_(prompt_tokens),
      arrival_(arrival),
      last_token_(static_cast<size_t>(std::max(1, num_choices)), arrival) {}

RequestMetrics::~RequestMetrics() {
  if (finished_) return;
  RequestUsage usage;
  usage.completion_tokens = tokens_;
  OnFinished(Outcome::kError, usage);
}

void RequestMetrics::OnToken(int32_t choice, Clock::time_point now) {
  if (finished_ || choice < 0 || static_cast<size_t>(choice) >= last_token_.size()) return;
  Clock::time_point& last = last_token_[static_cast<size_t>(choice)];
  if (tokens_ == 0) {
    metrics_->time_to_first_token_.Observe(Seconds(now - arrival_));
  } else if (last != arrival_) {
    metrics_->inter_token_latency_.Observe(Seconds(now - last));
  }
  last = now;
  ++tokens_;
  metrics_->generation_tokens_.Increment();
}

void RequestMetrics::OnNoContent() { metrics_->replies_without_content_.Increment(); }

void RequestMetrics::OnFinished(Outcome outcome, const RequestUsage& usage, Clock::time_point now) {
  if (finished_) return;
  finished_ = true;
  const int32_t generated = std::max(tokens_, usage.completion_tokens);
  metrics_->generation_tokens_.Increment(static_cast<double>(generated - tokens_));
  metrics_->request_prompt_tokens_.Observe(prompt_tokens_);
  metrics_->request_generation_tokens_.Observe(generated);
  metrics_->e2e_request_latency_.Observe(Seconds(now - arrival_));
  metrics_->queue_time_.Observe(usage.queue_seconds);
  // Phases that the request never reached have no sample, not a zero one.
  if (usage.prefill_seconds > 0) metrics_->prefill_time_.Observe(usage.prefill_seconds);
  if (generated > 0) metrics_->decode_time_.Observe(usage.decode_seconds);
  metrics_->requests_finished_[static_cast<size_t>(outcome)]->Increment();
}

}  // namespace k3
