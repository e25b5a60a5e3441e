#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "server/commands/bench_client.h"
#include "server/commands/bench_config.h"
#include "server/commands/bench_workload.h"

namespace k3 {

// How one run loads the server: a rate, a concurrency, or neither for the trace's own times.
struct BenchLoad {
  std::optional<double> rate;
  std::optional<int64_t> concurrency;
  std::string Name() const;  // e.g. "8 req/s", "concurrency 4"
};

struct BenchProgress {
  int64_t sent = 0;
  int64_t done = 0;
  int64_t failed = 0;
  int64_t total = 0;
  int64_t output_tokens = 0;  // of requests that ended
  double seconds = 0;
};

// Sends the workload under the load and waits until every reply has ended. `progress` is called from this thread, some
// times a second. Open loop never waits for the server: a request is sent when it is due, however many are under way.
std::vector<RequestRecord> RunBenchLoad(const BenchConfig& config, const BenchLoad& load, const Workload& workload,
                                        BenchClient& client, const std::function<void(const BenchProgress&)>& progress);

}  // namespace k3
