#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "nlohmann/json_fwd.hpp"
#include "server/commands/bench_client.h"
#include "server/commands/bench_config.h"
#include "server/commands/bench_runner.h"
#include "server/commands/bench_stats.h"

namespace k3 {

// One run with its figures.
struct BenchRun {
  BenchLoad load;
  BenchSummary summary;
  std::map<std::string, BenchSummary> kinds;
  std::vector<RequestRecord> records;
};

// All figures, one column per run, one row per figure.
std::string BenchTable(const BenchConfig& config, const BenchServerInfo& server, uint64_t seed,
                       const std::vector<BenchRun>& runs);

// The same with settings, and with --save-requests the times of every request. Milliseconds and seconds as the key
// says.
nlohmann::ordered_json BenchJson(const BenchConfig& config, const BenchServerInfo& server, uint64_t seed,
                                 const std::vector<BenchRun>& runs);

}  // namespace k3
