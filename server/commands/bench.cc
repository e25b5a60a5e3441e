#include "server/commands/bench.h"

#include <unistd.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/commands/bench_config.h"
#include "server/commands/bench_grpc_client.h"
#include "server/commands/bench_http_client.h"
#include "server/commands/bench_plot.h"
#include "server/commands/bench_progress.h"
#include "server/commands/bench_report.h"
#include "server/exit_codes.h"
#include "server/text_file.h"

namespace k3 {
namespace {

constexpr int kExitBenchFailed = 1;
// Token ids below this exist in every vocabulary of this family: the single bytes.
constexpr int32_t kSafeVocab = 256;
// Ids at a vocabulary's end are control tokens.
constexpr int32_t kControlTokens = 256;

absl::StatusOr<std::unique_ptr<BenchClient>> MakeClient(const BenchConfig& config) {
  if (!config.is_http()) return std::make_unique<BenchGrpcClient>(config);
  absl::StatusOr<HttpUrl> url = ParseHttpUrl(config.url);
  if (!url.ok()) return url.status();
  if (const absl::Status status = config.access.CheckUrl("--url", url->https); !status.ok()) return status;
  return std::make_unique<BenchHttpClient>(config, *std::move(url));
}

absl::StatusOr<std::vector<TraceEntry>> LoadTrace(const BenchConfig& config) {
  if (config.workload != WorkloadKind::kTrace) return std::vector<TraceEntry>();
  const absl::StatusOr<std::string> text = ReadTextFile(config.trace_path);
  if (!text.ok()) return text.status();
  return ParseTrace(*text, config.trace_path);
}

int32_t RandomIdLimit(const BenchConfig& config, const BenchServerInfo& server) {
  if (config.vocab_size.has_value()) return static_cast<int32_t>(*config.vocab_size);
  return server.vocab_size > 2 * kControlTokens ? server.vocab_size - kControlTokens : kSafeVocab;
}

std::vector<BenchLoad> Loads(const BenchConfig& config) {
  std::vector<BenchLoad> loads;
  for (const double rate : config.request_rates) loads.push_back({.rate = rate, .concurrency = {}});
  for (const int64_t concurrency : config.concurrencies) loads.push_back({.rate = {}, .concurrency = concurrency});
  if (loads.empty()) loads.emplace_back();
  return loads;
}

bool WriteFile(const std::string& path, const std::string& text, std::ostream& err) {
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (!file) err << "bench: cannot write " << path << "\n";
  return static_cast<bool>(file);
}

}  // namespace

int RunBench(const std::vector<std::string>& args, std::ostream& out, std::ostream& err) {
  absl::StatusOr<BenchConfig> parsed = ParseBenchCommandLine(args);
  if (!parsed.ok()) {
    err << "bench: " << parsed.status().message() << "\n";
    return kExitUsage;
  }
  const BenchConfig config = *std::move(parsed);
  if (config.help) {
    out << BenchHelp();
    return kExitOk;
  }
  absl::StatusOr<std::vector<TraceEntry>> trace = LoadTrace(config);
  if (!trace.ok()) {
    err << "bench: " << trace.status().message() << "\n";
    return kExitUsage;
  }
  absl::StatusOr<std::unique_ptr<BenchClient>> client = MakeClient(config);
  if (!client.ok()) {
    err << "bench: " << client.status().message() << "\n";
    return kExitUsage;
  }
  const absl::StatusOr<BenchServerInfo> server = (*client)->Prepare();
  if (!server.ok()) {
    err << "bench: " << server.status().message() << "\n";
    return kExitBenchFailed;
  }
  // A run of hours must not end without its figures.
  for (const std::string& path : {config.json_path, config.svg_path}) {
    if (path.empty() || std::ofstream(path, std::ios::app)) continue;
    err << "bench: cannot write " << path << "\n";
    return kExitUsage;
  }

  const uint64_t seed = config.seed.has_value() ? static_cast<uint64_t>(*config.seed) : std::random_device()();
  const int32_t id_limit = RandomIdLimit(config, *server);
  const BenchGoal goal{config.slo_ttft_ms, config.slo_itl_ms};
  const bool is_terminal = config.progress && isatty(STDERR_FILENO) == 1;

  if (config.warmup > 0) {
    BenchConfig warmup = config;
    warmup.num_requests = config.warmup;
    warmup.duration_seconds.reset();
    const Workload workload(warmup, *trace, id_limit, seed, /*run=*/-1);
    RunBenchLoad(warmup, {.rate = {}, .concurrency = 1}, workload, **client, [](const BenchProgress&) {});
  }

  std::vector<BenchRun> runs;
  bool every_run_answered = true;
  for (const BenchLoad& load : Loads(config)) {
    const Workload workload(config, *trace, id_limit, seed, static_cast<int64_t>(runs.size()));
    BenchProgressPrinter printer(err, is_terminal, load.Name());
    BenchRun run;
    run.load = load;
    run.records = RunBenchLoad(config, load, workload, **client, [&](const BenchProgress& progress) {
      if (config.progress) printer.Show(progress);
    });
    printer.Finish();
    run.summary = Summarize(run.records, goal);
    run.kinds = SummarizeKinds(run.records, goal);
    if (run.summary.completed == 0) every_run_answered = false;
    if (!config.save_requests) run.records.clear();
    runs.push_back(std::move(run));
  }

  out << BenchTable(config, *server, seed, runs) << std::flush;
  bool written = true;
  if (!config.json_path.empty()) {
    written = WriteFile(config.json_path, BenchJson(config, *server, seed, runs).dump(2) + "\n", err) && written;
  }
  if (!config.svg_path.empty()) {
    const std::string title =
        absl::StrCat(server->model, ", ", config.workload_name, " workload, ", config.is_http() ? "HTTP" : "gRPC");
    written = WriteFile(config.svg_path, BenchPlot(title, runs), err) && written;
  }
  return every_run_answered && written ? kExitOk : kExitBenchFailed;
}

}  // namespace k3
