#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/e2e/engine_harness.h"
#include "tests/testing/paths.h"

// Captured decode steps and steps in flight on the GPU, against the same requests one by one. In batch-invariant mode,
// so that every bit must be equal.
namespace k3::testing {
namespace {

class CudaStepsTest : public ::testing::TestWithParam<const char*> {
 protected:
  static bool HasDevice() { return CudaDeviceCount() > 0; }
  void SetUp() override {
    if (!HasDevice()) GTEST_SKIP() << "no CUDA device that this build can use";
    const std::string dir = std::string(GetParam()) == "TinyK3" ? TinyK3() : TinyKimiLinear();
    model_ = std::make_unique<TestModel>(dir, MakeCudaOps({.batch_invariant = true}));
  }

  // Whole prompts in one chunk, no hits and no preemption: other cuts take other kernels, whose last bits differ.
  static EngineConfig Config() {
    EngineConfig config;
    config.page_size = 64;
    config.latent_pages = 128;
    config.state_slots = 8;
    config.max_num_seqs = 8;
    config.snapshot_slots = 4;
    config.enable_prefix_caching = false;
    config.max_num_batched_tokens = 512;
    return config;
  }
  TestRequest Prompt(int32_t length, uint64_t seed, int32_t max_new_tokens) const {
    TestRequest request;
    request.prompt = RandomTokens(seed, length, static_cast<int32_t>(model_->config().vocab_size) / 2);
    request.max_new_tokens = max_new_tokens;
    return request;
  }

  std::unique_ptr<TestModel> model_;
};

TEST_P(CudaStepsTest, SameBitsWithGraphsAndPlannedAhead) {
  std::vector<TestRequest> requests;
  for (int32_t i = 0; i < 20; ++i) {
    requests.push_back(Prompt(1 + i * 13, static_cast<uint64_t>(i), 5 + i * 3));
    if (i % 3 == 0) requests.back().temperature = 0.8f;
    if (i % 5 == 0) requests.back().presence_penalty = 1.0f;  // needs its tokens on the host
    requests.back().seed = static_cast<uint64_t>(i);
  }
  for (const StepMode& mode : {StepMode{.plan_ahead = false, .decode_sizes = {1, 2, 4, 8}},
                               StepMode{.plan_ahead = true, .decode_sizes = {1, 2, 4, 8}}}) {
    EngineHarness harness(*model_, Config(), mode);
    std::vector<RequestId> ids;
    for (const TestRequest& request : requests) {
      ids.push_back(harness.Submit(request));
      for (int step = 0; step < 3; ++step) harness.Step();
    }
    harness.RunAll();
    for (size_t i = 0; i < ids.size(); ++i) {
      SCOPED_TRACE("request " + std::to_string(i));
      ExpectSameAnswer(harness.outcome(ids[i]), RunAlone(*model_, requests[i]));
    }
    EXPECT_EQ(harness.steps_ahead > 0, mode.plan_ahead);
  }
}

TEST_P(CudaStepsTest, B07PaddedGraphsTouchNoForeignSlot) {
  EngineHarness harness(*model_, Config(), {.decode_sizes = {1, 2, 4, 8}});
  CacheStorage& cache = harness.executor().cache();
  Ops& ops = model_->ops();
  const auto bytes_of = [&](int32_t slot) {
    std::string bytes(static_cast<size_t>(cache.slot_stride()), 0);
    ops.CopyToHost(bytes.data(), cache.SlotData(StateSlot{slot}), bytes.size(), ops.stream());
    ops.Synchronize(ops.stream());
    return bytes;
  };
  std::vector<TestRequest> requests;
  for (uint64_t i = 0; i < 8; ++i) requests.push_back(Prompt(20 + static_cast<int32_t>(i), i, i < 3 ? 6 : 64));
  requests.push_back(Prompt(33, 50, 40));
  std::vector<RequestId> ids;
  for (size_t i = 0; i < 8; ++i) ids.push_back(harness.Submit(requests[i]));
  std::vector<std::pair<int32_t, std::string>> foreign;
  int five_rows = 0;
  harness.before_run = [&](const StepPlan& step) {
    const RankPlan& plan = step.ranks[0];
    five_rows += plan.num_sequences() == 5 && plan.num_tokens() == 5;
    foreign.clear();
    for (int32_t slot = 0; slot < harness.config().state_slots + harness.config().snapshot_slots; ++slot) {
      if (std::find(plan.state_slot.begin(), plan.state_slot.end(), slot) == plan.state_slot.end()) {
        foreign.emplace_back(slot, bytes_of(slot));
      }
    }
  };
  harness.after_run = [&](const StepPlan&, StepResult*) {
    for (const auto& [slot, before] : foreign) EXPECT_EQ(bytes_of(slot) == before, true) << "slot " << slot;
  };
  for (int step = 0; step < 12; ++step) ASSERT_TRUE(harness.Step());
  EXPECT_GT(five_rows, 0);
  ids.push_back(harness.Submit(requests.back()));
  harness.RunAll();
  for (size_t i = 0; i < ids.size(); ++i) ExpectSameAnswer(harness.outcome(ids[i]), RunAlone(*model_, requests[i]));
}

INSTANTIATE_TEST_SUITE_P(Models, CudaStepsTest, ::testing::Values("TinyK3", "TinyKimiLinear"),
                         [](const ::testing::TestParamInfo<const char*>& info) { return std::string(info.param); });

}  // namespace
}  // namespace k3::testing
