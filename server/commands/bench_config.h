#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/commands/client_access.h"
#include "server/flags.h"

namespace k3 {

enum class BenchInput { kIds, kText, kChat };
enum class WorkloadKind { kFixed, kNormal, kSharedPrefix, kLongContext, kTrace };

// Settings of `k3serve bench`, checked.
struct BenchConfig {
  // Where to.
  std::string target = "127.0.0.1:50051";  // gRPC, unless `url` is set
  std::string url;                         // http:// or https://, host, port
  std::string model;                       // empty: the server's first
  std::string input_name = "ids";
  BenchInput input = BenchInput::kIds;
  int64_t connections = 4;  // gRPC: HTTP/2 connections that share the streams
  double timeout_seconds = 600;
  ClientAccess access;

  // How hard. One run per entry; exactly one of the lists has entries, except that a trace alone may have neither.
  std::vector<double> request_rates;   // open loop, requests per second, Poisson; infinity sends all at once
  std::vector<int64_t> concurrencies;  // closed loop
  int64_t num_requests = 100;
  std::optional<double> duration_seconds;  // nothing is sent after it
  int64_t warmup = 1;

  // What.
  std::string workload_name = "fixed";
  WorkloadKind workload = WorkloadKind::kFixed;
  int64_t input_len = 512;
  int64_t output_len = 128;
  double input_stddev = 0;
  double output_stddev = 0;
  int64_t prefix_len = 1024;
  int64_t prefix_groups = 8;
  int64_t long_input_len = 32768;
  double long_share = 0.1;
  std::string trace_path;
  double trace_speed = 1;
  bool ignore_eos = true;
  double temperature = 0;
  bool bypass_prefix_cache = false;
  std::optional<int64_t> vocab_size;
  std::optional<int64_t> seed;  // unset: drawn, and told in the report

  // What comes out.
  std::optional<double> slo_ttft_ms;
  std::optional<double> slo_itl_ms;
  std::string json_path;
  std::string svg_path;
  bool save_requests = false;
  bool progress = true;

  bool help = false;

  bool is_http() const { return !url.empty(); }
};

// Reads the arguments after `bench`. Errors are INVALID_ARGUMENT and name the flag.
absl::StatusOr<BenchConfig> ParseBenchCommandLine(const std::vector<std::string>& args);

std::string BenchHelp();

}  // namespace k3
