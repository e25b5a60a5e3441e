#include "server/commands/bench_report.h"

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/version.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

std::string WorkloadText(const BenchConfig& config) {
  switch (config.workload) {
    case WorkloadKind::kFixed:
      return absl::StrFormat("fixed, %d in, %d out", config.input_len, config.output_len);
    case WorkloadKind::kNormal:
      return absl::StrFormat("normal, %d +- %g in, %d +- %g out", config.input_len, config.input_stddev,
                             config.output_len, config.output_stddev);
    case WorkloadKind::kSharedPrefix:
      return absl::StrFormat("shared-prefix, %d groups of %d, then %d in, %d out", config.prefix_groups,
                             config.prefix_len, config.input_len, config.output_len);
    case WorkloadKind::kLongContext:
      return absl::StrFormat("long-context, %g of %d in, the others %d in, %d out", config.long_share,
                             config.long_input_len, config.input_len, config.output_len);
    case WorkloadKind::kTrace:
      return absl::StrCat("trace ", config.trace_path);
  }
  return config.workload_name;
}

Json ToJson(const LatencySummary& latency) {
  return {{"count", latency.count}, {"mean", latency.mean}, {"p50", latency.p50},
          {"p90", latency.p90},     {"p99", latency.p99},   {"max", latency.max}};
}

Json ToJson(const BenchSummary& summary, const BenchConfig& config) {
  Json json = {{"completed", summary.completed},
               {"failed", summary.failed},
               {"errors", summary.errors},
               {"seconds", summary.seconds},
               {"prompt_tokens", summary.prompt_tokens},
               {"cached_tokens", summary.cached_tokens},
               {"output_tokens", summary.output_tokens},
               {"requests_per_second", summary.requests_per_second()},
               {"output_tokens_per_second", summary.output_tokens_per_second()},
               {"total_tokens_per_second", summary.total_tokens_per_second()},
               {"mean_in_flight", summary.mean_in_flight},
               {"ttft_ms", ToJson(summary.ttft)},
               {"itl_ms", ToJson(summary.itl)},
               {"tpot_ms", ToJson(summary.tpot)},
               {"longest_gap_ms", ToJson(summary.longest_gap)},
               {"e2e_ms", ToJson(summary.e2e)},
               {"send_lag_ms", ToJson(summary.send_lag)}};
  if (config.slo_ttft_ms.has_value() || config.slo_itl_ms.has_value()) {
    json["good"] = summary.good;
    json["good_per_second"] = summary.good_per_second();
  }
  return json;
}

Json ToJson(const RequestRecord& record, Clock::time_point start) {
  const auto ms = [start](Clock::time_point time) {
    return std::chrono::duration<double, std::milli>(time - start).count();
  };
  Json arrivals = Json::array();
  for (const TokenArrival& arrival : record.arrivals)
    arrivals.push_back(Json::array({ms(arrival.time), arrival.tokens}));
  Json json = {{"index", record.index},
               {"kind", record.kind},
               {"scheduled_ms", ms(record.scheduled)},
               {"sent_ms", ms(record.sent)},
               {"finished_ms", ms(record.finished)},
               {"prompt_tokens", record.prompt_tokens},
               {"cached_tokens", record.cached_tokens},
               {"arrivals", std::move(arrivals)}};
  if (!record.ok()) json["error"] = record.error;
  return json;
}

Json ToJson(const BenchLoad& load) {
  if (load.concurrency.has_value()) return {{"concurrency", *load.concurrency}};
  if (!load.rate.has_value()) return {{"trace_times", true}};
  if (std::isinf(*load.rate)) return {{"request_rate", "inf"}};
  return {{"request_rate", *load.rate}};
}

// Rows of equal length, the first column left-aligned.
class Table {
 public:
  void Row(std::string name, std::vector<std::string> cells) { rows_.push_back({std::move(name), std::move(cells)}); }

