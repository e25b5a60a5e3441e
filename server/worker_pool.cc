#include "server/worker_pool.h"

#include <limits>
#include <utility>

namespace k3 {

WorkerPool::WorkerPool(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

WorkerPool::~WorkerPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::Post(std::function<void()> task) { TryPost(std::move(task), std::numeric_limits<size_t>::max()); }

bool WorkerPool::TryPost(std::function<void()> task, size_t limit) {
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    if (tasks_.size() >= limit) return false;
    tasks_.push_back(std::move(task));
    wake = idle_ > 0;  // busy threads look at the queue before they sleep
  }
  if (wake) wake_.notify_one();
  return true;
}

void WorkerPool::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    while (tasks_.empty()) {
      if (stopping_) return;
      ++idle_;
      wake_.wait(lock);
      --idle_;
    }
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what the task holds is released outside the lock
    lock.lock();
  }
}

}  // namespace k3
