#include "server/grammar/mask_workers.h"

#include <utility>

namespace k3 {

MaskWorkers::MaskWorkers(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

MaskWorkers::~MaskWorkers() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    waiting_.clear();
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void MaskWorkers::Post(std::shared_ptr<Job> job) {
  if (threads_.empty()) return;
  {
    std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(job));
  }
  wake_.notify_one();
}

bool MaskWorkers::Take(Job& job) {
  std::unique_lock lock(mutex_);
  if (job.state_ == Job::State::kWaiting) job.state_ = Job::State::kTaken;
  done_.wait(lock, [&] { return job.state_ != Job::State::kRunning; });
  return job.state_ == Job::State::kDone;
}

void MaskWorkers::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
    if (stopping_) return;
    const std::shared_ptr<Job> job = std::move(waiting_.front());
    waiting_.pop_front();
    if (job->state_ != Job::State::kWaiting) continue;
    job->state_ = Job::State::kRunning;
    lock.unlock();
    job->work_();
    lock.lock();
    job->state_ = Job::State::kDone;
    done_.notify_all();
  }
}

}  // namespace k3
