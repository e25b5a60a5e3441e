#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/executor.h"
#include "engine/memory_plan.h"
#include "engine/rank_group.h"
#include "kernels/comm/local_communicator.h"
#include "kernels/forwarding_ops.h"
#include "tests/engine/model/recording_ops.h"
#include "tests/parallel/parallel_model.h"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/paths.h"
#include "tests/testing/temp_dir.h"

// What `k3serve plan` says against what is allocated when the plan is carried out: byte for byte, for every rank.
namespace k3::testing {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// A device that only keeps account: BF16 activations and scratch sizes of its own, as CUDA has them; memory that nobody
// may touch.
class AccountingOps final : public RecordingOps {
 public:
  AccountingOps() : RecordingOps(/*is_cpu=*/false) {}

  DType activation_dtype() const override { return DType::kBF16; }
  void* Allocate(size_t bytes) override {
    void* place = reinterpret_cast<void*>(next_);
    next_ += (bytes + 255) / 256 * 256;
    open_[place] = bytes;
    in_use_ += bytes;
    return place;
  }
  void Free(void* place) noexcept override {
    const auto it = open_.find(place);
    if (it == open_.end()) return;
    in_use_ -= it->second;
    open_.erase(it);
  }
  void Fill(void*, uint8_t, size_t, Stream) override {}
  size_t KdaScratchBytes(int64_t tokens, int64_t sequences, int32_t heads, int32_t head_dim, int32_t) const override {
    return static_cast<size_t>((tokens * 7 + sequences * 3) * heads * head_dim);
  }
  size_t MlaScratchBytes(int64_t tokens, int64_t, int32_t heads, int32_t latent, int32_t, int32_t, int32_t,
                         int64_t) const override {
    return static_cast<size_t>(tokens * heads * latent * 2);
  }
  size_t MoeScratchBytes(int64_t tokens, int32_t top_k, int32_t, int64_t in, int64_t) const override {
    return static_cast<size_t>(tokens * top_k * in);
  }
  size_t SampleScratchBytes(int64_t rows, int64_t vocab) const override { return static_cast<size_t>(rows * vocab); }

  size_t in_use() const { return in_use_; }
  // Bytes of tensors as they came from the files, and of the small vectors as they are kept.
  uint64_t experts = 0, tables = 0, matrices = 0, vectors = 0;

  std::unique_ptr<LinearWeight> MakeLinear(std::span<const HostTensor> parts) override {
    std::lock_guard lock(mutex_);
    // The output head is a product too, and is counted with the embedding.
    for (const HostTensor& part : parts) (IsHead(part) ? tables : matrices) += Bytes(part);
    return RecordingOps::MakeLinear(parts);
  }
  std::unique_ptr<ExpertWeights> MakeExperts(int32_t first, std::span<const HostExpert> made) override {
    std::lock_guard lock(mutex_);
    for (const HostExpert& e : made) {
      for (const HostTensor* part : {&e.w1, &e.w1_scale, &e.w3, &e.w3_scale, &e.w2, &e.w2_scale}) {
        if (!part->shape.empty()) experts += Bytes(*part);
      }
    }
    return RecordingOps::MakeExperts(first, made);
  }
  std::unique_ptr<LatentProjection> MakeLatentProjection(const HostTensor& kv_b, int32_t heads, int32_t nope_dim,
                                                         int32_t value_dim) override {
    std::lock_guard lock(mutex_);
    matrices += Bytes(kv_b);
    return RecordingOps::MakeLatentProjection(kv_b, heads, nope_dim, value_dim);
  }
  MatrixView MakeTable(const HostTensor& table) override {
    {
      std::lock_guard lock(mutex_);
      tables += Bytes(table);
    }
    return RecordingOps::MakeTable(table);
  }
  const float* MakeVector(std::span<const float> values) override {
    {
      std::lock_guard lock(mutex_);
      vectors += values.size() * sizeof(float);
    }
    return RecordingOps::MakeVector(values);
  }

 private:
  static uint64_t Bytes(const HostTensor& t) { return static_cast<uint64_t>(t.elements()) * SizeOf(t.dtype); }
  static bool IsHead(const HostTensor& t) { return t.name.find("lm_head") != std::string::npos; }

