#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace k3 {

// A few threads that run posted tasks in order of arrival, so that slow or blocking-free work stays off event loops and
// the engine thread. Thread-safe.
class WorkerPool {
 public:
  explicit WorkerPool(int threads);
  // Runs what was posted before, then ends the threads.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  void Post(std::function<void()> task);
  // False, and the task is not taken, when `limit` tasks already wait.
  bool TryPost(std::function<void()> task, size_t limit);

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;  // guarded by mutex_
  int idle_ = 0;                             // guarded by mutex_
  bool stopping_ = false;                    // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace k3
