#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/process_place.h"
#include "server/flags.h"

namespace k3 {

// Every setting of `k3serve serve`; `plan` and `verify` take the part that decides memory and layout. Unset optionals
// are chosen at start-up from the model and the device.
struct ServerConfig {
  std::string model_dir;

  // Network.
  std::string host = "127.0.0.1";
  Port port = 8000;
  Port grpc_port = 50051;
  Port admin_port;
  Port probe_port;
  std::string api_key_file;
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;
  int64_t max_message_mib = 64;
  int64_t max_body_mib = 64;
  int64_t max_connections = 16384;
  std::optional<int64_t> max_streams_per_key;

  // Model.
  std::vector<std::string> served_model_names;  // never empty after Load: ModelNameOf the folder by default
  std::string tokenizer_dir;                    // empty: the model's folder
  std::optional<int64_t> max_model_len;
  std::string default_effort;  // low, high, max, none; empty: the model's own (max for K3)
  std::optional<int64_t> random_weights_seed;
  double latent_norm_eps = 1e-6;
  std::string kl_router_weights = "unbiased";
  std::string expert_activations = "full";

  // Device and layout.
  std::string device = "auto";
  std::vector<int> gpus;  // empty: all that the layout needs, from 0
  std::optional<int64_t> threads;
  int64_t tensor_parallel_size = 1;
  int64_t data_parallel_size = 1;
  std::string expert_transport = "all-gather";
  std::string moe_routing = "exact";
  bool measure_routing = false;
  std::optional<int64_t> routing_virtual_ranks;
  double routing_kappa = 1.05;
  double routing_window = 1;
  int64_t routing_update_steps = 4;
  int64_t routing_decay = 2;
  std::optional<double> routing_eta;
  double routing_max_bias = 0.10;
  int64_t routing_epoch_updates = 1;
  bool routing_guards = true;
  std::optional<double> routing_soft_cap;
  double routing_soft_cap_tau = 0.03;
  std::string routing_log;
  std::string routing_replay;  // FILE:RANK.EPOCH
  ProcessPlace place;          // from the launcher's variables, not a flag
  int64_t rank_timeout = 60;   // seconds
  std::string kda_state_dtype = "fp32";
  std::string kv_cache_dtype = "auto";
  std::string compute_dtype = "auto";
  bool batch_invariant = false;

  // Memory.
  double gpu_memory_utilization = 0.90;
  std::optional<double> cpu_memory_gib;
  int64_t page_size = 64;
  std::optional<int64_t> latent_pages;
  std::optional<int64_t> state_slots;
  std::optional<int64_t> snapshot_slots;

  // Scheduling and prefix cache.
  std::optional<int64_t> max_num_seqs;
  std::optional<int64_t> max_num_batched_tokens;
  std::optional<int64_t> prefill_chunk;
  int64_t max_queue = 256;
  std::optional<double> request_timeout_seconds;
  std::optional<double> queue_timeout_seconds;
  bool enable_prefix_caching = true;
  int64_t snapshot_interval = 1024;
  double verify_hits = 0;

  // Operation.
  std::string log_level = "info";
  std::string log_format = "text";
  std::string metrics_compat = "none";
  std::string otlp_endpoint;
  double drain_lag_seconds = 0;
  double shutdown_timeout_seconds = 30;
  bool vendor_strict = false;
  std::optional<int64_t> profile_steps;
};

// What else the command line of `serve` asks for.
struct ServerCommandLine {
  ServerConfig config;
  bool help = false;
  bool print_config = false;
  std::string values;  // the text of --print-config
  std::vector<std::string> warnings;
};

inline constexpr char kEnvPrefix[] = "K3SERVE_";

// Declares the flags that decide memory and layout, which `serve` and `plan` share. `gpus` is the text of --gpus;
// FinishLayoutFlags turns it into the list and checks what must hold between these flags.
void AddLayoutFlags(FlagSet& flags, ServerConfig& config, std::string* gpus);
absl::Status FinishLayoutFlags(const FlagSet& flags, const std::string& gpus, ServerConfig& config);

// Reads the arguments after `serve`, the environment and the file of --config. Every error is INVALID_ARGUMENT and
// names the flag, variable or key.
// `variables`: the names of the environment, for warnings about those that are no flag's.
absl::StatusOr<ServerCommandLine> ParseServerCommandLine(const std::vector<std::string>& args, const GetEnv& getenv,
                                                         const std::vector<std::string>& variables = {});

// What depends on the device chosen for "auto": the CPU computes and caches in fp32.
absl::Status CheckDeviceConflicts(const ServerConfig& config, bool is_cpu);

// The flags part of `k3serve serve --help`.
std::string ServerFlagsHelp();

}  // namespace k3
