#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "server/grammar/grammar_engine.h"

namespace k3 {

// Compiles grammars on a few threads of its own, so that neither event loops nor the engine wait, and keeps the latest.
// A grammar that takes too long is refused, and remembered as such: what asks for it again is refused at once.
// Thread-safe.
class GrammarPool {
 public:
  struct Options {
    int threads = 2;
    std::chrono::milliseconds time_limit{10'000};  // from the request to the compiled grammar
    size_t max_waiting = 256;                      // distinct grammars
    size_t max_bytes = size_t{64} << 20;           // of one grammar
    size_t cache_bytes = size_t{512} << 20;        // of all that are kept
    size_t cache_entries = 2048;
  };
  using Result = absl::StatusOr<std::shared_ptr<const CompiledGrammar>>;
  using Done = std::function<void(Result)>;

  GrammarPool(Options options, std::unique_ptr<GrammarEngine> engine);
  ~GrammarPool();
  GrammarPool(const GrammarPool&) = delete;
  GrammarPool& operator=(const GrammarPool&) = delete;

  // Calls `done` exactly once: at once when the grammar is known, else on a thread of the pool. INVALID_ARGUMENT when
  // it does not compile in time and size, RESOURCE_EXHAUSTED when too many wait.
  void Get(const GrammarNode& root, Done done);

  // Waits a moment for compilations that still run, then leaves them to themselves; whoever waits for one gets
  // UNAVAILABLE, and nobody is called afterwards.
  void Stop();

  size_t cached_bytes() const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;  // the threads hold it too: one that never comes back must not hold the server up
};

}  // namespace k3
