#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <vector>

#include "engine/request.h"

namespace k3::testing {

// A TokenSink that keeps what it is told and checks the order of events: one admission at most, every choice finished
// once, one final event, nothing after it. Safe to read from another thread.
class RecordingSink : public TokenSink {
 public:
  struct Choice {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    std::vector<std::vector<TopLogprob>> tops;
    int finishes = 0;
    FinishReason reason = FinishReason::kError;
    int32_t stop_token = -1;
  };

  explicit RecordingSink(int32_t choices = 1) : choices_(static_cast<size_t>(choices)) {}

  void OnAdmitted(int32_t cached_tokens) override {
    std::lock_guard lock(mutex_);
    EXPECT_EQ(finals_, 0);
    EXPECT_EQ(++admissions_, 1);
    cached_tokens_ = cached_tokens;
  }
  void OnPrefillProgress(int32_t done, int32_t total) override {
    std::lock_guard lock(mutex_);
    EXPECT_EQ(finals_, 0);
    EXPECT_GT(done, progress_);
    EXPECT_LE(done, total);
    progress_ = done;
  }
  void OnPromptLogprob(int32_t index, const TokenLogprob& logprob) override {
    std::lock_guard lock(mutex_);
    EXPECT_EQ(finals_, 0);
    EXPECT_EQ(index, static_cast<int32_t>(prompt_logprobs_.size()) + 1);
    prompt_logprobs_.push_back(logprob.logprob);
  }
  void OnToken(int32_t choice, int32_t token, const TokenLogprob* logprob) override {
    {
      std::lock_guard lock(mutex_);
      EXPECT_EQ(finals_, 0);
      Choice& at = choices_[static_cast<size_t>(choice)];
      EXPECT_EQ(at.finishes, 0);
      at.tokens.push_back(token);
      if (logprob != nullptr) {
        at.logprobs.push_back(logprob->logprob);
        at.tops.emplace_back(logprob->top.begin(), logprob->top.end());
      }
    }
    changed_.notify_all();
  }
  void OnChoiceFinished(int32_t choice, FinishReason reason, int32_t stop_token) override {
    std::lock_guard lock(mutex_);
    EXPECT_EQ(finals_, 0);
    Choice& at = choices_[static_cast<size_t>(choice)];
    EXPECT_EQ(++at.finishes, 1);
    at.reason = reason;
    at.stop_token = stop_token;
  }
  void OnFinished(const absl::Status& status, const RequestUsage& usage) override {
    {
      std::lock_guard lock(mutex_);
      EXPECT_EQ(++finals_, 1);
      for (const Choice& choice : choices_) EXPECT_EQ(choice.finishes, 1);
      status_ = status;
      usage_ = usage;
    }
    changed_.notify_all();
  }

  bool done() const {
    std::lock_guard lock(mutex_);
    return finals_ > 0;
  }
  // False after `seconds` without a final event.
  bool Wait(double seconds = 30) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return finals_ > 0; });
  }
  bool WaitForTokens(size_t count, int32_t choice = 0, double seconds = 30) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
      return finals_ > 0 || choices_[static_cast<size_t>(choice)].tokens.size() >= count;
    });
  }
  Choice choice(int32_t index = 0) const {
    std::lock_guard lock(mutex_);
    return choices_[static_cast<size_t>(index)];
  }
  std::vector<int32_t> tokens(int32_t index = 0) const { return choice(index).tokens; }
  int finals() const { return Read(finals_); }
  int admissions() const { return Read(admissions_); }
  int32_t cached_tokens() const { return Read(cached_tokens_); }
  absl::Status status() const { return Read(status_); }
  RequestUsage usage() const { return Read(usage_); }
  std::vector<float> prompt_logprobs() const { return Read(prompt_logprobs_); }

 private:
  template <typename T>
  T Read(const T& value) const {
    std::lock_guard lock(mutex_);
    return value;
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<Choice> choices_;
  std::vector<float> prompt_logprobs_;
  int admissions_ = 0;
  int finals_ = 0;
  int32_t cached_tokens_ = -1;
  int32_t progress_ = 0;
  absl::Status status_ = absl::UnknownError("no final event yet");
  RequestUsage usage_;
};

}  // namespace k3::testing
