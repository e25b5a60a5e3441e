#pragma once

#include <iosfwd>
#include <string>

#include "engine/request.h"
#include "server/commands/bench_runner.h"

namespace k3 {

// Shows how a run goes: a bar that redraws itself on a terminal, else a line every ten seconds.
class BenchProgressPrinter {
 public:
  BenchProgressPrinter(std::ostream& out, bool is_terminal, std::string name);
  void Show(const BenchProgress& progress);
  // Ends the bar's line.
  void Finish();

 private:
  std::ostream& out_;
  const bool is_terminal_;
  const std::string name_;
  Clock::time_point next_;
  size_t drawn_ = 0;  // characters of the bar on the terminal
};

// e.g. "8 req/s [#####.....]  50/100, 4 in flight, 123.4 tokens/s, 0 failed"
std::string ProgressLine(const std::string& name, const BenchProgress& progress);

}  // namespace k3
