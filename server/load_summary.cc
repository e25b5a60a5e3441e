#include "server/load_summary.h"

#include <chrono>
#include <cstdint>
#include <utility>

#include "absl/strings/str_format.h"

namespace k3 {
namespace {

double PerSecond(uint64_t before, uint64_t now, double seconds) {
  return seconds > 0 && now > before ? static_cast<double>(now - before) / seconds : 0;
}

double Percent(uint64_t part, uint64_t whole) {
  return whole > 0 ? 100.0 * static_cast<double>(part) / static_cast<double>(whole) : 0;
}

}  // namespace

std::string FormatLoadSummary(const LoadSample& before, const LoadSample& now, double seconds) {
  const EngineLoad& load = now.engine;
  const uint64_t queried = load.prefix_query_tokens - before.engine.prefix_query_tokens;
  const uint64_t resumed = load.prefix_hit_tokens - before.engine.prefix_hit_tokens;
  return absl::StrFormat(
      "load: running %d, waiting %d, prefill %.1f tokens/s, decode %.1f tokens/s, pages %d/%d (%.1f %%, cached %d), "
      "state slots %d/%d (%.1f %%), snapshots %d/%d, cache hits %.1f %% of %d prompt tokens, preemptions %d",
      load.running, load.waiting, PerSecond(before.prefill_tokens, now.prefill_tokens, seconds),
      PerSecond(before.engine.generated_tokens, load.generated_tokens, seconds), load.pages_used, load.pages_total,
      Percent(static_cast<uint64_t>(load.pages_used), static_cast<uint64_t>(load.pages_total)), load.pages_cached,
      load.state_slots_used, load.state_slots_total,
      Percent(static_cast<uint64_t>(load.state_slots_used), static_cast<uint64_t>(load.state_slots_total)),
      load.snapshots_used, load.snapshots_total, Percent(resumed, queried), queried,
      load.preemptions - before.engine.preemptions);
}

LoadSummaryLogger::LoadSummaryLogger(std::function<LoadSample()> sample, double interval_seconds,
                                     std::function<void(const std::string&)> write)
    : sample_(std::move(sample)), interval_seconds_(interval_seconds), write_(std::move(write)) {
  thread_ = std::thread([this] { Run(); });
}

LoadSummaryLogger::~LoadSummaryLogger() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void LoadSummaryLogger::Run() {
  LoadSample before = sample_();
  Clock::time_point then = Clock::now();
  bool was_busy = false;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!wake_.wait_for(lock, std::chrono::duration<double>(interval_seconds_), [this] { return stop_; })) {
    lock.unlock();
    const LoadSample now = sample_();
    const Clock::time_point time = Clock::now();
    const bool busy = now.engine.running > 0 || now.engine.waiting > 0 || now.engine.steps != before.engine.steps;
    if (busy || was_busy) {
      write_(FormatLoadSummary(before, now, std::chrono::duration<double>(time - then).count()));
    }
    was_busy = busy;
    before = now;
    then = time;
    lock.lock();
  }
}

}  // namespace k3
