#pragma once

#include <atomic>
#include <memory>
#include <string>

namespace k3::testing {

// How a scripted server answers every generation request: waits, then sends max_tokens tokens in messages of a fixed
// size at a fixed pace. Deterministic, so that a client's figures are known beforehand.
struct ReplyScript {
  double first_ms = 0;
  double gap_ms = 0;
  int tokens_per_message = 1;
  int refuse_every = 0;         // each n-th request: RESOURCE_EXHAUSTED, or 429
  int break_every = 0;          // each n-th request: ends after its first token, as a crash would
  bool hide_tokens = false;     // HTTP: chunks without a running total
  bool close_silently = false;  // HTTP: closes the connection after a reply, though it said keep-alive
};

// What a scripted server saw.
struct ServerCounts {
  std::atomic<int> requests{0};
  std::atomic<int> connections{0};  // HTTP only
  std::atomic<int> running{0};
  std::atomic<int> most_running{0};
  std::atomic<int64_t> prompt_tokens{0};
};

// GenerationService and ModelService on a free port of the loopback interface.
class ScriptedGrpcServer {
 public:
  explicit ScriptedGrpcServer(const ReplyScript& script);
  ~ScriptedGrpcServer();
  std::string target() const;
  const ServerCounts& counts() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// /v1/models, /v1/completions and /v1/chat/completions on a free port of the loopback interface.
class ScriptedHttpServer {
 public:
  explicit ScriptedHttpServer(const ReplyScript& script);
  ~ScriptedHttpServer();
  std::string url() const;
  const ServerCounts& counts() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3::testing
