#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/request.h"
#include "server/grammar/grammar_node.h"
#include "server/text/tokenizer.h"

namespace k3 {

// A grammar prepared for one vocabulary. Immutable; shared by all choices that use it.
class CompiledGrammar {
 public:
  virtual ~CompiledGrammar() = default;
  // For an answer whose first text, `begun`, is in the prompt already. Null when that does not fit the grammar.
  virtual std::unique_ptr<TokenConstraint> NewConstraint(const std::string& begun = "") const = 0;
  virtual size_t bytes() const = 0;
};

// Turns grammars into token masks for one tokenizer. Thread-safe.
class GrammarEngine {
 public:
  virtual ~GrammarEngine() = default;
  // Blocks for milliseconds up to many seconds, whatever the grammar: see GrammarPool. INVALID_ARGUMENT when it cannot
  // be compiled, or when following it would hold the engine up; DEADLINE_EXCEEDED when it was given up after
  // `time_limit` of the thread's processor time.
  virtual absl::StatusOr<std::shared_ptr<const CompiledGrammar>> Compile(
      const GrammarNode& root, std::chrono::milliseconds time_limit) const = 0;
};

// `vocab_size` is the model's, which may exceed the tokenizer's; `stop_ids` end an answer and are allowed where the
// grammar is complete. Null when the build has no grammar library.
std::unique_ptr<GrammarEngine> MakeGrammarEngine(const Tokenizer& tokenizer, int32_t vocab_size,
                                                 std::vector<int32_t> stop_ids);

}  // namespace k3
