#include "server/grammar/grammar_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <vector>

namespace k3 {
namespace {

using std::chrono::milliseconds;

class FakeGrammar final : public CompiledGrammar {
 public:
  explicit FakeGrammar(size_t bytes) : bytes_(bytes) {}
  std::unique_ptr<TokenConstraint> NewConstraint(const std::string&) const override { return nullptr; }
  size_t bytes() const override { return bytes_; }

 private:
  size_t bytes_;
};

// Compiles literals: "bad" does not compile, "hang" waits for the gate, a number is the size of the result.
class FakeEngine final : public GrammarEngine {
 public:
  struct State {
    std::atomic<int> compiled{0};
    std::promise<void> gate;
    std::shared_future<void> opened = gate.get_future().share();
  };
  explicit FakeEngine(std::shared_ptr<State> state) : state_(std::move(state)) {}

  absl::StatusOr<std::shared_ptr<const CompiledGrammar>> Compile(const GrammarNode& root) const override {
    ++state_->compiled;
    if (root.text == "bad") return absl::InvalidArgumentError("bad");
    if (root.text.starts_with("hang")) state_->opened.wait();
    return std::make_shared<FakeGrammar>(static_cast<size_t>(std::atoi(root.text.c_str())));
  }

 private:
  std::shared_ptr<State> state_;
};

class GrammarPoolTest : public ::testing::Test {
 protected:
  void Start(GrammarPool::Options options) {
    pool_ = std::make_unique<GrammarPool>(options, std::make_unique<FakeEngine>(state_));
  }
  std::shared_future<absl::StatusCode> Get(const std::string& text) {
    auto promise = std::make_shared<std::promise<absl::StatusCode>>();
    pool_->Get(GrammarNode::Literal(text),
               [promise](const GrammarPool::Result& result) { promise->set_value(result.status().code()); });
    return promise->get_future().share();
  }

  std::shared_ptr<FakeEngine::State> state_ = std::make_shared<FakeEngine::State>();
  std::unique_ptr<GrammarPool> pool_;
};

TEST_F(GrammarPoolTest, CompilesOnceForAllWhoAsk) {
  Start({});
  EXPECT_EQ(Get("10").get(), absl::StatusCode::kOk);
  EXPECT_EQ(Get("10").get(), absl::StatusCode::kOk);
  EXPECT_EQ(state_->compiled, 1);
  auto first = Get("hang"), second = Get("hang");
  state_->gate.set_value();
  EXPECT_EQ(first.get(), absl::StatusCode::kOk);
  EXPECT_EQ(second.get(), absl::StatusCode::kOk);
  EXPECT_EQ(state_->compiled, 2);
}

TEST_F(GrammarPoolTest, RefusalsAreRemembered) {
  Start({});
  EXPECT_EQ(Get("bad").get(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Get("bad").get(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(state_->compiled, 1);
}

TEST_F(GrammarPoolTest, WhatTakesTooLongIsRefusedAndHoldsNobodyElseUp) {
  Start({.threads = 2, .time_limit = milliseconds(100)});
  EXPECT_EQ(Get("hang").get(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Get("hang").get(), absl::StatusCode::kInvalidArgument);  // at once: its thread still hangs
  EXPECT_EQ(Get("7").get(), absl::StatusCode::kOk);
  EXPECT_EQ(state_->compiled, 2);
  state_->gate.set_value();
}

TEST_F(GrammarPoolTest, WhoGetsNoThreadMayComeBack) {
  Start({.threads = 1, .time_limit = milliseconds(100), .max_waiting = 1});
  auto hangs = Get("hang");
  while (state_->compiled == 0) std::this_thread::sleep_for(milliseconds(1));
  auto waits = Get("7");
  EXPECT_EQ(Get("8").get(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(waits.get(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(hangs.get(), absl::StatusCode::kInvalidArgument);
  state_->gate.set_value();
  absl::StatusCode code = absl::StatusCode::kResourceExhausted;
  for (int i = 0; i < 2000 && code == absl::StatusCode::kResourceExhausted; ++i) {
    code = Get("7").get();
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(code, absl::StatusCode::kOk);
}

TEST_F(GrammarPoolTest, SizesAreLimited) {
  Start({.max_bytes = 1000, .cache_bytes = 4000});
  EXPECT_EQ(Get("2000").get(), absl::StatusCode::kInvalidArgument);
  for (int i = 900; i < 1000; ++i) EXPECT_EQ(Get(std::to_string(i)).get(), absl::StatusCode::kOk);
  EXPECT_LE(pool_->cached_bytes(), 4000u);
  const int before = state_->compiled;
  EXPECT_EQ(Get("999").get(), absl::StatusCode::kOk);  // the latest is kept
  EXPECT_EQ(state_->compiled, before);
  EXPECT_EQ(Get("900").get(), absl::StatusCode::kOk);  // the oldest is not
  EXPECT_EQ(state_->compiled, before + 1);
}

TEST_F(GrammarPoolTest, StoppingAnswersThoseWhoWait) {
  Start({});
  auto waits = Get("hang");
  while (state_->compiled == 0) std::this_thread::sleep_for(milliseconds(1));
  pool_->Stop();
  EXPECT_EQ(waits.get(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Get("7").get(), absl::StatusCode::kUnavailable);
  state_->gate.set_value();
}

}  // namespace
}  // namespace k3