  std::mutex mutex_;
  uintptr_t next_ = uintptr_t{1} << 40;
  size_t in_use_ = 0;
  std::map<void*, size_t> open_;
};

ParallelContext Places(int32_t tensor, int32_t data, ExpertTransport transport,
                       std::vector<std::vector<std::unique_ptr<Communicator>>>* groups) {
  groups->push_back(LocalCommunicator::MakeGroup(tensor));
  groups->push_back(LocalCommunicator::MakeGroup(data));
  return {(*groups)[0][0].get(), (*groups)[1][0].get(), transport};
}

struct Case {
  const char* model;
  int32_t tensor, data;
  ExpertTransport transport;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.model << " " << c.tensor << "x" << c.data; }

class PlanAllocationTest : public ::testing::TestWithParam<Case> {};

// The shipped shapes on a device that accounts, with the plan's own pools and decode sizes.
TEST_P(PlanAllocationTest, AGpuAllocatesWhatThePlanSays) {
  const Case& c = GetParam();
  const auto config = LoadModelConfig(SourcePath(std::string("configs/models/") + c.model));
  ASSERT_TRUE(config.ok()) << config.status();
  AccountingOps ops;
  MemoryRequest request;
  request.is_cpu = false;
  request.tensor_parallel = c.tensor;
  request.data_parallel = c.data;
  request.transport = c.transport;
  request.activation = request.page_dtype = DType::kBF16;
  request.memory_bytes = uint64_t{139} << 30;
  request.ops = &ops;
  const auto plan = PlanMemory(*config, request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_TRUE(plan->fits_memory) << plan->problem;

  const ModelConfig rank = RankConfig(*config, c.tensor);
  Weights weights;
  weights.layers.resize(static_cast<size_t>(rank.num_hidden_layers));
  std::vector<std::vector<std::unique_ptr<Communicator>>> groups;
  const Model model(rank, weights, ops, Places(c.tensor, c.data, c.transport, &groups));
  auto executor = Executor::Create(model, ops, plan->bounds, plan->geometry,
                                   {.decode_sizes = Executor::DecodeSizes(plan->bounds.sequences)});
  ASSERT_TRUE(executor.ok()) << executor.status();
  EXPECT_EQ(ops.in_use(),
            plan->workspace_bytes + plan->bank_bytes + plan->page_pool_bytes() + plan->state_pool_bytes());
  EXPECT_LE(plan->weights_bytes + ops.in_use(), plan->budget_bytes);

  // The bank is block-major: blocks of this rank's tokens, one behind the other, of which a prefill uses its share.
  const Workspace& workspace = (*executor)->workspace();
  EXPECT_EQ(workspace.bank_rows, (plan->bounds.tokens + c.tensor - 1) / c.tensor);
  EXPECT_EQ(workspace.block_stride, workspace.bank_rows * rank.hidden_size);
  EXPECT_EQ(plan->bank_bytes, static_cast<uint64_t>(rank.num_residual_blocks() * workspace.block_stride * 2));
  EXPECT_EQ(static_cast<const char*>(workspace.hidden.data) - static_cast<const char*>(workspace.bank),
            static_cast<int64_t>((plan->bank_bytes + 255) / 256 * 256));
  executor->reset();
  EXPECT_EQ(ops.in_use(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Layouts, PlanAllocationTest,
                         ::testing::Values(Case{"kimi-k3", 8, 2, ExpertTransport::kAllGather},
                                           Case{"kimi-k3", 8, 2, ExpertTransport::kAllToAll},
                                           Case{"kimi-k3", 16, 1, ExpertTransport::kAllGather},
                                           Case{"kimi-linear-48b", 1, 1, ExpertTransport::kAllGather},
                                           Case{"kimi-linear-48b", 1, 2, ExpertTransport::kAllToAll},
                                           Case{"kimi-linear-48b", 2, 1, ExpertTransport::kAllGather}));

// A CPU that counts what it hands out.
class CountingOps final : public ForwardingOps {
 public:
  explicit CountingOps(std::unique_ptr<Ops> inner) : ForwardingOps(std::move(inner)) {}
  void* Allocate(size_t bytes) override {
    allocated += bytes;
    return inner_->Allocate(bytes);
  }
  size_t allocated = 0;
};

// Every rank of a generated model: what is read of the files, and what its executor takes on the CPU.
TEST(PlanWeightsTest, ARankReadsWhatThePlanSays) {
  const TempDir dir;
  const ModelConfig config = WideK3Config();
  TestCheckpoint(config).Write(dir.path());
  const auto checkpoint = Checkpoint::Open(dir.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  for (const auto& [tensor, data] : {std::pair{1, 1}, {2, 1}, {1, 2}, {4, 2}, {8, 4}}) {
    SCOPED_TRACE(std::to_string(tensor) + "x" + std::to_string(data));
    const WeightBytes planned = RankWeightBytes(config, tensor, tensor * data, checkpoint->get());
    for (int32_t rank = 0; rank < tensor * data; ++rank) {
      AccountingOps ops;
      LoadOptions load;
      load.print_progress = false;
      load.tensor_parallel_rank = rank % tensor;
      load.tensor_parallel_size = tensor;
      load.expert_rank = rank;
      load.expert_ranks = tensor * data;
      const auto loaded = LoadWeights(dir.path(), config, ops, load);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      EXPECT_EQ(ops.experts, planned.experts);
      EXPECT_EQ(ops.tables, planned.embedding);
      // The rest is matrices as they are, and vectors: in files up to half as large, kept in F32, some folded into one.
      EXPECT_LE(ops.matrices, planned.other);
      EXPECT_LE(planned.other - ops.matrices, 2 * ops.vectors);
      EXPECT_GE(planned.other - ops.matrices, ops.vectors / 2);
    }
  }
}

TEST(PlanWeightsTest, TheCpuAllocatesWhatThePlanSays) {
  const TempDir dir;
  const ModelConfig config = WideK3Config();
  TestCheckpoint(config).Write(dir.path());
  for (const auto& [tensor, data, transport] : {std::tuple{1, 1, ExpertTransport::kAllGather},
                                                {2, 2, ExpertTransport::kAllGather},
                                                {1, 4, ExpertTransport::kAllToAll},
                                                {4, 2, ExpertTransport::kAllToAll}}) {
    SCOPED_TRACE(std::to_string(tensor) + "x" + std::to_string(data));
    RankGroup::Options options;
    options.layout = {.tensor = tensor, .data = data};
    options.transport = transport;
    std::vector<CountingOps*> counting(static_cast<size_t>(tensor * data));
    options.make_ops = [&](int local) {
      auto ops = std::make_unique<CountingOps>(MakeCpuOps({.threads = 1}));
      counting[static_cast<size_t>(local)] = ops.get();
      return ops;
    };
    const auto opened = RankGroup::Create(std::move(options));
    ASSERT_TRUE(opened.ok()) << opened.status();
    RankGroup& ranks = **opened;
    LoadOptions load;
    load.print_progress = false;
    ASSERT_TRUE(ranks.Load(dir.path(), config, load).ok());
    MemoryRequest request;
    request.tensor_parallel = tensor;
    request.data_parallel = data;
    request.transport = transport;
    request.memory_bytes = 1024 * kMiB;
    request.pool_bytes = 8 * kMiB;
    request.max_num_batched_tokens = 96;
    request.max_num_seqs = 8;
    request.ops = &ranks.ops();
    const auto plan = PlanMemory(config, request);
    ASSERT_TRUE(plan.ok() && plan->fits_memory) << plan.status() << plan->problem;
    for (CountingOps* ops : counting) ops->allocated = 0;
    ASSERT_TRUE(ranks.MakeExecutors(plan->bounds, plan->geometry).ok());
    for (const CountingOps* ops : counting) {
      EXPECT_EQ(ops->allocated,
                plan->workspace_bytes + plan->bank_bytes + plan->page_pool_bytes() + plan->state_pool_bytes());
    }
  }
}

}  // namespace
}  // namespace k3::testing
