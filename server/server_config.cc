#include "server/server_config.h"

#include <filesystem>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/launch_place.h"
#include "server/model_name.h"
#include "server/text_file.h"

namespace k3 {
namespace {

constexpr double kAnyCount = 1e15;

void AddNetworkFlags(FlagSet& flags, ServerConfig& config) {
  flags.Group("Network");
  flags.String("host", &config.host, "ADDRESS", "address to listen on");
  flags.PortNumber("port", &config.port, "HTTP port; 0 takes a free one, which the ready line names");
  flags.PortNumber("grpc-port", &config.grpc_port, "gRPC port");
  flags.PortNumber("admin-port", &config.admin_port, "gRPC port of AdminService");
  flags.PortNumber("probe-port", &config.probe_port,
                   "plain HTTP port of health, version and metrics only, for probes that have no certificate");
  flags.String("api-key-file", &config.api_key_file, "FILE", "keys, one a line; requests then need a bearer key");
  flags.String("tls-cert", &config.tls_cert, "FILE", "certificate chain (PEM); turns TLS on");
  flags.String("tls-key", &config.tls_key, "FILE", "private key (PEM)");
  flags.String("tls-client-ca", &config.tls_client_ca, "FILE",
               "clients must show a certificate of this authority (PEM)");
  flags.Int("max-message-mib", &config.max_message_mib, {1, 256}, "largest gRPC message, MiB");
  flags.Int("max-body-mib", &config.max_body_mib, {1, 1024}, "largest HTTP body, MiB");
  flags.Int("max-connections", &config.max_connections, {1, 1e6},
            "open connections of each front end; more are turned away");
  flags.Int("max-streams-per-key", &config.max_streams_per_key, {1, 1e6},
            "requests in progress of one API key; more are refused (default: no limit)");
}

void AddServingFlags(FlagSet& flags, ServerConfig& config) {
  flags.Group("Requests");
  flags.List(
      "served-model-name", &config.served_model_names, "NAME",
      "names that requests may use; the first is the server's own (default: the folder's, or ORGANISATION/NAME in the "
      "hub's cache)");
  flags.String("tokenizer", &config.tokenizer_dir, "DIR", "folder of the tokenizer (default: the model's)");
  flags.Choice("default-effort", &config.default_effort, {"low", "high", "max", "none"},
               "thinking effort of requests that name none (default: max for K3)");
  flags.Int("max-queue", &config.max_queue, {1, 1e6}, "waiting requests; more are refused");
  flags.Number("request-timeout", &config.request_timeout_seconds, {0.001, 1e7},
               "longest time of a request, seconds (default: no limit)");
  flags.Number("queue-timeout", &config.queue_timeout_seconds, {0.001, 1e7},
               "longest wait of a request for its first slot, seconds (default: no limit)");
  flags.Bool("vendor-strict", &config.vendor_strict, "refuse what the vendor's own API refuses");

  flags.Group("Operation");
  flags.Choice("log-level", &config.log_level, {"trace", "debug", "info", "warn", "error"}, "least level logged");
  flags.Choice("log-format", &config.log_format, {"text", "json"}, "form of the log on stderr");
  flags.Choice("metrics-compat", &config.metrics_compat, {"none", "vllm"}, "also offer metrics under these names");
  flags.String("otlp-endpoint", &config.otlp_endpoint, "URL",
               "OpenTelemetry collector (http://HOST:4318) that gets a span of every request");
  flags.Number("drain-lag", &config.drain_lag_seconds, {0, 3600},
               "seconds from the start of a drain until new work is refused");
  flags.Number("shutdown-timeout", &config.shutdown_timeout_seconds, {0, 86400},
               "seconds that running requests have after SIGTERM or SIGINT and --drain-lag");
  flags.Int("profile-steps", &config.profile_steps, {1, 1e6}, "profile this many engine steps after start");
}

absl::Status Conflict(const FlagSet& flags, const std::string& a, const std::string& b, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(flags.Describe(a), " conflicts with ", flags.Describe(b), ": ", why));
}

absl::Status CheckServing(const FlagSet& flags, const ServerConfig& config) {
  if (!config.port.has_value() && !config.grpc_port.has_value()) {
    return Conflict(flags, "port", "grpc-port", "both are off, so nothing would be served");
  }
  const std::vector<std::pair<std::string, Port>> ports = {{"port", config.port},
                                                           {"grpc-port", config.grpc_port},
                                                           {"admin-port", config.admin_port},
                                                           {"probe-port", config.probe_port}};
  for (size_t i = 0; i < ports.size(); ++i) {
    for (size_t j = i + 1; j < ports.size(); ++j) {
      const Port& port = ports[i].second;
      if (port.has_value() && *port != 0 && port == ports[j].second) {
        return Conflict(flags, ports[i].first, ports[j].first, absl::StrCat("both are ", *port));
      }
    }
  }
  if (config.tls_cert.empty() != config.tls_key.empty()) {
    return absl::InvalidArgumentError(config.tls_key.empty() ? "--tls-cert needs --tls-key"
                                                             : "--tls-key needs --tls-cert");
  }
  if (!config.tls_client_ca.empty() && config.tls_cert.empty()) {
    return absl::InvalidArgumentError("--tls-client-ca needs --tls-cert and --tls-key");
  }
  return absl::OkStatus();
}

void AddRoutingFlags(FlagSet& flags, ServerConfig& config) {
  flags.Group("Balance of experts");
  flags.Bool("measure-routing", &config.measure_routing, "count the choices of each rank's experts, for metrics");
  flags.Int("routing-virtual-ranks", &config.routing_virtual_ranks, {2, 4096},
            "balance or count over so many ranks (default: those of the layout)");
  flags.Number("routing-kappa", &config.routing_kappa, {1.02, 1.15},
               "more than so many times its share makes a rank less likely");
  flags.Number("routing-window", &config.routing_window, {1, 8},
               "what updates look back on, times 1024 choices of a rank with its fair share");
  flags.Int("routing-update-steps", &config.routing_update_steps, {1, 16},
            "decode steps between updates; a step with a prompt is followed by one");
  flags.Int("routing-decay", &config.routing_decay, {2, 4}, "each update forgets a share of 2^-N");
  flags.Number("routing-eta", &config.routing_eta, {0.25, 1},
               "share of the way to its target that a bias goes (default: 1, from decay 3 on 0.5)");
  flags.Number("routing-max-bias", &config.routing_max_bias, {0.001, 0.2}, "largest bias of a rank");
  flags.Int("routing-epoch-updates", &config.routing_epoch_updates, {1, 1 << 20},
            "updates that a bias epoch stays current; each has a prefix cache of its own");
  flags.Bool("routing-guards", &config.routing_guards, "hold back where too many choices change or a bias oscillates");
  flags.Number("routing-soft-cap", &config.routing_soft_cap, {1, 4},
               "replace what exceeds so many times a rank's share of a step, e.g. 1.1; answers then depend on what "
               "else runs (default: off)");
  flags.Number("routing-soft-cap-tau", &config.routing_soft_cap_tau, {0, 0.2},
               "how far below the cutoff a replacement may be");
  flags.String("routing-log", &config.routing_log, "FILE", "write the bias epochs that requests were routed by");
  flags.String("routing-replay", &config.routing_replay, "FILE:RANK.EPOCH",
               "route everything by a recorded epoch, for good");
}

// A setting that would change nothing must not look as if it did.
absl::Status CheckRoutingFlags(const FlagSet& flags, const ServerConfig& config) {
  const bool adaptive = config.moe_routing == "local-quantile";
  for (const char* name : {"routing-kappa", "routing-window", "routing-update-steps", "routing-decay", "routing-eta",
                           "routing-max-bias", "routing-epoch-updates", "routing-guards", "routing-soft-cap",
                           "routing-soft-cap-tau", "routing-log", "routing-replay"}) {
    if (!adaptive && flags.IsSet(name)) return Conflict(flags, name, "moe-routing", "experts are chosen exactly");
  }
  if (!adaptive && config.routing_virtual_ranks.has_value() && !config.measure_routing) {
    return Conflict(flags, "routing-virtual-ranks", "moe-routing", "nothing is counted without --measure-routing");
  }
  if (flags.IsSet("routing-soft-cap-tau") && !config.routing_soft_cap.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.Describe("routing-soft-cap-tau"), " needs --routing-soft-cap"));
  }
  if (config.routing_soft_cap.has_value()) {
    if (config.verify_hits > 0) {
      return Conflict(flags, "routing-soft-cap", "verify-hits", "with a cap an answer depends on what else runs");
    }
    if (config.batch_invariant) {
      return Conflict(flags, "routing-soft-cap", "batch-invariant", "with a cap an answer depends on what else runs");
    }
  }
  if (adaptive && config.tensor_parallel_size * config.data_parallel_size == 1 &&
      !config.routing_virtual_ranks.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.Describe("moe-routing"),
                     " balances ranks, and there is only one (--routing-virtual-ranks tries it all the same)"));
  }
  return absl::OkStatus();
}

