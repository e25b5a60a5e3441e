#include "engine/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "tests/testing/delayed_runner.h"
#include "tests/testing/hash_model_runner.h"
#include "tests/testing/recording_sink.h"
#include "tests/testing/scheduler_harness.h"

namespace k3 {
namespace {

using testing::DelayedRunner;
using testing::Endless;
using testing::ExpectedTokens;
using testing::Greedy;
using testing::HashModel;
using testing::HashModelRunner;
using testing::RandomPrompt;
using testing::RecordingSink;
using testing::SchedulerHarness;

std::unique_ptr<Request> MakeRequest(std::vector<int32_t> prompt, const SamplingParams& sampling,
                                     std::shared_ptr<TokenSink> sink) {
  auto request = std::make_unique<Request>();
  request->prompt_tokens = std::move(prompt);
  request->sampling = sampling;
  request->sink = std::move(sink);
  return request;
}

// With and without a runner that works on one step while the next is planned.
class EngineTest : public ::testing::TestWithParam<bool> {
 protected:
  EngineTest() : config_(SchedulerHarness::SmallConfig()) {}

  void Start() {
    EngineConfig resolved = config_;
    ASSERT_TRUE(resolved.Resolve().ok());
    delayed_.reset();
    model_ = std::make_unique<HashModel>(config_.vocab_size);
    runner_ = std::make_unique<HashModelRunner>(*model_, resolved);
    runner_->before_step = [this](const StepPlan& plan) -> absl::Status {
      while (paused_.load() && !release_.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (delay_ms_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms_));
      return step_hook_ ? step_hook_(plan) : absl::OkStatus();
    };
    StepRunner* runner = runner_.get();
    if (GetParam()) {
      delayed_ = std::make_unique<DelayedRunner>(*runner_);
      runner = delayed_.get();
    }
    auto engine = Engine::Create(config_, *runner, observer_);
    ASSERT_TRUE(engine.ok()) << engine.status().ToString();
    engine_ = *std::move(engine);
  }

