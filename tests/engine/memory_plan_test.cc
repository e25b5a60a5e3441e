#include "engine/memory_plan.h"

#include "engine/executor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/paths.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/two_phase_ops.h"

namespace k3 {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr uint64_t kVisionBytes = 894717952;

ModelConfig Config(const std::string& name) {
  const auto config = LoadModelConfig(testing::SourcePath("configs/models/" + name));
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

MemoryRequest GpuRequest(int tensor_parallel, int data_parallel) {
  MemoryRequest request;
  request.is_cpu = false;
  request.tensor_parallel = tensor_parallel;
  request.data_parallel = data_parallel;
  request.activation = request.page_dtype = DType::kBF16;
  request.memory_bytes = 139 * kGiB;
  return request;
}

MemoryPlan Plan(const ModelConfig& config, const MemoryRequest& request) {
  const auto plan = PlanMemory(config, request);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

// What must hold for any plan that fits.
void ExpectSound(const MemoryPlan& plan, const MemoryRequest& request) {
  EXPECT_TRUE(plan.fits_memory) << plan.problem;
  EXPECT_LE(plan.used_bytes(), plan.budget_bytes);
  EXPECT_GE(plan.state_slots, 1);
  EXPECT_GE(plan.latent_pages * request.page_size, plan.max_model_len);
  EXPECT_LE(plan.max_num_seqs, plan.state_slots * request.data_parallel);
  EXPECT_EQ(plan.geometry.pages, plan.latent_pages);
  EXPECT_EQ(plan.geometry.slots, plan.state_slots + plan.snapshot_slots);
  for (const ContextFit& fit : plan.fits) {
    const int64_t per_rank = (fit.sequences + request.data_parallel - 1) / request.data_parallel;
    EXPECT_LE(per_rank * ((fit.context + request.page_size - 1) / request.page_size), plan.latent_pages);
    EXPECT_LE(per_rank, plan.state_slots);
    EXPECT_FALSE(fit.binding.empty());
  }
}

TEST(MemoryPlanTest, KimiK3Sizes) {
  const MemoryPlan plan = Plan(Config("kimi-k3"), GpuRequest(8, 2));
  EXPECT_EQ(plan.model_bytes + kVisionBytes, 1560860324864u);
  EXPECT_EQ(plan.expert_bytes, 17547264u);
  // A sixteenth of the experts; an eighth of what tensor parallelism cuts.
  EXPECT_EQ(plan.rank_weights.experts, 1446456066048u / 16);
  EXPECT_EQ(plan.rank_weights.embedding, 2ull * 163840 * 7168 * 2 / 8);
  // Spec 2.7: 6 MiB of recurrent state and 221,184 bytes of convolution state a layer for all heads, 1152 bytes a token
  // and MLA layer, replicated.
  EXPECT_EQ(plan.slot_bytes, 69u * ((6u << 20) + 221184u) / 8);
  EXPECT_EQ(plan.page_bytes, 64u * 27648u);
  EXPECT_EQ(plan.bank_bytes, 9u * 7168 * 2 * 8192 / 8);  // each rank keeps an eighth of a prefill's tokens
}

TEST(MemoryPlanTest, KimiK3OnSixteenGpus) {
  for (const auto& [tp, dp] : {std::pair{8, 2}, {16, 1}}) {
    const MemoryRequest request = GpuRequest(tp, dp);
    const MemoryPlan plan = Plan(Config("kimi-k3"), request);
    ExpectSound(plan, request);
    EXPECT_GE(plan.fits[0].sequences, 32) << tp << "x" << dp;
    EXPECT_LT(plan.fits[1].sequences, plan.fits[0].sequences);
    EXPECT_EQ(plan.budget_bytes, static_cast<uint64_t>(0.9 * 139 * kGiB));
  }
  // Replicated pages of 1M tokens take 27 GiB beside 101 GiB of weights: only with more of the GPU.
  MemoryRequest request = GpuRequest(16, 1);
  request.max_model_len = 1048576;
  EXPECT_FALSE(Plan(Config("kimi-k3"), request).fits_memory);
  request.utilization = 0.95;
  const MemoryPlan plan = Plan(Config("kimi-k3"), request);
  ExpectSound(plan, request);
  EXPECT_EQ(plan.fits[2].sequences, 1);
}

TEST(MemoryPlanTest, KimiK3DoesNotFitEightGpus) {
  const MemoryPlan plan = Plan(Config("kimi-k3"), GpuRequest(8, 1));
  EXPECT_FALSE(plan.fits_memory);
  EXPECT_THAT(plan.problem, AllOf(HasSubstr("weights ("), HasSubstr("a GPU offers 125.10 GiB of 139.00 GiB")));
  for (const ContextFit& fit : plan.fits) EXPECT_EQ(fit.sequences, 0);
}

TEST(MemoryPlanTest, KimiLinear48BOnOneGpu) {
  const MemoryRequest request = GpuRequest(1, 1);
  const MemoryPlan plan = Plan(Config("kimi-linear-48b"), request);
  ExpectSound(plan, request);
  EXPECT_NEAR(static_cast<double>(plan.model_bytes), 98.25e9, 0.01e9);
  EXPECT_EQ(plan.weights_bytes, plan.model_bytes);
  EXPECT_EQ(plan.page_bytes, 64u * 8064u);
  EXPECT_EQ(plan.slot_bytes, 20u * ((2u << 20) + 73728u));
  EXPECT_EQ(plan.bank_bytes, 1u * 8192 * 2304 * 2);
  EXPECT_GE(plan.fits[0].sequences, 200);
  EXPECT_GE(plan.fits[2].sequences, 1);
  EXPECT_EQ(plan.max_model_len, 1048576);
}

TEST(MemoryPlanTest, StateAndPageTypesChangeSizes) {
  const ModelConfig config = Config("kimi-linear-48b");
  MemoryRequest request = GpuRequest(1, 1);
  const MemoryPlan fp32_state = Plan(config, request);
  request.state_dtype = DType::kBF16;
  request.page_dtype = DType::kF32;
  const MemoryPlan plan = Plan(config, request);
  EXPECT_EQ(plan.page_bytes, 2 * fp32_state.page_bytes);
  EXPECT_EQ(plan.slot_bytes, fp32_state.slot_bytes - 20u * (1u << 20));
}

TEST(MemoryPlanTest, LayoutsMustDivide) {
  const auto plan = PlanMemory(Config("kimi-linear-48b"), GpuRequest(5, 1));
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("num_attention_heads (32)"));
}

TEST(MemoryPlanTest, FlagsOverrideAndBind) {
  const ModelConfig config = Config("kimi-linear-48b");
  MemoryRequest request = GpuRequest(1, 1);
  request.state_slots = 10;
  request.snapshot_slots = 3;
  request.latent_pages = 1024;  // 65,536 tokens
  const MemoryPlan plan = Plan(config, request);
  ExpectSound(plan, request);
  EXPECT_EQ(plan.state_slots, 10);
  EXPECT_EQ(plan.snapshot_slots, 3);
  EXPECT_EQ(plan.latent_pages, 1024);
  EXPECT_EQ(plan.max_num_seqs, 10);
  EXPECT_EQ(plan.max_model_len, 65536);
  EXPECT_EQ(plan.fits[0].sequences, 8);
  EXPECT_EQ(plan.fits[0].binding, "--latent-pages");
  EXPECT_EQ(plan.fits[1].sequences, 0);

  request = GpuRequest(1, 1);
  request.max_num_seqs = 4;
  const MemoryPlan few = Plan(config, request);
  EXPECT_EQ(few.state_slots, 4);
  EXPECT_EQ(few.fits[0].sequences, 4);
  EXPECT_EQ(few.fits[0].binding, "--max-num-seqs");
  EXPECT_EQ(few.fits[2].binding, "--gpu-memory-utilization");

  request.max_model_len = 100000;
  const MemoryPlan shorter = Plan(config, request);
  EXPECT_EQ(shorter.fits[1].binding, "--max-model-len");
  EXPECT_EQ(shorter.fits[1].sequences, 0);
  EXPECT_EQ(shorter.max_model_len, 100000);

  request.prefix_caching = false;
  EXPECT_EQ(Plan(config, request).snapshot_slots, 0);
}

TEST(MemoryPlanTest, AnAskedLengthGoesBeforeSlots) {
  const ModelConfig config = Config("kimi-linear-48b");
  MemoryRequest request = GpuRequest(1, 1);
  request.memory_bytes = 114 * kGiB;
  const MemoryPlan before = Plan(config, request);
  ASSERT_TRUE(before.fits_memory) << before.problem;
  ASSERT_LT(before.max_model_len, 1048576);
  request.max_model_len = 1048576;
  const MemoryPlan plan = Plan(config, request);
  ExpectSound(plan, request);
  EXPECT_LT(plan.state_slots, before.state_slots);
  EXPECT_EQ(plan.fits[2].sequences, 1);

  request.memory_bytes = 105 * kGiB;
  const MemoryPlan small = Plan(config, request);
  EXPECT_FALSE(small.fits_memory);
  EXPECT_THAT(small.problem,
              AllOf(HasSubstr("one sequence of 1048576 tokens"), HasSubstr("need"), HasSubstr("94.50 GiB")));
}

TEST(MemoryPlanTest, PoolsThatAreAskedForMustFit) {
  const ModelConfig config = Config("kimi-linear-48b");
  MemoryRequest request = GpuRequest(1, 1);
  request.state_slots = 5000;
  const MemoryPlan slots = Plan(config, request);
  EXPECT_FALSE(slots.fits_memory);
  EXPECT_FALSE(slots.problem.empty());
  request = GpuRequest(1, 1);
  request.latent_pages = 1 << 20;
  const MemoryPlan pages = Plan(config, request);
  EXPECT_FALSE(pages.fits_memory);
  EXPECT_THAT(pages.problem, AllOf(HasSubstr("1048576 pages"), HasSubstr("125.10 GiB")));
  request = GpuRequest(1, 1);
  request.latent_pages = 10;
  request.max_model_len = 641;
  EXPECT_THAT(Plan(config, request).problem, HasSubstr("needs 11 latent pages, there are 10 (--latent-pages)"));
}

TEST(MemoryPlanTest, TinyK3OnTheCpu) {
  const ModelConfig config = Config("tiny-k3");
  const auto checkpoint = Checkpoint::Open(testing::TinyK3());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const std::unique_ptr<Ops> ops = MakeCpuOps();
  MemoryRequest request;
  request.memory_bytes = 16 * kGiB;
  request.checkpoint = checkpoint->get();
  request.ops = ops.get();
  const MemoryPlan plan = Plan(config, request);
  ExpectSound(plan, request);
  EXPECT_EQ(plan.model_bytes, (*checkpoint)->total_bytes());
  EXPECT_FALSE(plan.workspace_estimated);
  EXPECT_EQ(plan.workspace_bytes + plan.bank_bytes, Workspace::Bytes(config, plan.bounds, *ops) +
                                                        Executor::StagingBytes(config.vocab_size, plan.bounds, 64, {}));
  EXPECT_LE(plan.page_pool_bytes() + plan.state_pool_bytes(), 4 * kGiB);
  EXPECT_GE(plan.state_slots, 64);

  EXPECT_EQ(plan.closed_mix_bytes, 0u);

  // The mixes of two phases belong to the workspace.
  const testing::TwoPhaseOps two_phases(MakeCpuOps());
  request.ops = &two_phases;
  const MemoryPlan mixes = Plan(config, request);
  ExpectSound(mixes, request);
  EXPECT_EQ(mixes.closed_mix_bytes, AttnResMixesBytes(plan.max_num_batched_tokens, config.hidden_size, DType::kF32));
  EXPECT_EQ(mixes.workspace_bytes, plan.workspace_bytes + mixes.closed_mix_bytes);
  request.ops = ops.get();

  // Half of what a small machine has left.
  request.memory_bytes = kGiB;
  const MemoryPlan small = Plan(config, request);
  ExpectSound(small, request);
  EXPECT_LE(small.page_pool_bytes() + small.state_pool_bytes(), kGiB / 2);

  request.pool_bytes = 1 << 20;
  const MemoryPlan tiny = Plan(config, request);
  EXPECT_FALSE(tiny.fits_memory);
  EXPECT_THAT(tiny.problem, HasSubstr("--cpu-memory-gib"));
  request.pool_bytes = 64 * kGiB;
  const MemoryPlan greedy = Plan(config, request);
  EXPECT_FALSE(greedy.fits_memory);
  EXPECT_THAT(greedy.problem, HasSubstr("the machine has 1.00 GiB free"));
}

TEST(MemoryPlanTest, HeadersDecideOverTheConfig) {
  // Written in F32 and with plain experts, while the config says packed.
  ModelConfig config = testing::SmallK3Config();
  config.mxfp4_experts = false;
  testing::CheckpointForm form;
  form.plain_dtype = DType::kF32;
  testing::TestCheckpoint content(config, form);
  content.config.mxfp4_experts = true;
  const testing::TempDir dir;
  content.Write(dir.path());
  const auto checkpoint = Checkpoint::Open(dir.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(RankWeightBytes(content.config, 1, 1, checkpoint->get()).total(), (*checkpoint)->total_bytes());
  EXPECT_LT(RankWeightBytes(content.config, 1, 1, nullptr).total(), (*checkpoint)->total_bytes() / 2);
}

TEST(MemoryPlanTest, EverySmallBudgetGivesASoundPlanOrAReason) {
  const ModelConfig config = testing::SmallK3Config();
  int fitting = 0;
  for (uint64_t kib = 0; kib < 20000; kib += 37) {
    for (int64_t length : {0, 1, 64, 4096}) {
      MemoryRequest request = GpuRequest(1, 1);
      request.memory_bytes = kib << 10;
      request.max_num_batched_tokens = 64;
      if (length > 0) request.max_model_len = length;
      const MemoryPlan plan = Plan(config, request);
      if (plan.fits_memory) {
        ++fitting;
        ExpectSound(plan, request);
      } else {
        EXPECT_FALSE(plan.problem.empty());
      }
    }
  }
  EXPECT_GT(fitting, 100);
}

}  // namespace
}  // namespace k3