// The whole flag table of `serve` with the variables it is bound to.
struct ServeFlags {
  ServeFlags() {
    AddNetworkFlags(flags, result.config);
    AddServingFlags(flags, result.config);
    AddLayoutFlags(flags, result.config, &gpus);
    flags.Group("Other");
    flags.String("config", &config_file, "FILE",
                 "TOML file with flag names as keys; environment and flags override it");
    flags.Bool("print-config", &result.print_config, "print the values and where each came from, and exit");
    flags.Bool("help", &result.help, "print this text");
  }
  ServeFlags(const ServeFlags&) = delete;
  ServeFlags& operator=(const ServeFlags&) = delete;

  FlagSet flags;
  ServerCommandLine result;
  std::string gpus;
  std::string config_file;
};

}  // namespace

void AddLayoutFlags(FlagSet& flags, ServerConfig& config, std::string* gpus) {
  flags.Group("Device and layout");
  flags.Choice("device", &config.device, {"auto", "cpu", "cuda"}, "where the model runs");
  flags.String("gpus", gpus, "LIST", "GPU numbers, e.g. 0,1 (default: as many as the layout needs)");
  flags.Int("threads", &config.threads, {1, 4096}, "CPU threads (default: the CPUs of the cgroup)");
  flags.Int("tensor-parallel-size", &config.tensor_parallel_size, {1, 1024}, "GPUs that share each sequence");
  flags.Int("data-parallel-size", &config.data_parallel_size, {1, 1024}, "groups that take different sequences");
  flags.Choice("expert-transport", &config.expert_transport, {"all-gather", "all-to-all"},
               "how tokens reach the experts of other groups: every rank sees all tokens, or each gets those that "
               "chose its experts");
  flags.Int("rank-timeout", &config.rank_timeout, {1, 86400},
            "several ranks: seconds after which a step that does not end ends the server; five times that on the CPU");
  flags.Choice("moe-routing", &config.moe_routing, {"exact", "local-quantile"},
               "how experts are chosen: by the router alone, or so that ranks are busy alike");
  flags.Choice("compute-dtype", &config.compute_dtype, {"auto", "bf16", "fp32"}, "arithmetic of activations");
  flags.Choice("kv-cache-dtype", &config.kv_cache_dtype, {"auto", "bf16", "fp32"}, "latent pages");
  flags.Choice("kda-state-dtype", &config.kda_state_dtype, {"fp32", "bf16"}, "recurrent states");
  flags.Bool("batch-invariant", &config.batch_invariant, "the same answer whatever else runs, at some speed");
  flags.Number("latent-norm-eps", &config.latent_norm_eps, {1e-12, 1e-2}, "epsilon of the latent norms");
  flags.Choice("kl-router-weights", &config.kl_router_weights, {"unbiased", "biased"},
               "expert weights of Kimi-Linear: from scores without or with the selection bias");
  flags.Choice("expert-activations", &config.expert_activations, {"full", "mxfp8"},
               "inputs of MXFP4 experts: as they are, or rounded to MXFP8 as their training saw them");
  flags.Int("random-weights", &config.random_weights_seed, {0, 9e15},
            "no checkpoint: weights drawn from this seed, shapes from config.json");

  flags.Group("Memory");
  flags.Int("max-model-len", &config.max_model_len, {1, 1 << 24},
            "prompt and generated tokens of one sequence (default: the model's limit, cut to the pools)");
  flags.Number("gpu-memory-utilization", &config.gpu_memory_utilization, {0.05, 1.0},
               "share of each GPU's memory used");
  flags.Number("cpu-memory-gib", &config.cpu_memory_gib, {0.01, 1e6}, "memory of the pools on the CPU, GiB");
  flags.Int("page-size", &config.page_size, {1, 4096}, "tokens of a latent page");
  flags.Int("latent-pages", &config.latent_pages, {1, kAnyCount}, "latent pages; overrides the plan");
  flags.Int("state-slots", &config.state_slots, {1, kAnyCount},
            "recurrent states of live sequences; overrides the plan");
  flags.Int("snapshot-slots", &config.snapshot_slots, {0, kAnyCount}, "cached recurrent states; overrides the plan");

  flags.Group("Scheduling and prefix cache");
  flags.Int("max-num-seqs", &config.max_num_seqs, {1, 65536}, "most sequences that run at once");
  flags.Int("max-num-batched-tokens", &config.max_num_batched_tokens, {1, 1 << 20}, "most tokens of a step");
  flags.Int("prefill-chunk", &config.prefill_chunk, {1, 1 << 20}, "most tokens of one prompt in a step");
  flags.Bool("enable-prefix-caching", &config.enable_prefix_caching, "reuse the pages and states of equal prefixes");
  flags.Int("snapshot-interval", &config.snapshot_interval, {1, 1 << 24}, "tokens between cached states of a prompt");
  flags.Number("verify-hits", &config.verify_hits, {0, 1}, "share of cache hits that are recomputed and compared");

  AddRoutingFlags(flags, config);
}

