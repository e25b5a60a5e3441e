#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace k3 {

// Threads that make the masks of the next step while the engine books the last one, so that a step with many
// constrained rows waits for the slowest mask and not for the sum of all. What nobody began when it is needed, the
// caller does itself: nothing waits behind other people's work. Thread-safe.
class MaskWorkers {
 public:
  // One piece of work, run once at most. It must not be touched by others until Take.
  class Job {
   public:
    explicit Job(std::function<void()> work) : work_(std::move(work)) {}

   private:
    friend class MaskWorkers;
    enum class State { kWaiting, kRunning, kDone, kTaken };
    std::function<void()> work_;
    State state_ = State::kWaiting;  // guarded by the mutex of the workers
  };

  // No threads: every job is left to the caller.
  explicit MaskWorkers(int threads);
  ~MaskWorkers();
  MaskWorkers(const MaskWorkers&) = delete;
  MaskWorkers& operator=(const MaskWorkers&) = delete;

  void Post(std::shared_ptr<Job> job);
  // True when the job has been done, perhaps after a wait; false when it never will be: the caller's turn.
  bool Take(Job& job);

 private:
  void Work();

  std::mutex mutex_;  // guards all below
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<std::shared_ptr<Job>> waiting_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace k3
