#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/request.h"

// What the load harness sends and what it writes down.
namespace k3 {

struct BenchRequest {
  int64_t index = 0;           // within its run
  std::string kind = "all";    // workloads that mix kinds report each of them too
  double arrival_seconds = 0;  // since the run's start; traces only
  // One of the two is set. Text is sent as it is, or as the only user message of a chat.
  std::vector<int32_t> prompt_tokens;
  std::string prompt_text;
  int32_t max_tokens = 0;
  uint64_t seed = 0;
};

// A message that carried generated tokens.
struct TokenArrival {
  Clock::time_point time;
  int32_t tokens = 0;
};

struct RequestRecord {
  int64_t index = 0;
  std::string kind;
  Clock::time_point scheduled;  // open loop: when it was due; else equal to sent
  Clock::time_point sent;
  Clock::time_point finished;
  std::vector<TokenArrival> arrivals;
  int32_t prompt_tokens = 0;  // as the server counts them
  int32_t cached_tokens = 0;
  std::string error;  // a short kind, e.g. "RESOURCE_EXHAUSTED" or "http 429"; empty when all went well

  bool ok() const { return error.empty(); }
  int64_t output_tokens() const {
    int64_t sum = 0;
    for (const TokenArrival& arrival : arrivals) sum += arrival.tokens;
    return sum;
  }
};

}  // namespace k3
