#pragma once

#include <chrono>
#include <cstdint>

namespace k3 {

struct LoadProgress {
  uint64_t bytes_done = 0;
  uint64_t bytes_total = 0;
  double seconds = 0;

  double percent() const { return bytes_total == 0 ? 100.0 : 100.0 * static_cast<double>(bytes_done) / bytes_total; }
  double gigabytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes_done) / 1e9 / seconds : 0; }
};

// Tells a person how far loading is: a bar that is redrawn when stderr is a terminal, else a log line every few
// seconds.
class LoadProgressPrinter {
 public:
  LoadProgressPrinter();
  void Update(const LoadProgress& progress);
  // Ends the bar's line; logs the total.
  void Finish(const LoadProgress& progress);

 private:
  using Clock = std::chrono::steady_clock;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point last_;
};

}  // namespace k3
