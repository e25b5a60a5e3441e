#include "server/commands/bench_config.h"

#include <cmath>
#include <limits>
#include <string_view>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace k3 {
namespace {

constexpr double kNoLimit = 9e15;  // exact in a double, and beyond any use

// The texts that FinishFlags turns into lists.
struct Lists {
  std::vector<std::string> rates;
  std::vector<std::string> concurrencies;
};

void AddFlags(FlagSet& flags, BenchConfig& config, Lists& lists) {
  flags.Group("Server");
  flags.String("target", &config.target, "HOST:PORT", "gRPC server");
  flags.String("url", &config.url, "URL",
               "HTTP server, e.g. http://127.0.0.1:8000 or https://HOST; instead of --target");
  flags.String("model", &config.model, "NAME", "model name to ask for; empty takes the server's first");
  flags.Choice("input", &config.input_name, {"ids", "text", "chat"},
               "prompts as token ids, as text, or as a chat message; over HTTP the first two use /v1/completions, the "
               "last /v1/chat/completions");
  flags.Int("connections", &config.connections, {1, 1024}, "gRPC connections that share the streams");
  config.access.DeclareFlags(flags);
  flags.Number("timeout", &config.timeout_seconds, {0.001, 86400}, "seconds after which a request counts as failed");

  flags.Group("Load");
  flags.List("request-rate", &lists.rates, "R",
             "open loop: requests per second with Poisson arrivals, or inf for all at once; one run for each value");
  flags.List("concurrency", &lists.concurrencies, "N",
             "closed loop: requests under way at any time; one run for each value; 1 when no load is given");
  flags.Int("num-requests", &config.num_requests, {1, kNoLimit}, "requests of a run");
  flags.Number("duration", &config.duration_seconds, {0.001, 1e7}, "seconds after which a run sends nothing more");
  flags.Int("warmup", &config.warmup, {0, 100000}, "requests sent before the runs and not counted");

  flags.Group("Workload");
  flags.Choice("workload", &config.workload_name, {"fixed", "normal", "shared-prefix", "long-context", "trace"},
               "fixed: equal lengths; normal: normally distributed lengths; shared-prefix: prompts of a group begin "
               "alike; long-context: some prompts are very long; trace: lengths and times from --trace");
  flags.Int("input-len", &config.input_len, {1, 1e8}, "prompt tokens (words, when prompts are text); their mean");
  flags.Int("output-len", &config.output_len, {1, 1e8}, "tokens to generate; their mean");
  flags.Number("input-stddev", &config.input_stddev, {0, 1e8}, "normal: standard deviation of the prompt length");
  flags.Number("output-stddev", &config.output_stddev, {0, 1e8}, "normal: standard deviation of the output length");
  flags.Int("prefix-len", &config.prefix_len, {1, 1e8}, "shared-prefix: tokens shared, before --input-len own ones");
  flags.Int("prefix-groups", &config.prefix_groups, {1, 1e8}, "shared-prefix: number of different prefixes");
  flags.Int("long-input-len", &config.long_input_len, {1, 1e8}, "long-context: tokens of a long prompt");
  flags.Number("long-share", &config.long_share, {0, 1}, "long-context: share of long prompts");
  flags.String("trace", &config.trace_path, "FILE", "JSON lines, see below");
  flags.Number("trace-speed", &config.trace_speed, {1e-6, 1e6}, "trace: factor on its pace");
  flags.Bool("ignore-eos", &config.ignore_eos, "generate the whole output length whatever the model says");
  flags.Number("temperature", &config.temperature, {0, 100}, "sampling temperature");
  flags.Bool("bypass-prefix-cache", &config.bypass_prefix_cache, "gRPC: compute every prompt in full");
  flags.Int("vocab-size", &config.vocab_size, {2, 1e9}, "random ids are below this; auto: what the server says");
  flags.Int("seed", &config.seed, {0, kNoLimit}, "fixes prompts, lengths and arrival times; auto: a new one");

  flags.Group("Report");
  flags.Number("slo-ttft-ms", &config.slo_ttft_ms, {0.001, 1e9}, "goodput counts requests with at most this TTFT");
  flags.Number("slo-itl-ms", &config.slo_itl_ms, {0.001, 1e9},
               "goodput counts requests with at most this mean time between tokens");
  flags.String("json", &config.json_path, "FILE", "write all figures as JSON");
  flags.String("svg", &config.svg_path, "FILE", "write a plot of latency over load");
  flags.Bool("save-requests", &config.save_requests, "put the times of every request into --json too");
  flags.Bool("progress", &config.progress, "show progress on stderr");
  flags.Bool("help", &config.help, "this text");
}

// Entries may be separate words or one word with commas.
std::vector<std::string> Entries(const std::vector<std::string>& words) {
  std::vector<std::string> entries;
  for (const std::string& word : words) {
    for (const absl::string_view entry : absl::StrSplit(word, ',')) entries.emplace_back(entry);
  }
  return entries;
}

absl::Status FinishFlags(const FlagSet& flags, const Lists& lists, BenchConfig& config) {
  for (const std::string& entry : Entries(lists.rates)) {
    double rate = 0;
    if (entry == "inf") {
      rate = std::numeric_limits<double>::infinity();
    } else if (!absl::SimpleAtod(entry, &rate) || !std::isfinite(rate) || rate <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--request-rate takes numbers above 0, or inf, not \"", entry.substr(0, 100), "\""));
    }
    config.request_rates.push_back(rate);
  }
  for (const std::string& entry : Entries(lists.concurrencies)) {
    int64_t concurrency = 0;
    if (!absl::SimpleAtoi(entry, &concurrency) || concurrency < 1 || concurrency > 1'000'000) {
      return absl::InvalidArgumentError(
          absl::StrCat("--concurrency takes whole numbers from 1 to 1000000, not \"", entry.substr(0, 100), "\""));
    }
    config.concurrencies.push_back(concurrency);
  }
  if (!config.request_rates.empty() && !config.concurrencies.empty()) {
    return absl::InvalidArgumentError("--request-rate and --concurrency exclude each other: open or closed loop");
  }
  if (flags.IsSet("url") && flags.IsSet("target")) {
    return absl::InvalidArgumentError("--target and --url exclude each other: gRPC or HTTP");
  }
  if (config.is_http() && config.bypass_prefix_cache) {
    return absl::InvalidArgumentError("--bypass-prefix-cache needs --target: the HTTP routes have no such field");
  }

  if (const absl::Status status = config.access.Load(); !status.ok()) return status;

  config.input = config.input_name == "ids"    ? BenchInput::kIds
                 : config.input_name == "text" ? BenchInput::kText
                                               : BenchInput::kChat;
  config.workload = config.workload_name == "fixed"           ? WorkloadKind::kFixed
                    : config.workload_name == "normal"        ? WorkloadKind::kNormal
                    : config.workload_name == "shared-prefix" ? WorkloadKind::kSharedPrefix
                    : config.workload_name == "long-context"  ? WorkloadKind::kLongContext
                                                              : WorkloadKind::kTrace;
  struct Belongs {
    const char* flag;
    WorkloadKind workload;
    const char* name;
  };
  for (const Belongs& belongs : {Belongs{"input-stddev", WorkloadKind::kNormal, "normal"},
                                 {"output-stddev", WorkloadKind::kNormal, "normal"},
                                 {"prefix-len", WorkloadKind::kSharedPrefix, "shared-prefix"},
                                 {"prefix-groups", WorkloadKind::kSharedPrefix, "shared-prefix"},
                                 {"long-input-len", WorkloadKind::kLongContext, "long-context"},
                                 {"long-share", WorkloadKind::kLongContext, "long-context"},
                                 {"trace", WorkloadKind::kTrace, "trace"},
                                 {"trace-speed", WorkloadKind::kTrace, "trace"}}) {
    if (flags.IsSet(belongs.flag) && config.workload != belongs.workload) {
      return absl::InvalidArgumentError(absl::StrCat("--", belongs.flag, " needs --workload ", belongs.name));
    }
  }
  const bool is_trace = config.workload == WorkloadKind::kTrace;
  if (is_trace && config.trace_path.empty()) return absl::InvalidArgumentError("--workload trace needs --trace FILE");
  if (is_trace) {
    for (const char* flag : {"input-len", "output-len"}) {
      if (flags.IsSet(flag)) return absl::InvalidArgumentError(absl::StrCat("--", flag, " does not go with a trace"));
    }
    if (flags.IsSet("trace-speed") && (!config.request_rates.empty() || !config.concurrencies.empty())) {
      return absl::InvalidArgumentError(
          "--trace-speed needs the trace's own times: drop --request-rate, --concurrency");
    }
    if (!flags.IsSet("num-requests")) config.num_requests = std::numeric_limits<int64_t>::max();
  }
  if (config.request_rates.empty() && config.concurrencies.empty() && !is_trace) config.concurrencies = {1};
  if (config.save_requests && config.json_path.empty()) {
    return absl::InvalidArgumentError("--save-requests needs --json FILE");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BenchConfig> ParseBenchCommandLine(const std::vector<std::string>& args) {
  BenchConfig config;
  Lists lists;
  FlagSet flags;
  AddFlags(flags, config, lists);
  std::vector<std::string> positional;
  absl::Status status = flags.ParseArgs(args, &positional);
  if (status.ok()) status = flags.Resolve();
  if (!status.ok()) return status;
  if (config.help) return config;
  if (!positional.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("bench takes flags only, not \"", positional[0].substr(0, 100), "\""));
  }
  status = FinishFlags(flags, lists, config);
  if (!status.ok()) return status;
  return config;
}

std::string BenchHelp() {
  BenchConfig config;
  Lists lists;
  FlagSet flags;
  AddFlags(flags, config, lists);
  return absl::StrCat(
      "Usage: k3serve bench [flags]\n"
      "Sends a workload to a running server and reports latency and throughput as the client saw them.\n\n",
      flags.Help(),
      "\nTrace lines have the keys timestamp (milliseconds, ascending), output_length, and one of input_length, "
      "prompt\n"
      "(text) and prompt_token_ids; with input_length, hash_ids may name the prompt's blocks of 512 tokens, equal ids\n"
      "standing for equal blocks.\n"
      "\nFigures: time to first token runs from sending to the first message with a token; a message of k tokens "
      "after\n"
      "a wait of w counts as k inter-token gaps of w/k; the longest gap is the longest wait between two messages.\n"
      "Latencies are over successful requests; tokens count as received, those of failed requests too. Ids are random\n"
      "and differ from run to run, so only shared-prefix and trace workloads meet the prefix cache.\n");
}

}  // namespace k3
