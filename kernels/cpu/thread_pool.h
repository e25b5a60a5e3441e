#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace k3 {

// CPUs that this process may use: the affinity mask, cut by the cgroup's CPU quota (v1 and v2), at least 1.
int UsableCpus();

// Runs loops of independent tasks. The caller takes part and returns when every task is done; it never waits for a
// worker that took no task, so a worker that the system does not schedule costs nothing but its share of the work.
// Workers spin for a few tens of microseconds after a loop (the next one usually follows at once) and then sleep.
// One thread at a time may call For; tasks must not throw and must not call For.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, thread) for task in [0, tasks), thread in [0, threads()). At most 2^24 - 1 tasks.
  template <typename Body>
  void For(int64_t tasks, const Body& body) {
    if (tasks <= 1 || workers_.empty()) {
      for (int64_t i = 0; i < tasks; ++i) body(i, 0);
      return;
    }
    Run(
        tasks, [](const void* b, int64_t task, int thread) { (*static_cast<const Body*>(b))(task, thread); }, &body);
  }

 private:
  using Call = void (*)(const void* body, int64_t task, int thread);

  void Run(int64_t tasks, Call call, const void* body);
  void Work(int thread);
  // Takes and runs tasks of the current loop until none is left.
  void TakeTasks(int thread);

  // The open loop in one word, so that a late worker can never take a task of one loop by the limit of another:
  // bits 63..48 loop number, 47..24 task count, 23..0 next task.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> loops_{0};  // bumped per loop; what sleeping workers wait on
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> body_{nullptr};
  std::vector<std::thread> workers_;
};

}  // namespace k3
