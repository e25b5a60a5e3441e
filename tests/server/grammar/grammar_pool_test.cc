#include "server/grammar/grammar_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
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

// Compiles literals: "bad" does not compile, "hang" waits for the gate, "hard" takes whatever time it is given, a
// number is the size of the result.
class FakeEngine final : public GrammarEngine {
 public:
  struct State {
    std::atomic<int> compiled{0};
    std::atomic<int> hard{0};
    std::promise<void> gate;
    std::shared_future<void> opened = gate.get_future().share();
  };
  explicit FakeEngine(std::shared_ptr<State> state) : state_(std::move(state)) {}

  absl::StatusOr<std::shared_ptr<const CompiledGrammar>> Compile(const GrammarNode& root,
                                                                 milliseconds time_limit) const override {
    ++state_->compiled;
    if (root.text == "bad") return absl::InvalidArgumentError("bad");
    if (root.text.starts_with("hang")) state_->opened.wait();
    if (root.text.starts_with("hard")) {
      ++state_->hard;
      if (state_->opened.wait_for(time_limit) == std::future_status::timeout) {
        return absl::DeadlineExceededError("takes too long");
      }
    }
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
  std::shared_future<absl::StatusCode> Get(const std::string& text, bool foreign = false) {
    auto promise = std::make_shared<std::promise<absl::StatusCode>>();
    pool_->Get(foreign ? GrammarNode::Foreign(GrammarNode::Kind::kEbnf, text) : GrammarNode::Literal(text),
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
  Start({.quick_threads = 2, .time_limit = milliseconds(100)});
  EXPECT_EQ(Get("hang").get(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Get("hang").get(), absl::StatusCode::kInvalidArgument);  // at once: its thread still hangs
  EXPECT_EQ(Get("7").get(), absl::StatusCode::kOk);
  EXPECT_EQ(state_->compiled, 2);
  state_->gate.set_value();
}

TEST_F(GrammarPoolTest, WhoGetsNoThreadMayComeBack) {
  Start({.quick_threads = 1, .time_limit = milliseconds(100), .max_waiting = 1});
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

// A flood of grammars that take all the time they get, more than there are threads and places: ordinary ones go on,
// hard ones are refused or told to come back, and each is asked for once only.
TEST_F(GrammarPoolTest, AFloodOfHardGrammarsHoldsUpOnlyItself) {
  Start({.quick_threads = 1,
         .slow_threads = 1,
         .quick_limit = milliseconds(5),
         .time_limit = std::chrono::seconds(100),
         .max_waiting = 100,
         .max_slow_waiting = 4});
  std::vector<std::shared_future<absl::StatusCode>> hard;
  for (int i = 0; i < 20; ++i) {
    hard.push_back(Get("hard" + std::to_string(i)));
    hard.push_back(Get("hard" + std::to_string(i)));  // waits with the first
  }
  for (int i = 0; i < 20; ++i) EXPECT_EQ(Get(std::to_string(i)).get(), absl::StatusCode::kOk);
  // One is worked on, four wait; for the others there is no place.
  int turned_away = 0;
  for (const auto& result : hard) {
    if (result.wait_for(milliseconds(0)) == std::future_status::ready) {
      EXPECT_EQ(result.get(), absl::StatusCode::kResourceExhausted);
      ++turned_away;
    }
  }
  while (state_->hard < 21) std::this_thread::sleep_for(milliseconds(1));  // 20 quick tries and a slow one
  for (const auto& result : hard) {
    if (turned_away >= 30) break;
    if (result.wait_for(milliseconds(0)) == std::future_status::ready) ++turned_away;
  }
  EXPECT_EQ(Get("hard own", /*foreign=*/true).get(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Get("77").get(), absl::StatusCode::kOk);
  state_->gate.set_value();
  int served = 0;
  for (const auto& result : hard) {
    const absl::StatusCode code = result.get();
    EXPECT_THAT(code, ::testing::AnyOf(absl::StatusCode::kOk, absl::StatusCode::kResourceExhausted));
    if (code == absl::StatusCode::kOk) ++served;
  }
  EXPECT_EQ(served, 10);  // five grammars, asked for twice
}

TEST_F(GrammarPoolTest, WhatTheEngineGivesUpIsRefusedAndRemembered) {
  Start({.quick_limit = milliseconds(1), .foreign_limit = milliseconds(1), .time_limit = milliseconds(50)});
  EXPECT_EQ(Get("hard").get(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(state_->hard, 2);  // by a quick and by a slow thread
  EXPECT_EQ(Get("hard").get(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Get("hard own", /*foreign=*/true).get(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(state_->hard, 4);
  EXPECT_EQ(Get("hard" + std::string(200'000, ' ')).get(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(state_->hard, 5);  // large: by a slow one at once
}

TEST_F(GrammarPoolTest, TheCheapestComesFirst) {
  Start({.quick_threads = 1, .time_limit = std::chrono::seconds(100)});
  const auto held = Get("hang");
  while (state_->compiled == 0) std::this_thread::sleep_for(milliseconds(1));
  std::mutex mutex;
  std::vector<std::string> order;
  std::promise<void> all;
  for (const std::string text : {"3333", "1", "22"}) {
    pool_->Get(GrammarNode::Literal(text), [&, text](const GrammarPool::Result&) {
      std::lock_guard lock(mutex);
      order.push_back(text);
      if (order.size() == 3) all.set_value();
    });
  }
  state_->gate.set_value();
  all.get_future().wait();
  EXPECT_THAT(order, ::testing::ElementsAre("1", "22", "3333"));
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