absl::Status FinishLayoutFlags(const FlagSet& flags, const std::string& gpus, ServerConfig& config) {
  for (const absl::string_view word : absl::StrSplit(gpus, ',', absl::SkipEmpty())) {
    int gpu = -1;
    if (!absl::SimpleAtoi(word, &gpu) || gpu < 0 || gpu > 1023) {
      return absl::InvalidArgumentError(
          absl::StrCat(flags.Describe("gpus"), " must be GPU numbers separated by commas, not \"", gpus, "\""));
    }
    for (const int other : config.gpus) {
      if (other == gpu)
        return absl::InvalidArgumentError(absl::StrCat(flags.Describe("gpus"), " names GPU ", gpu, " twice"));
    }
    config.gpus.push_back(gpu);
  }
  if (config.device == "cpu" && !config.gpus.empty()) {
    return Conflict(flags, "gpus", "device", "the device is cpu");
  }
  const int64_t all_ranks = config.tensor_parallel_size * config.data_parallel_size;
  if (all_ranks % config.place.processes != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--tensor-parallel-size times --data-parallel-size is ", all_ranks,
                                                   ", which does not divide among the launcher's ",
                                                   config.place.processes, " processes"));
  }
  const int64_t ranks = all_ranks / config.place.processes;  // of this process
  if (!config.gpus.empty() && static_cast<int64_t>(config.gpus.size()) != ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.Describe("gpus"), " names ", config.gpus.size(), " GPUs, but --tensor-parallel-size times ",
                     "--data-parallel-size is ", all_ranks,
                     config.place.processes > 1 ? absl::StrCat(", ", ranks, " of them in this process") : ""));
  }
  if (const absl::Status status = CheckRoutingFlags(flags, config); !status.ok()) return status;
  if (config.device == "cpu") {
    const absl::Status status = CheckDeviceConflicts(config, /*is_cpu=*/true);
    if (!status.ok()) return status;
  }
  if (config.prefill_chunk.has_value() && config.max_num_batched_tokens.has_value() &&
      *config.prefill_chunk > *config.max_num_batched_tokens) {
    return Conflict(flags, "prefill-chunk", "max-num-batched-tokens",
                    absl::StrCat(*config.prefill_chunk, " is more than ", *config.max_num_batched_tokens));
  }
  if (config.max_num_seqs.has_value() && config.max_num_batched_tokens.has_value() &&
      *config.max_num_seqs > *config.max_num_batched_tokens * config.data_parallel_size) {
    return Conflict(flags, "max-num-seqs", "max-num-batched-tokens",
                    absl::StrCat(*config.max_num_seqs, " sequences need a token each, the step holds ",
                                 *config.max_num_batched_tokens));
  }
  if (config.max_num_seqs.has_value() && config.state_slots.has_value() &&
      *config.max_num_seqs > *config.state_slots * config.data_parallel_size) {
    return Conflict(flags, "max-num-seqs", "state-slots",
                    absl::StrCat(*config.max_num_seqs, " sequences need a state each, there are ", *config.state_slots,
                                 config.data_parallel_size > 1 ? " in each group" : ""));
  }
  if (!config.enable_prefix_caching) {
    for (const char* name : {"verify-hits", "snapshot-slots", "snapshot-interval"}) {
      const bool asks = flags.IsSet(name) && !(std::string_view(name) == "verify-hits" && config.verify_hits == 0) &&
                        !(std::string_view(name) == "snapshot-slots" && config.snapshot_slots.value_or(0) == 0);
      if (asks) return Conflict(flags, name, "enable-prefix-caching", "prefix caching is off");
    }
  } else if (config.snapshot_interval % config.page_size != 0) {
    // States are kept at page boundaries only.
    return absl::InvalidArgumentError(absl::StrCat(flags.Describe("snapshot-interval"), " (", config.snapshot_interval,
                                                   ") must be a multiple of --page-size (", config.page_size, ")"));
  }
  return absl::OkStatus();
}

