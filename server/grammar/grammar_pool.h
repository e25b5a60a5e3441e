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

// Compiles grammars on threads of its own, so that neither event loops nor the engine wait, and keeps the latest.
//
// Two kinds of threads: quick ones for what looks cheap (GrammarNode::Cost), the cheapest first, and slow ones for what
// is large and for what was not done in the quick ones' time, of which clients' own grammars get the least. So a flood
// of hard grammars holds up other hard grammars only. What takes too long is given up, refused, and remembered as such;
// where a line is too long, whoever asks is told at once to come back.
//
// Thread-safe.
class GrammarPool {
 public:
  struct Options {
    int quick_threads = 2;
    int slow_threads = 1;
    double quick_cost = 128 << 10;  // the most that counts as cheap
    // Of processor time, of a compilation by a quick thread; the second: of a client's own grammar.
    std::chrono::milliseconds quick_limit{2'000};
    std::chrono::milliseconds foreign_limit{250};
    std::chrono::milliseconds time_limit{10'000};  // from the request to the compiled grammar
    size_t max_waiting = 256;                      // distinct grammars for the quick threads
    size_t max_slow_waiting = 16;                  // for the slow ones
    size_t max_waiters = 4'096;                    // requests that wait for one grammar
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
  // it does not compile in time and size, RESOURCE_EXHAUSTED when too many wait or its turn did not come in time.
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
