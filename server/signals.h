#pragma once

#include <signal.h>

#include <chrono>

namespace k3 {

// SIGTERM, SIGINT and SIGHUP, taken synchronously by whoever waits. Made before any other thread, which inherits the
// mask; SIGPIPE is ignored from then on.
class Signals {
 public:
  Signals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGTERM);
    sigaddset(&set_, SIGINT);
    sigaddset(&set_, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    signal(SIGPIPE, SIG_IGN);
  }
  // The signal that came within this time; 0 for none.
  int Wait(std::chrono::nanoseconds time) const {
    const timespec limit{static_cast<time_t>(time.count() / 1000000000), static_cast<long>(time.count() % 1000000000)};
    const int signal = sigtimedwait(&set_, nullptr, &limit);
    return signal > 0 ? signal : 0;
  }

 private:
  sigset_t set_;
};

}  // namespace k3
