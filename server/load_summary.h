#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "engine/engine_interface.h"

namespace k3 {

// One line for operators: queue, tokens per second since `before`, pools, cache hits.
std::string FormatLoadSummary(const EngineLoad& before, const EngineLoad& now, double seconds);

// Logs that line at every interval while there is work, and once more when the engine has become idle; an idle server
// stays quiet. Owns a thread, which the destructor joins.
class LoadSummaryLogger {
 public:
  // `load` is called, and `write` is told the line, on the logger's own thread.
  LoadSummaryLogger(std::function<EngineLoad()> load, double interval_seconds,
                    std::function<void(const std::string&)> write);
  ~LoadSummaryLogger();
  LoadSummaryLogger(const LoadSummaryLogger&) = delete;
  LoadSummaryLogger& operator=(const LoadSummaryLogger&) = delete;

 private:
  void Run();

  const std::function<EngineLoad()> load_;
  const double interval_seconds_;
  const std::function<void(const std::string&)> write_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace k3
