#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "engine/engine_interface.h"

namespace k3 {

struct LoadSample {
  EngineLoad engine;
  uint64_t prefill_tokens = 0;  // computed so far
};

// One line for operators: queue, tokens per second since `before`, pools, cache hits.
std::string FormatLoadSummary(const LoadSample& before, const LoadSample& now, double seconds);

// Logs that line at every interval while there is work, and once more when the engine has become idle; an idle server
// stays quiet. Owns a thread, which the destructor joins.
class LoadSummaryLogger {
 public:
  // `sample` is called, and `write` is told the line, on the logger's own thread.
  LoadSummaryLogger(std::function<LoadSample()> sample, double interval_seconds,
                    std::function<void(const std::string&)> write);
  ~LoadSummaryLogger();
  LoadSummaryLogger(const LoadSummaryLogger&) = delete;
  LoadSummaryLogger& operator=(const LoadSummaryLogger&) = delete;

 private:
  void Run();

  const std::function<LoadSample()> sample_;
  const double interval_seconds_;
  const std::function<void(const std::string&)> write_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace k3
