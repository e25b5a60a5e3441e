#pragma once

#include <string>
#include <vector>

#include "server/commands/bench_report.h"

namespace k3 {

// An SVG picture: TTFT, inter-token latency, end-to-end latency (p50, p90, p99) and throughput over the load.
std::string BenchPlot(const std::string& title, const std::vector<BenchRun>& runs);

// Round numbers that cover [low, high]: about `count` of them on a linear axis, 1-2-5 steps per decade on a log axis.
std::vector<double> LinearTicks(double low, double high, int count);
std::vector<double> LogTicks(double low, double high);

// The text with &, <, > and quotes escaped for XML; characters that XML forbids become '?'.
std::string XmlText(const std::string& text);

}  // namespace k3
