#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/commands/bench_config.h"
#include "server/commands/bench_request.h"

namespace k3 {

// The OpenAI routes as the load harness uses them: request bodies and the event stream of replies. No sockets.

// "/v1/completions" or "/v1/chat/completions".
const char* OpenAiRoute(const BenchConfig& config);
std::string OpenAiBody(const BenchConfig& config, const BenchRequest& request, const std::string& model);

// A short kind for a refusal: status and the body's error code or type, e.g. "http 429 rate_limit_error".
std::string OpenAiErrorKind(int status, std::string_view body);

// Reads a server-sent event stream piece by piece and notes when tokens came. Servers that answer
// continuous_usage_stats tell the tokens of each chunk; for others a chunk with text counts as one token, and Finish
// spreads what the final usage counts besides over the chunks after the first.
class OpenAiStreamReader {
 public:
  // Appends to `record`, which must outlive the reader.
  explicit OpenAiStreamReader(RequestRecord* record) : record_(record) {}

  void Feed(std::string_view bytes, Clock::time_point now);
  bool done() const { return done_; }
  // The stream has ended. Sets the record's error unless it ended as it should.
  void Finish();

 private:
  void Line(std::string_view line, Clock::time_point now);
  void Chunk(std::string_view json, Clock::time_point now);

  RequestRecord* const record_;
  std::string partial_;   // a line without its end
  bool done_ = false;     // [DONE] was seen
  bool counted_ = false;  // chunks tell their tokens
  int64_t usage_tokens_ = -1;
};

}  // namespace k3