  std::string Text() const {
    size_t name_width = 0;
    std::vector<size_t> widths;
    for (const auto& [name, cells] : rows_) {
      name_width = std::max(name_width, name.size());
      widths.resize(std::max(widths.size(), cells.size()));
      for (size_t i = 0; i < cells.size(); ++i) widths[i] = std::max(widths[i], cells[i].size());
    }
    std::string text;
    for (const auto& [name, cells] : rows_) {
      text += absl::StrFormat("%-*s", static_cast<int>(name_width), name);
      for (size_t i = 0; i < cells.size(); ++i) {
        text += absl::StrFormat("  %*s", static_cast<int>(widths[i]), cells[i]);
      }
      text += '\n';
    }
    return text;
  }

 private:
  std::vector<std::pair<std::string, std::vector<std::string>>> rows_;
};

template <typename F>
std::vector<std::string> Cells(const std::vector<BenchRun>& runs, F&& format) {
  std::vector<std::string> cells;
  for (const BenchRun& run : runs) cells.push_back(format(run));
  return cells;
}

void LatencyRows(Table& table, const std::vector<BenchRun>& runs, const std::string& name,
                 LatencySummary BenchSummary::*latency) {
  const auto row = [&](const char* label, double LatencySummary::*value) {
    table.Row(absl::StrCat(name, " ", label, " (ms)"), Cells(runs, [&](const BenchRun& run) -> std::string {
                const LatencySummary& summary = run.summary.*latency;
                return summary.count == 0 ? "-" : absl::StrFormat("%.2f", summary.*value);
              }));
  };
  row("p50", &LatencySummary::p50);
  row("p90", &LatencySummary::p90);
  row("p99", &LatencySummary::p99);
}

}  // namespace

