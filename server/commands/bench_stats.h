#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/commands/bench_request.h"

namespace k3 {

// Milliseconds, over the requests that succeeded. Percentiles interpolate linearly between the two nearest values.
struct LatencySummary {
  int64_t count = 0;
  double mean = 0;
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
  double max = 0;
};

// Sorts `values`. `share` in [0, 1]; `values` must be sorted and not empty for Percentile.
LatencySummary SummarizeLatency(std::vector<double> values);
double Percentile(const std::vector<double>& sorted, double share);

struct BenchGoal {
  std::optional<double> ttft_ms;
  std::optional<double> itl_ms;
  bool any() const { return ttft_ms.has_value() || itl_ms.has_value(); }
};

// One run, or the requests of one kind within it.
struct BenchSummary {
  int64_t completed = 0;
  int64_t failed = 0;
  std::map<std::string, int64_t> errors;  // kind -> requests
  double seconds = 0;                     // from the first request's sending to the last one's end
  int64_t prompt_tokens = 0;              // of completed requests
  int64_t cached_tokens = 0;
  int64_t output_tokens = 0;  // as received, those of failed requests too
  double mean_in_flight = 0;

  LatencySummary ttft;  // from sending to the first message with a token
  LatencySummary itl;   // between tokens: a message of k tokens counts as k gaps of its waiting time over k
  LatencySummary tpot;  // mean ITL of each request: (last - first arrival) / (tokens - tokens of the first arrival)
  LatencySummary longest_gap;  // longest wait between two messages of each request
  LatencySummary e2e;          // from sending to the end of the reply
  LatencySummary send_lag;     // open loop: from when a request was due to its sending

  int64_t good = 0;  // completed within every goal: TTFT, and mean ITL

  double requests_per_second() const { return seconds > 0 ? static_cast<double>(completed) / seconds : 0; }
  double output_tokens_per_second() const { return seconds > 0 ? static_cast<double>(output_tokens) / seconds : 0; }
  double total_tokens_per_second() const {
    return seconds > 0 ? static_cast<double>(prompt_tokens + output_tokens) / seconds : 0;
  }
  double good_per_second() const { return seconds > 0 ? static_cast<double>(good) / seconds : 0; }
};

BenchSummary Summarize(const std::vector<RequestRecord>& records, const BenchGoal& goal);

// A summary for each kind when there are several, else none. All over the time of the whole run.
std::map<std::string, BenchSummary> SummarizeKinds(const std::vector<RequestRecord>& records, const BenchGoal& goal);

}  // namespace k3
