// In the steady state a token costs no heap allocation. A program of its own, because it replaces operator new.

#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "tests/testing/scheduler_harness.h"

namespace {
thread_local bool counting = false;
thread_local int64_t allocations = 0;

void* Allocate(std::size_t bytes) {
  if (counting) ++allocations;
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
}  // namespace

void* operator new(std::size_t bytes) { return Allocate(bytes); }
void* operator new[](std::size_t bytes) { return Allocate(bytes); }
// The library's own form of this one need not call ours, while what it gives is freed by ours.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  if (counting) ++allocations;
  return std::malloc(bytes > 0 ? bytes : 1);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace k3 {
namespace {

class CountingSink : public TokenSink {
 public:
  void OnToken(int32_t, int32_t, const TokenLogprob* logprob) override {
    ++tokens;
    if (logprob != nullptr) tops += static_cast<int64_t>(logprob->top.size());
  }
  void OnChoiceFinished(int32_t, FinishReason, int32_t) override {}
  void OnFinished(const absl::Status&, const RequestUsage&) override {}
  int64_t tokens = 0;
  int64_t tops = 0;
};

TEST(AllocationTest, DecodingAllocatesNothing) {
  EngineConfig config = testing::SchedulerHarness::SmallConfig();
  config.max_num_seqs = 64;
  config.state_slots = 64;
  config.snapshot_slots = 0;  // a snapshot every so many pages is not per token
  config.latent_pages = 4096;
  config.max_num_batched_tokens = 256;
  ASSERT_TRUE(config.Resolve().ok());
  testing::HashModelRunner runner(testing::HashModel(config.vocab_size), config);
  Scheduler scheduler(config);
  const auto sink = std::make_shared<CountingSink>();
  for (uint64_t i = 0; i < 64; ++i) {
    auto request = std::make_unique<Request>();
    request->prompt_tokens = testing::RandomPrompt(20 + i, i);
    request->sampling = testing::Greedy(1000);
    request->sampling.ignore_eos = true;
    request->sampling.logit_bias = {{1, 0.5f}};
    request->sampling.top_logprobs = 2;
    request->sink = sink;
    scheduler.Submit(i + 1, std::move(request), {});
  }
  StepPlan plan;
  StepResult result;
  Clock::time_point now{};
  const auto step = [&](bool count) {
    counting = count;
    ASSERT_TRUE(scheduler.PlanStep(now, &plan));
    counting = false;
    ASSERT_TRUE(runner.Run(plan, &result).ok());
    counting = count;
    scheduler.CommitStep(plan, result, now);
    counting = false;
    now += std::chrono::milliseconds(1);
  };
  while (plan.ranks.empty() || plan.ranks[0].num_tokens() != 64 || plan.ranks[0].num_sequences() != 64) step(false);
  for (int i = 0; i < 40; ++i) step(false);  // plans reach their size
  const int64_t before = sink->tokens;
  for (int i = 0; i < 200; ++i) step(true);
  EXPECT_EQ(sink->tokens - before, 200 * 64);
  EXPECT_EQ(sink->tops, 2 * sink->tokens);
  EXPECT_EQ(allocations, 0);
  EXPECT_GT(scheduler.cache(0).cache().nodes(), 64 * 12);  // pages were filled and published all the while
}

}  // namespace
}  // namespace k3
