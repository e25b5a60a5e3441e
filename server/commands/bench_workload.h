#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/commands/bench_config.h"
#include "server/commands/bench_request.h"

namespace k3 {

// One line of a trace. Its prompt is given, or made: `prefix_blocks` name runs of 512 tokens, equal for equal ids, and
// the rest of `input_length` is the line's own.
struct TraceEntry {
  double seconds = 0;  // since the trace's first line
  int64_t input_length = 0;
  int64_t output_length = 0;
  std::vector<int64_t> prefix_blocks;
  std::vector<int32_t> prompt_tokens;
  std::string prompt_text;
};
inline constexpr int64_t kTraceBlockTokens = 512;

// Reads JSON lines with these keys, by ascending time:
//   timestamp             milliseconds
//   output_length         tokens to generate
//   input_length          prompt tokens, unless the prompt itself is there as
//   prompt                text, or
//   prompt_token_ids      ids
//   hash_ids              optional: ids of the prompt's 512-token blocks
// This is the form of the traces published with Mooncake. Errors name `path` and the line.
absl::StatusOr<std::vector<TraceEntry>> ParseTrace(std::string_view text, const std::string& path);

// The requests of a run, each made from (seed, run, index) alone: the same for the same settings, however they are
// issued. Different runs of one invocation share no prompt, so no run meets a prefix cache that an earlier one filled.
class Workload {
 public:
  Workload(const BenchConfig& config, std::vector<TraceEntry> trace, int32_t vocab_size, uint64_t seed, int64_t run);

  int64_t size() const { return size_; }
  BenchRequest Make(int64_t index) const;
  // Seconds from request `index - 1`, or from the start, to request `index`, for a mean of `rate` per second.
  double PoissonGap(int64_t index, double rate) const;

 private:
  void AppendPrompt(uint64_t stream, int64_t tokens, BenchRequest& request) const;

  const BenchConfig& config_;
  const std::vector<TraceEntry> trace_;
  const int32_t vocab_size_;
  const uint64_t seed_;
  const int64_t size_;
};

}  // namespace k3
