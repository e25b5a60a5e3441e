#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace k3 {

// Cuts text into the pieces that BPE works on, by K3's split pattern (every byte belongs to one piece).
//
// The pattern runs in PCRE2, compiled to machine code where PCRE2 can, on a string that holds each character's class
// instead of the character (unicode_classes.h). On classes the pattern's property tests and set intersections are plain
// one-byte sets; the result no longer depends on the Unicode version of the installed library; and a match's length is
// a number of characters.
//
// Immutable; any number of threads may call Split at once.
class Pretokenizer {
 public:
  enum class Engine { kJit, kInterpreter };

  // INTERNAL when PCRE2 refuses the pattern. A machine that forbids writable code falls back to the interpreter.
  static absl::StatusOr<std::unique_ptr<Pretokenizer>> Create(Engine engine = Engine::kJit);
  ~Pretokenizer();
  Pretokenizer(const Pretokenizer&) = delete;
  Pretokenizer& operator=(const Pretokenizer&) = delete;

  // Appends the end offset in bytes of every piece of `text`, in order. A byte that is not part of valid UTF-8 counts
  // as one character that is neither letter, number nor white space.
  void Split(std::string_view text, std::vector<uint32_t>* piece_ends) const;

  Engine engine() const { return engine_; }

 private:
  struct Compiled;
  Pretokenizer();

  std::unique_ptr<Compiled> compiled_;
  Engine engine_ = Engine::kInterpreter;
};

}  // namespace k3
