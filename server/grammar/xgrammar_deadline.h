#pragma once

// Compiled into the sources of the grammar library that do its long work (a forced include, see CMakeLists.txt),
// because the library has no way to be stopped: every character that a parser tries asks whether the thread's time is
// up.

#include <stdexcept>

#include "earley_parser.h"  // of the grammar library; before the macro below

namespace xgrammar {

// Of the calling thread.
double ProcessorSeconds();

struct DeadlinePassed : std::runtime_error {
  DeadlinePassed() : std::runtime_error("takes too long") {}
};

// Throws once the deadline of the calling thread has passed.
void CheckDeadline();

// Bounds the library's work in the calling thread while it lives. Seconds of the thread's processor time: a busy
// machine makes nothing late.
class ScopedDeadline {
 public:
  explicit ScopedDeadline(double seconds);
  ~ScopedDeadline();
  ScopedDeadline(const ScopedDeadline&) = delete;
  ScopedDeadline& operator=(const ScopedDeadline&) = delete;

 private:
  double before_;
};

}  // namespace xgrammar

#ifdef K3_DEADLINE_WHILE_COMPILING
#define Advance(...) (::xgrammar::CheckDeadline(), Advance(__VA_ARGS__))
#endif
#ifdef K3_DEADLINE_WHILE_FOLLOWING
#define PopLastStates(...) (::xgrammar::CheckDeadline(), PopLastStates(__VA_ARGS__))
#endif
