#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/step.h"

namespace k3::testing {

// A StepRunner that works like a device: what is submitted runs later, in order, on a thread of its own, while the next
// step is planned. Tokens that a plan does not know come from the step before. `inner` runs one step at a time.
class DelayedRunner : public StepRunner {
 public:
  explicit DelayedRunner(StepRunner& inner) : inner_(inner), thread_([this] { Work(); }) {}
  ~DelayedRunner() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  int max_in_flight() const override { return 2; }
  absl::Status Submit(const StepPlan& plan) override {
    std::lock_guard lock(mutex_);
    if (!failed_.ok()) return failed_;
    ++submitted_;
    most_in_flight_ = std::max(most_in_flight_, submitted_ - waited_);
    work_.push_back([this, plan] { RunStep(plan); });
    wake_.notify_all();
    return absl::OkStatus();
  }
  absl::Status Wait(StepResult* result) override {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [this] { return !results_.empty() || !failed_.ok(); });
    if (results_.empty()) return failed_;
    *result = std::move(results_.front());
    results_.pop_front();
    ++waited_;
    return absl::OkStatus();
  }
  absl::Status Run(const StepPlan& plan, StepResult* result) override {
    if (absl::Status status = Submit(plan); !status.ok()) return status;
    return Wait(result);
  }
  void Scrub(int32_t rank, const std::vector<PageId>& pages, const std::vector<StateSlot>& slots) override {
    std::lock_guard lock(mutex_);
    work_.push_back([this, rank, pages, slots] { inner_.Scrub(rank, pages, slots); });
    wake_.notify_all();
  }
  int32_t vocab_size() const override { return inner_.vocab_size(); }

  // Steps submitted and not waited for, at most.
  int64_t most_in_flight() const {
    std::lock_guard lock(mutex_);
    return most_in_flight_;
  }

 private:
  void Work() {
    while (true) {
      std::function<void()> next;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stopping_ || !work_.empty(); });
        if (work_.empty()) return;
        next = std::move(work_.front());
        work_.pop_front();
      }
      next();
    }
  }

  void RunStep(StepPlan plan) {
    {
      std::lock_guard lock(mutex_);
      if (!failed_.ok()) return;  // a lost device runs nothing more
    }
    for (size_t r = 0; r < plan.ranks.size(); ++r) {
      for (int32_t& token : plan.ranks[r].tokens) {
        if (token < 0) token = std::max(0, last_.ranks.at(r).token.at(static_cast<size_t>(RowOfToken(token))));
      }
    }
    absl::Status status;
    try {
      status = inner_.Run(plan, &last_);
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    }
    std::lock_guard lock(mutex_);
    if (status.ok() && failed_.ok()) {
      results_.push_back(last_);
    } else if (failed_.ok()) {
      failed_ = status;
    }
    wake_.notify_all();
  }

  StepRunner& inner_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> work_;  // guarded by mutex_, as all up to the working thread's own
  std::deque<StepResult> results_;
  absl::Status failed_;
  int64_t submitted_ = 0;
  int64_t waited_ = 0;
  int64_t most_in_flight_ = 0;
  bool stopping_ = false;
  StepResult last_;  // the working thread's own
  std::thread thread_;
};

}  // namespace k3::testing