absl::Status CheckDeviceConflicts(const ServerConfig& config, bool is_cpu) {
  if (!is_cpu) return absl::OkStatus();
  const std::pair<const char*, const std::string*> dtypes[] = {{"--compute-dtype", &config.compute_dtype},
                                                               {"--kv-cache-dtype", &config.kv_cache_dtype},
                                                               {"--kda-state-dtype", &config.kda_state_dtype}};
  for (const auto& [name, value] : dtypes) {
    if (*value == "bf16") {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " bf16 conflicts with the device: the CPU computes and caches in fp32"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ServerCommandLine> ParseServerCommandLine(const std::vector<std::string>& args, const GetEnv& getenv,
                                                         const std::vector<std::string>& variables) {
  ServeFlags declared;
  FlagSet& flags = declared.flags;
  ServerConfig& config = declared.result.config;

  std::vector<std::string> positional;
  absl::Status status = flags.ParseArgs(args, &positional);
  if (!status.ok()) return status;
  if (const auto path = flags.Early("config", kEnvPrefix, getenv); path.has_value()) {
    const absl::StatusOr<std::string> text = ReadTextFile(*path);
    if (!text.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(flags.Describe("config"), ": ", text.status().message()));
    }
    status = flags.ParseToml(*text, *path);
    if (!status.ok()) return status;
  }
  status = flags.ParseEnv(kEnvPrefix, getenv);
  if (!status.ok()) return status;
  declared.result.warnings = flags.UnknownVariables(kEnvPrefix, variables);
  status = flags.Resolve();
  if (!status.ok()) return status;
  if (declared.result.help) return std::move(declared.result);

  if (positional.size() == 1) config.model_dir = positional[0];
  if (positional.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("one MODEL_DIR is served, not ", positional.size(), ": ", positional[0], " and ", positional[1]));
  }
  if (config.model_dir.empty() && !declared.result.print_config) {
    std::string message = "MODEL_DIR is missing";
    if (config.served_model_names.size() > 1) absl::StrAppend(&message, " (it must stand before --served-model-name)");
    return absl::InvalidArgumentError(message);
  }
  const absl::StatusOr<ProcessPlace> place = LaunchPlace(getenv);
  if (!place.ok()) return place.status();
  config.place = *place;
  status = FinishLayoutFlags(flags, declared.gpus, config);
  if (!status.ok()) return status;
  status = CheckServing(flags, config);
  if (!status.ok()) return status;
  declared.result.values = flags.PrintValues();
  if (config.served_model_names.empty() && !config.model_dir.empty()) {
    config.served_model_names = {ModelNameOf(config.model_dir)};
  }
  return std::move(declared.result);
}

std::string ServerFlagsHelp() { return ServeFlags().flags.Help(); }

}  // namespace k3
