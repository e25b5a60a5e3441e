#include "engine/load_estimator.h"

#include <algorithm>

namespace k3 {
namespace {

constexpr double kForget = 1.01;  // per step: how fast an old best rate gives way

}  // namespace

void LoadEstimator::OnStep(const StepStats& stats, const Scheduler::Backlog& backlog, const EngineLoad& load,
                           Clock::time_point now) {
  if (stats.prefill_tokens > 0 && stats.seconds > 0) {
    prefill_rate_ = std::max(prefill_rate_ / kForget, stats.prefill_tokens / stats.seconds);
  } else if (stats.tokens > 0) {
    decode_seconds_ = decode_seconds_ > 0 ? std::min(decode_seconds_ * kForget, stats.seconds) : stats.seconds;
  }
  if (backlog.finished != finished_) {
    if (backlog.full && finished_at_ != Clock::time_point{}) {
      const double interval =
          std::chrono::duration<double>(now - finished_at_).count() / static_cast<double>(backlog.finished - finished_);
      finish_interval_ = finish_interval_ > 0 ? 0.9 * finish_interval_ + 0.1 * interval : interval;
    }
    finished_ = backlog.finished;
    finished_at_ = now;
  }
  if (load.prefix_query_tokens > 0) {
    hit_share_ = static_cast<double>(load.prefix_hit_tokens) / static_cast<double>(load.prefix_query_tokens);
  }
  backlog_ = backlog;
}

double LoadEstimator::QueueSeconds() const {
  const double prefill =
      prefill_rate_ > 0 ? (1 - hit_share_) * static_cast<double>(backlog_.prompt_tokens) / prefill_rate_ : 0;
  const double slots = backlog_.full ? finish_interval_ * (backlog_.queued + 1) : 0;
  return std::max(prefill, slots);
}

double LoadEstimator::SecondsNeeded(const Request& request) const {
  const SamplingParams& sampling = request.sampling;
  const double prompt = static_cast<double>(request.prompt_tokens.size());
  const double prefill = prefill_rate_ > 0 ? (1 - hit_share_) * prompt / prefill_rate_ : 0;
  const int32_t tokens = sampling.ignore_eos && sampling.stop_token_ids.empty() ? sampling.max_new_tokens
                                                                                : std::max(1, sampling.min_new_tokens);
  return QueueSeconds() + prefill + decode_seconds_ * std::max(0, tokens - 1);
}

}  // namespace k3