std::string BenchTable(const BenchConfig& config, const BenchServerInfo& server, uint64_t seed,
                       const std::vector<BenchRun>& runs) {
  Table table;
  table.Row("load", Cells(runs, [](const BenchRun& run) { return run.load.Name(); }));
  const auto count_row = [&](const std::string& name, auto&& value) {
    table.Row(name, Cells(runs, [&](const BenchRun& run) { return absl::StrCat(value(run.summary)); }));
  };
  const auto number_row = [&](const std::string& name, auto&& value) {
    table.Row(name, Cells(runs, [&](const BenchRun& run) { return absl::StrFormat("%.2f", value(run.summary)); }));
  };
  count_row("completed requests", [](const BenchSummary& s) { return s.completed; });
  count_row("failed requests", [](const BenchSummary& s) { return s.failed; });
  std::map<std::string, int64_t> errors;
  for (const BenchRun& run : runs) errors.insert(run.summary.errors.begin(), run.summary.errors.end());
  for (const auto& [kind, unused] : errors) {
    count_row(absl::StrCat("  ", kind), [&kind = kind](const BenchSummary& s) {
      const auto it = s.errors.find(kind);
      return it == s.errors.end() ? 0 : it->second;
    });
  }
  number_row("duration (s)", [](const BenchSummary& s) { return s.seconds; });
  number_row("mean requests in flight", [](const BenchSummary& s) { return s.mean_in_flight; });
  count_row("prompt tokens", [](const BenchSummary& s) { return s.prompt_tokens; });
  count_row("  of them cached", [](const BenchSummary& s) { return s.cached_tokens; });
  count_row("output tokens received", [](const BenchSummary& s) { return s.output_tokens; });
  number_row("requests/s", [](const BenchSummary& s) { return s.requests_per_second(); });
  number_row("output tokens/s", [](const BenchSummary& s) { return s.output_tokens_per_second(); });
  number_row("all tokens/s", [](const BenchSummary& s) { return s.total_tokens_per_second(); });
  LatencyRows(table, runs, "time to first token", &BenchSummary::ttft);
  LatencyRows(table, runs, "inter-token latency", &BenchSummary::itl);
  LatencyRows(table, runs, "mean ITL of a request", &BenchSummary::tpot);
  LatencyRows(table, runs, "longest gap of a request", &BenchSummary::longest_gap);
  LatencyRows(table, runs, "end to end", &BenchSummary::e2e);
  if (config.slo_ttft_ms.has_value() || config.slo_itl_ms.has_value()) {
    std::string goal;
    if (config.slo_ttft_ms.has_value()) absl::StrAppend(&goal, " TTFT<=", *config.slo_ttft_ms, "ms");
    if (config.slo_itl_ms.has_value()) absl::StrAppend(&goal, " ITL<=", *config.slo_itl_ms, "ms");
    number_row(absl::StrCat("goodput (requests/s;", goal, ")"),
               [](const BenchSummary& s) { return s.good_per_second(); });
    number_row("good requests (%)", [](const BenchSummary& s) {
      const int64_t all = s.completed + s.failed;
      return all > 0 ? 100.0 * static_cast<double>(s.good) / static_cast<double>(all) : 0.0;
    });
  }
  std::string text = absl::StrCat(config.is_http() ? "HTTP " : "gRPC ", config.is_http() ? config.url : config.target,
                                  ", ", server.server, ", model ", server.model, "\nworkload ", WorkloadText(config),
                                  ", prompts as ", config.input_name, ", seed ", seed, "\n\n", table.Text());
  for (const BenchRun& run : runs) {
    for (const auto& [kind, summary] : run.kinds) {
      absl::StrAppend(&text, run.load.Name(), ", ", kind, " requests: ", summary.completed, " completed, TTFT p50 ",
                      absl::StrFormat("%.2f", summary.ttft.p50), " p99 ", absl::StrFormat("%.2f", summary.ttft.p99),
                      " ms, longest gap p50 ", absl::StrFormat("%.2f", summary.longest_gap.p50), " p99 ",
                      absl::StrFormat("%.2f", summary.longest_gap.p99), " ms\n");
    }
    if (run.summary.send_lag.p99 > 20) {
      absl::StrAppend(&text, "Note: ", run.load.Name(), ": requests were sent late (p99 ",
                      absl::StrFormat("%.1f", run.summary.send_lag.p99),
                      " ms after they were due): this machine could not keep the pace.\n");
    }
  }
  return text;
}

Json BenchJson(const BenchConfig& config, const BenchServerInfo& server, uint64_t seed,
               const std::vector<BenchRun>& runs) {
  Json json = {{"version", std::string(kVersion)},
               {"commit", std::string(kCommit)},
               {"protocol", config.is_http() ? "http" : "grpc"},
               {"target", config.is_http() ? config.url : config.target},
               {"server", server.server},
               {"model", server.model},
               {"input", config.input_name},
               {"workload", WorkloadText(config)},
               {"ignore_eos", config.ignore_eos},
               {"temperature", config.temperature},
               {"warmup", config.warmup},
               {"seed", seed}};
  if (config.slo_ttft_ms.has_value()) json["slo_ttft_ms"] = *config.slo_ttft_ms;
  if (config.slo_itl_ms.has_value()) json["slo_itl_ms"] = *config.slo_itl_ms;
  Json& list = json["runs"] = Json::array();
  for (const BenchRun& run : runs) {
    Json entry = {{"load", ToJson(run.load)}};
    entry.update(ToJson(run.summary, config));
    for (const auto& [kind, summary] : run.kinds) entry["kinds"][kind] = ToJson(summary, config);
    if (config.save_requests) {
      Clock::time_point start = Clock::time_point::max();
      for (const RequestRecord& record : run.records) start = std::min(start, record.scheduled);
      Json& requests = entry["requests"] = Json::array();
      for (const RequestRecord& record : run.records) requests.push_back(ToJson(record, start));
    }
    list.push_back(std::move(entry));
  }
  return json;
}

}  // namespace k3
