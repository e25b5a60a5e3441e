#include "server/commands/bench_stats.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <utility>

namespace k3 {
namespace {

double Milliseconds(Clock::duration duration) { return std::chrono::duration<double, std::milli>(duration).count(); }

// The latencies of one request that has at least one token.
struct RequestTimes {
  double ttft = 0;
  double tpot = 0;  // 0 when nothing came after the first message
  double longest_gap = 0;
  bool has_gaps = false;
};

RequestTimes TimesOf(const RequestRecord& record, std::vector<double>* gaps) {
  RequestTimes times;
  times.ttft = Milliseconds(record.arrivals.front().time - record.sent);
  int64_t later_tokens = 0;
  for (size_t i = 1; i < record.arrivals.size(); ++i) {
    const double gap = Milliseconds(record.arrivals[i].time - record.arrivals[i - 1].time);
    const int32_t tokens = record.arrivals[i].tokens;
    times.longest_gap = std::max(times.longest_gap, gap);
    later_tokens += tokens;
    gaps->insert(gaps->end(), static_cast<size_t>(tokens), gap / tokens);
  }
  times.has_gaps = later_tokens > 0;
  if (times.has_gaps) {
    times.tpot =
        Milliseconds(record.arrivals.back().time - record.arrivals.front().time) / static_cast<double>(later_tokens);
  }
  return times;
}

}  // namespace

double Percentile(const std::vector<double>& sorted, double share) {
  const double position = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], position - static_cast<double>(below));
}

LatencySummary SummarizeLatency(std::vector<double> values) {
  LatencySummary summary;
  if (values.empty()) return summary;
  std::sort(values.begin(), values.end());
  summary.count = static_cast<int64_t>(values.size());
  summary.mean = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  summary.p50 = Percentile(values, 0.5);
  summary.p90 = Percentile(values, 0.9);
  summary.p99 = Percentile(values, 0.99);
  summary.max = values.back();
  return summary;
}

BenchSummary Summarize(const std::vector<RequestRecord>& records, const BenchGoal& goal) {
  BenchSummary summary;
  std::vector<double> ttft, itl, tpot, longest_gap, e2e, send_lag;
  Clock::time_point first = Clock::time_point::max();
  Clock::time_point last = Clock::time_point::min();
  double busy_ms = 0;
  for (const RequestRecord& record : records) {
    first = std::min(first, record.sent);
    last = std::max(last, record.finished);
    busy_ms += Milliseconds(record.finished - record.sent);
    send_lag.push_back(Milliseconds(record.sent - record.scheduled));
    summary.output_tokens += record.output_tokens();
    if (!record.ok()) {
      ++summary.failed;
      ++summary.errors[record.error];
      continue;
    }
    ++summary.completed;
    summary.prompt_tokens += record.prompt_tokens;
    summary.cached_tokens += record.cached_tokens;
    e2e.push_back(Milliseconds(record.finished - record.sent));
    if (record.arrivals.empty()) continue;
    const RequestTimes times = TimesOf(record, &itl);
    ttft.push_back(times.ttft);
    if (times.has_gaps) {
      tpot.push_back(times.tpot);
      longest_gap.push_back(times.longest_gap);
    }
    if (times.ttft <= goal.ttft_ms.value_or(HUGE_VAL) && times.tpot <= goal.itl_ms.value_or(HUGE_VAL)) ++summary.good;
  }
  if (!records.empty()) {
    summary.seconds = Milliseconds(last - first) / 1000;
    if (summary.seconds > 0) summary.mean_in_flight = busy_ms / 1000 / summary.seconds;
  }
  summary.ttft = SummarizeLatency(std::move(ttft));
  summary.itl = SummarizeLatency(std::move(itl));
  summary.tpot = SummarizeLatency(std::move(tpot));
  summary.longest_gap = SummarizeLatency(std::move(longest_gap));
  summary.e2e = SummarizeLatency(std::move(e2e));
  summary.send_lag = SummarizeLatency(std::move(send_lag));
  return summary;
}

std::map<std::string, BenchSummary> SummarizeKinds(const std::vector<RequestRecord>& records, const BenchGoal& goal) {
  std::map<std::string, std::vector<RequestRecord>> kinds;
  for (const RequestRecord& record : records) kinds[record.kind].push_back(record);
  std::map<std::string, BenchSummary> summaries;
  if (kinds.size() < 2) return summaries;
  const double seconds = Summarize(records, goal).seconds;
  for (const auto& [kind, own] : kinds) {
    BenchSummary& summary = summaries[kind] = Summarize(own, goal);
    summary.mean_in_flight *= seconds > 0 ? summary.seconds / seconds : 0;
    summary.seconds = seconds;
  }
  return summaries;
}

}  // namespace k3
