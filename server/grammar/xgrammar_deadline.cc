#include "server/grammar/xgrammar_deadline.h"

#include <time.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace xgrammar {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int kCallsBetween = 2048;  // some tens of microseconds

thread_local double deadline = kNever;
thread_local int calls = 0;

}  // namespace

double ProcessorSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void CheckDeadline() {
  if (++calls < kCallsBetween) return;
  calls = 0;
  if (deadline != kNever && ProcessorSeconds() > deadline) throw DeadlinePassed();
}

ScopedDeadline::ScopedDeadline(double seconds) : before_(deadline) {
  deadline = std::min(deadline, ProcessorSeconds() + seconds);
}

ScopedDeadline::~ScopedDeadline() { deadline = before_; }

}  // namespace xgrammar