  struct Sent {
    RequestId id = 0;
    std::shared_ptr<RecordingSink> sink;
    std::vector<int32_t> prompt;
    SamplingParams sampling;
  };
  Sent Send(std::vector<int32_t> prompt, const SamplingParams& sampling) {
    Sent sent{0, std::make_shared<RecordingSink>(), prompt, sampling};
    auto id = engine_->Submit(MakeRequest(std::move(prompt), sampling, sent.sink));
    EXPECT_TRUE(id.ok()) << id.status().ToString();
    if (id.ok()) sent.id = *id;
    return sent;
  }
  void ExpectAlone(const Sent& sent) {
    ASSERT_TRUE(sent.sink->Wait());
    EXPECT_TRUE(sent.sink->status().ok()) << sent.sink->status().ToString();
    EXPECT_EQ(sent.sink->tokens(),
              ExpectedTokens(*model_, sent.prompt, sent.sampling, 0, config_.eos_token_ids).tokens);
  }
  // Gauges follow the last final event within one step.
  bool BecomesIdle() {
    for (int i = 0; i < 2000; ++i) {
      const EngineLoad load = engine_->Load();
      if (load.running == 0 && load.waiting == 0 && load.pages_used == 0 && load.state_slots_used == 0) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }

  EngineConfig config_;
  EngineObserver* observer_ = nullptr;
  std::unique_ptr<HashModel> model_;
  std::unique_ptr<HashModelRunner> runner_;
  std::unique_ptr<DelayedRunner> delayed_;
  std::atomic<bool> paused_{false}, release_{false};
  int delay_ms_ = 0;
  std::function<absl::Status(const StepPlan&)> step_hook_;
  std::mutex sinks_mutex_;
  std::vector<std::shared_ptr<RecordingSink>> sinks_;
  std::unique_ptr<Engine> engine_;  // last: its thread uses all of the above
};

TEST_P(EngineTest, AnswersAsTheModelAlone) {
  Start();
  std::vector<Sent> sent;
  for (uint64_t i = 0; i < 30; ++i) sent.push_back(Send(RandomPrompt(1 + i * 9, i), Endless(20)));
  for (const Sent& one : sent) ExpectAlone(one);
  EXPECT_TRUE(BecomesIdle());
  EXPECT_EQ(engine_->Load().generated_tokens, 600u);
  if (GetParam()) {
    EXPECT_EQ(delayed_->most_in_flight(), 2);
  }
}

TEST_P(EngineTest, ConfigurationIsChecked) {
  HashModel model(50);
  EngineConfig resolved = config_;
  ASSERT_TRUE(resolved.Resolve().ok());
  HashModelRunner runner(model, resolved);
  EXPECT_EQ(Engine::Create(config_, runner).status().code(),
            absl::StatusCode::kInvalidArgument);  // vocabularies differ
  config_.snapshot_interval = 17;
  EXPECT_EQ(Engine::Create(config_, runner).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(EngineTest, FullQueueIsRefusedWithARetryHint) {
  config_.max_queue = 3;
  config_.max_num_seqs = 1;
  paused_ = true;
  Start();
  std::vector<Sent> sent;
  sent.push_back(Send(RandomPrompt(10, 1), Greedy(2)));
  while (engine_->Load().running == 0) std::this_thread::yield();
  for (int i = 0; i < 3; ++i) sent.push_back(Send(RandomPrompt(10, 2), Greedy(2)));
  EXPECT_EQ(engine_->Load().waiting, 3);
  auto sink = std::make_shared<RecordingSink>();
  const absl::Status refused = engine_->Submit(MakeRequest(RandomPrompt(10, 3), Greedy(2), sink)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(refused.GetPayload(kRetryAfterPayload).has_value());
  EXPECT_GT(std::stoi(std::string(*refused.GetPayload(kRetryAfterPayload))), 0);
  release_ = true;
  for (const Sent& one : sent) ExpectAlone(one);
  EXPECT_EQ(sink->finals(), 0);  // a refused request's sink is never called
}

TEST_P(EngineTest, UnreachableDeadlineIsRefusedAtOnce) {
  delay_ms_ = 20;
  config_.max_num_batched_tokens = 64;
  config_.prefill_chunk = 32;
  Start();
  ExpectAlone(Send(RandomPrompt(200, 1), Endless(5)));  // measured: 64 tokens in 20 ms
  const auto submit = [&](size_t prompt, Clock::duration left) {
    auto request = MakeRequest(RandomPrompt(prompt, 2), Greedy(1), std::make_shared<RecordingSink>());
    request->deadline = Clock::now() + left;
    return engine_->Submit(std::move(request)).status();
  };
  const Clock::time_point begin = Clock::now();
  const absl::Status refused = submit(3000, std::chrono::milliseconds(300));
  EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds(100));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused.ToString();
  ASSERT_TRUE(refused.GetPayload(kRetryAfterPayload).has_value());
  // An idle engine could not do it either: the hint is what the deadline lacks, not the least delay.
  EXPECT_GT(std::stoi(std::string(*refused.GetPayload(kRetryAfterPayload))), 200);
  EXPECT_EQ(submit(10, std::chrono::milliseconds(-1)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(submit(100, std::chrono::seconds(60)).ok());
}

TEST_P(EngineTest, DeadlinesPassInTheQueueAndInDecode) {
  delay_ms_ = 5;
  config_.max_num_seqs = 1;
  Start();
  auto sink = std::make_shared<RecordingSink>();
  auto request = MakeRequest(RandomPrompt(10, 1), Endless(4000), sink);
  request->deadline = Clock::now() + std::chrono::milliseconds(150);
  // Nothing is measured yet, so it is accepted.
  ASSERT_TRUE(engine_->Submit(std::move(request)).ok());
  auto queued = std::make_shared<RecordingSink>();
  auto second = MakeRequest(RandomPrompt(10, 2), Endless(10), queued);
  second->deadline = Clock::now() + std::chrono::milliseconds(100);
  ASSERT_TRUE(engine_->Submit(std::move(second)).ok());
  ASSERT_TRUE(queued->Wait());
  EXPECT_EQ(queued->status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(queued->admissions(), 0);
  ASSERT_TRUE(sink->Wait());
  EXPECT_EQ(sink->status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_GT(sink->tokens().size(), 2u);
  EXPECT_TRUE(BecomesIdle());
}

TEST_P(EngineTest, CancelInEveryPhase) {
  Start();
  std::mt19937 random(1);
  std::vector<Sent> sent;
  for (int i = 0; i < 400; ++i) {
    Sent one = Send(RandomPrompt(1 + random() % 300, random() % 10), Endless(60));
    if (i % 4 == 0) one.sink->WaitForTokens(1 + random() % 50);
    if (i % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    engine_->Cancel(one.id);
    if (i % 5 == 0) engine_->Cancel(one.id);
    sent.push_back(std::move(one));
  }
  for (const Sent& one : sent) {
    ASSERT_TRUE(one.sink->Wait());
    EXPECT_EQ(one.sink->finals(), 1);
    EXPECT_TRUE(one.sink->status().ok() || absl::IsCancelled(one.sink->status()));
  }
  EXPECT_TRUE(BecomesIdle());
  ExpectAlone(Send(RandomPrompt(100, 5), Endless(20)));
}

TEST_P(EngineTest, GaugesFollowABurstOfCancels) {
  config_.max_num_seqs = 8;
  delay_ms_ = 1;
  Start();
  std::vector<Sent> sent;
  for (uint64_t i = 0; i < 40; ++i) sent.push_back(Send(RandomPrompt(20, i), Endless(3000)));
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(sent[static_cast<size_t>(i)].sink->WaitForTokens(2));
  EXPECT_EQ(engine_->Load().running, 8);
  EXPECT_EQ(engine_->Load().waiting, 32);
  EXPECT_GT(engine_->Load().pages_used, 0);
  for (const Sent& one : sent) engine_->Cancel(one.id);
  EXPECT_TRUE(BecomesIdle());
  uint64_t generated = 0;
  for (const Sent& one : sent) {
    ASSERT_TRUE(one.sink->Wait());
    generated += static_cast<uint64_t>(one.sink->usage().completion_tokens);
    EXPECT_EQ(one.sink->usage().completion_tokens, static_cast<int32_t>(one.sink->tokens().size()));
  }
  EXPECT_EQ(engine_->Load().generated_tokens, generated);
  EXPECT_EQ(engine_->Load().prompt_tokens, 40u * 20u);
}

TEST_P(EngineTest, StopChoiceEndsItAsStopped) {
  delay_ms_ = 1;
  Start();
  const Sent one = Send(RandomPrompt(20, 1), Endless(3000));
  ASSERT_TRUE(one.sink->WaitForTokens(3));
  engine_->StopChoice(one.id, 0);
  ASSERT_TRUE(one.sink->Wait());
  EXPECT_TRUE(one.sink->status().ok());
  EXPECT_EQ(one.sink->choice().reason, FinishReason::kStop);
  EXPECT_EQ(one.sink->choice().stop_token, -1);
  engine_->StopChoice(one.id, 0);  // ended
  engine_->StopChoice(12345, 0);   // unknown
  engine_->Cancel(12345);
  ExpectAlone(Send(RandomPrompt(20, 2), Endless(5)));
}

// The engine's callbacks may call it back.
class CancellingSink : public RecordingSink {
 public:
  void OnToken(int32_t choice, int32_t token, const TokenLogprob* logprob) override {
    RecordingSink::OnToken(choice, token, logprob);
    if (engine != nullptr) engine->Cancel(id.load());
  }
  EngineInterface* engine = nullptr;
  std::atomic<RequestId> id{0};
};

TEST_P(EngineTest, ASinkMayCancelFromItsCallback) {
  delay_ms_ = 2;
  Start();
  auto sink = std::make_shared<CancellingSink>();
  sink->engine = engine_.get();
  auto id = engine_->Submit(MakeRequest(RandomPrompt(10, 1), Endless(3000), sink));
  ASSERT_TRUE(id.ok());
  sink->id = *id;
  ASSERT_TRUE(sink->Wait());
  EXPECT_TRUE(absl::IsCancelled(sink->status()));
}

class ThrowingSink : public RecordingSink {
 public:
  explicit ThrowingSink(int where) : where_(where) {}
  void OnAdmitted(int32_t cached) override {
    RecordingSink::OnAdmitted(cached);
    if (where_ == 0) throw std::runtime_error("sink failed");
  }
  void OnToken(int32_t choice, int32_t token, const TokenLogprob* logprob) override {
    RecordingSink::OnToken(choice, token, logprob);
    if (where_ == 1) throw 7;
  }
  void OnChoiceFinished(int32_t choice, FinishReason reason, int32_t stop) override {
    RecordingSink::OnChoiceFinished(choice, reason, stop);
    if (where_ == 2) throw std::runtime_error("sink failed");
  }
  void OnFinished(const absl::Status& status, const RequestUsage& usage) override {
    final_status = status;
    ++final_calls;
    if (where_ < 2) return;  // the base class expects its choices to have been finished
    RecordingSink::OnFinished(status, usage);
    if (where_ == 3) throw std::runtime_error("sink failed");
  }
  absl::Status final_status;
  std::atomic<int> final_calls{0};

 private:
  int where_;
};

TEST_P(EngineTest, AThrowingSinkHarmsNobodyElse) {
  Start();
  std::vector<std::shared_ptr<ThrowingSink>> bad;
  std::vector<Sent> good;
  for (int where = 0; where < 4; ++where) {
    good.push_back(Send(RandomPrompt(30, static_cast<uint64_t>(where)), Endless(30)));
    bad.push_back(std::make_shared<ThrowingSink>(where));
    ASSERT_TRUE(engine_->Submit(MakeRequest(RandomPrompt(20, 9), Endless(30), bad.back())).ok());
  }
  for (const Sent& one : good) ExpectAlone(one);
  EXPECT_TRUE(BecomesIdle());
  for (const auto& sink : bad) EXPECT_EQ(sink->final_calls.load(), 1);
  EXPECT_EQ(bad[0]->final_status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(bad[1]->final_status.code(), absl::StatusCode::kInternal);
}

class SlowSink : public RecordingSink {
 public:
  void OnToken(int32_t choice, int32_t token, const TokenLogprob* logprob) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    RecordingSink::OnToken(choice, token, logprob);
  }
};

TEST_P(EngineTest, ASlowSinkDelaysButBreaksNothing) {
  Start();
  auto slow = std::make_shared<SlowSink>();
  ASSERT_TRUE(engine_->Submit(MakeRequest(RandomPrompt(20, 9), Endless(20), slow)).ok());
  ExpectAlone(Send(RandomPrompt(30, 1), Endless(30)));
  ASSERT_TRUE(slow->Wait());
  EXPECT_EQ(slow->tokens(), ExpectedTokens(*model_, RandomPrompt(20, 9), Endless(20), 0, {}).tokens);
}

class BadConstraint : public TokenConstraint {
 public:
  BadConstraint(bool in_fill, bool throws) : in_fill_(in_fill), throws_(throws) {}
  bool FillMask(std::span<uint32_t> mask) override {
    if (!in_fill_) return false;
    if (throws_) throw std::runtime_error("mask failed");
    std::fill(mask.begin(), mask.end(), 0u);  // nothing is allowed
    return true;
  }
  bool Accept(int32_t) override {
    if (!in_fill_ && throws_) throw std::runtime_error("accept failed");
    return in_fill_;
  }
  std::unique_ptr<TokenConstraint> Fork() const override { return nullptr; }

 private:
  bool in_fill_, throws_;
};

TEST_P(EngineTest, AFailingConstraintEndsItsOwnRequest) {
  Start();
  const Sent good = Send(RandomPrompt(30, 1), Endless(40));
  for (bool in_fill : {false, true}) {
    for (bool throws : {false, true}) {
      auto sink = std::make_shared<RecordingSink>();
      auto request = MakeRequest(RandomPrompt(20, 2), Endless(10), sink);
      request->constraints.push_back(std::make_unique<BadConstraint>(in_fill, throws));
      ASSERT_TRUE(engine_->Submit(std::move(request)).ok());
      ASSERT_TRUE(sink->Wait());
      EXPECT_EQ(sink->status().code(),
                in_fill && !throws ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kInternal);
      EXPECT_EQ(sink->choice().reason, FinishReason::kError);
      EXPECT_TRUE(sink->tokens().empty());
    }
  }
  ExpectAlone(good);
  EXPECT_TRUE(BecomesIdle());
}

TEST_P(EngineTest, AFailedStepEndsEverythingAndIsFinal) {
  for (bool throws : {false, true}) {
    std::atomic<int> steps{0};
    step_hook_ = [&](const StepPlan&) -> absl::Status {
      if (++steps < 5) return absl::OkStatus();
      if (throws) throw std::runtime_error("device gone");
      return absl::InternalError("device gone");
    };
    config_.max_num_seqs = 2;
    Start();
    std::vector<Sent> sent;
    for (uint64_t i = 0; i < 5; ++i) sent.push_back(Send(RandomPrompt(20, i), Endless(100)));
    for (const Sent& one : sent) {
      ASSERT_TRUE(one.sink->Wait());
      EXPECT_EQ(one.sink->status().code(), absl::StatusCode::kInternal);
    }
    EXPECT_FALSE(engine_->Load().healthy);
    EXPECT_TRUE(BecomesIdle());
    auto late = std::make_shared<RecordingSink>();
    EXPECT_EQ(engine_->Submit(MakeRequest(RandomPrompt(5, 1), Greedy(1), late)).status().code(),
              absl::StatusCode::kUnavailable);
    EXPECT_EQ(steps.load(), 5);  // no step after the failed one
    engine_.reset();
    EXPECT_EQ(late->finals(), 0);
  }
}

TEST_P(EngineTest, DrainLetsRunningWorkFinish) {
  delay_ms_ = 1;
  Start();
  std::vector<Sent> sent;
  for (uint64_t i = 0; i < 5; ++i) sent.push_back(Send(RandomPrompt(20, i), Endless(30)));
  EXPECT_TRUE(engine_->Drain(std::chrono::seconds(20)));
  for (const Sent& one : sent) ExpectAlone(one);
  const absl::Status refused =
      engine_->Submit(MakeRequest(RandomPrompt(5, 1), Greedy(1), std::make_shared<RecordingSink>())).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(engine_->Drain(std::chrono::seconds(1)));  // nothing left
}

TEST_P(EngineTest, DrainCutsOffWhatTakesTooLong) {
  delay_ms_ = 5;
  Start();
  const Sent one = Send(RandomPrompt(20, 1), Endless(4000));
  ASSERT_TRUE(one.sink->WaitForTokens(1));
  EXPECT_FALSE(engine_->Drain(std::chrono::milliseconds(50)));
  EXPECT_TRUE(one.sink->done());
  EXPECT_EQ(one.sink->status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(BecomesIdle());
}

TEST_P(EngineTest, DestructionEndsLiveRequests) {
  delay_ms_ = 2;
  Start();
  std::vector<Sent> sent;
  for (uint64_t i = 0; i < 20; ++i) sent.push_back(Send(RandomPrompt(20, i), Endless(4000)));
  engine_.reset();
  for (const Sent& one : sent) {
    EXPECT_EQ(one.sink->finals(), 1);
    EXPECT_EQ(one.sink->status().code(), absl::StatusCode::kUnavailable);
  }
}

TEST_P(EngineTest, ABlockedStepShowsInTheLoad) {
  Start();
  EXPECT_EQ(engine_->Load().seconds_since_step, 0);
  paused_ = true;
  const Sent one = Send(RandomPrompt(20, 1), Endless(5));
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  EXPECT_GT(engine_->Load().seconds_since_step, 0.05);
  release_ = true;
  ExpectAlone(one);
  EXPECT_TRUE(BecomesIdle());
  EXPECT_EQ(engine_->Load().seconds_since_step, 0);
}

TEST_P(EngineTest, FlushEmptiesTheCache) {
  Start();
  ExpectAlone(Send(RandomPrompt(100, 1), Greedy(5)));
  EXPECT_TRUE(BecomesIdle());
  EXPECT_GT(engine_->Load().pages_cached, 0);
  engine_->FlushCache();
  for (int i = 0; i < 1000 && engine_->Load().pages_cached > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(engine_->Load().pages_cached, 0);
  EXPECT_EQ(engine_->Load().snapshots_used, 0);
}

class CountingObserver : public EngineObserver {
 public:
  void OnStep(const StepStats& stats) override {
    ++steps;
    tokens += stats.tokens;
    EXPECT_GE(stats.seconds, stats.run_seconds);
  }
  void OnRequestFinished(const absl::Status&, const RequestUsage& usage) override {
    ++finished;
    completion += usage.completion_tokens;
  }
  void OnRejected(const absl::Status&) override { ++rejected; }
  std::atomic<int64_t> steps{0}, tokens{0}, finished{0}, completion{0}, rejected{0};
};

TEST_P(EngineTest, TheObserverSeesStepsAndEnds) {
  CountingObserver observer;
  observer_ = &observer;
  Start();
  for (uint64_t i = 0; i < 4; ++i) ExpectAlone(Send(RandomPrompt(50, i), Endless(10)));
  EXPECT_FALSE(engine_->Submit(MakeRequest({}, Greedy(1), std::make_shared<RecordingSink>())).ok());
  EXPECT_TRUE(engine_->Drain(std::chrono::seconds(5)));
  engine_.reset();
  EXPECT_EQ(observer.finished.load(), 4);
  EXPECT_EQ(observer.completion.load(), 40);
  EXPECT_EQ(observer.rejected.load(), 1);
  EXPECT_EQ(observer.tokens.load(), 4 * (50 + 9));  // the last token of each is not fed back
  EXPECT_GT(observer.steps.load(), 10);
}

TEST_P(EngineTest, TenThousandRandomRequestsFromManyThreadsLeakNothing) {
  config_.latent_pages = 48;
  config_.max_model_len = 400;
  config_.max_num_seqs = 16;
  config_.state_slots = 16;
  config_.max_queue = 64;
  Start();
  constexpr int kThreads = 4, kEach = 2500;
  std::atomic<int> completed{0}, cancelled{0}, refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<uint32_t>(t));
      for (int i = 0; i < kEach; ++i) {
        auto sink = std::make_shared<RecordingSink>();
        const uint64_t seed = random() % 50;
        SamplingParams sampling = Endless(1 + static_cast<int32_t>(random() % 12));
        std::vector<int32_t> prompt = RandomPrompt(1 + seed * 3, seed);
        absl::StatusOr<RequestId> id = absl::UnknownError("");
        for (;;) {
          id = engine_->Submit(MakeRequest(prompt, sampling, sink));
          if (id.ok()) break;
          ASSERT_EQ(id.status().code(), absl::StatusCode::kResourceExhausted);
          ++refused;
          std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
        if (random() % 4 == 0) engine_->Cancel(*id);
        if (random() % 8 == 0) {
          ASSERT_TRUE(sink->Wait(60));
        } else if (random() % 500 == 0) {
          engine_->FlushCache();
        }
        std::lock_guard lock(sinks_mutex_);
        sinks_.push_back(sink);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& sink : sinks_) {
    ASSERT_TRUE(sink->Wait(60));
    EXPECT_EQ(sink->finals(), 1);
    sink->status().ok() ? ++completed : ++cancelled;
  }
  EXPECT_EQ(completed + cancelled, kThreads * kEach);
  EXPECT_TRUE(BecomesIdle());
  engine_->FlushCache();
  for (int i = 0; i < 1000 && engine_->Load().pages_cached > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(engine_->Load().pages_cached, 0);
  EXPECT_EQ(engine_->Load().snapshots_used, 0);
  ExpectAlone(Send(RandomPrompt(100, 5), Endless(20)));
}

INSTANTIATE_TEST_SUITE_P(Runners, EngineTest, ::testing::Bool(), [](const ::testing::TestParamInfo<bool>& info) {
  return info.param ? "Overlapped" : "OneByOne";
});

}  // namespace
}  // namespace k3
