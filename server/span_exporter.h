#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/trace_context.h"

namespace k3 {

// One ended request as a trace sees it. Holds no text of the request.
struct RequestSpan {
  TraceContext context;
  std::string name;  // "chat", "text_completion", ...
  std::string request_id;
  std::string model;
  std::chrono::system_clock::time_point start;
  std::chrono::system_clock::time_point end;
  bool ok = true;
  std::string outcome;  // stop, length, ... or the status code's name
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;
  int32_t completion_tokens = 0;
  double queue_seconds = 0;
  double prefill_seconds = 0;
  double decode_seconds = 0;
};

// The body of an OTLP/HTTP export in JSON.
std::string SpansToOtlpJson(const std::vector<RequestSpan>& spans, const std::string& version);

// Sends spans to an OpenTelemetry collector (OTLP over HTTP, JSON). Add only puts into a bounded queue; a thread sends
// batches, and what the collector does not take in time is dropped and counted, never waited for.
class SpanExporter {
 public:
  struct Options {
    std::string endpoint;  // http://HOST[:4318][/v1/traces]
    std::string version;
    size_t max_queue = 4096;
    size_t max_batch = 512;
    std::chrono::milliseconds interval{1000};
    std::chrono::milliseconds timeout{3000};  // for each of connecting, sending and the reply
  };
  // INVALID_ARGUMENT for an endpoint that is no http URL.
  static absl::StatusOr<std::unique_ptr<SpanExporter>> Start(Options options);
  // Tries once more to send what waits.
  ~SpanExporter();

  void Add(RequestSpan span);

  uint64_t exported() const { return exported_.load(); }
  uint64_t dropped() const { return dropped_.load(); }

 private:
  struct Target {
    std::string host;
    std::string port;
    std::string path;
  };
  SpanExporter(Options options, Target target);
  void Run();
  absl::Status Send(const std::string& body) const;

  const Options options_;
  const Target target_;
  std::atomic<uint64_t> exported_{0};
  std::atomic<uint64_t> dropped_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<RequestSpan> queue_;  // guarded by mutex_, as the next one
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace k3
