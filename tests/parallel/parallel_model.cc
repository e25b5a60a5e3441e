#include "tests/parallel/parallel_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "engine/lend_experts.h"
#include "engine/model/sequence_runner.h"
#include "kernels/core/check.h"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/two_phase_ops.h"

namespace k3::testing {
namespace {

class RecordingProbe : public RoutingProbe {
 public:
  RecordingProbe(int32_t top_k, std::vector<std::vector<int32_t>>* experts) : top_k_(top_k), experts_(experts) {}
  const int32_t* ForcedIds(int32_t) override { return nullptr; }
  void OnRouted(int32_t moe_layer, const int32_t* ids, int64_t tokens) override {
    if (experts_->size() <= static_cast<size_t>(moe_layer)) experts_->resize(static_cast<size_t>(moe_layer) + 1);
    std::vector<int32_t>& layer = (*experts_)[static_cast<size_t>(moe_layer)];
    layer.insert(layer.end(), ids, ids + tokens * top_k_);
  }

 private:
  int32_t top_k_;
  std::vector<std::vector<int32_t>>* experts_;
};

}  // namespace

std::unique_ptr<RankGroup> LoadRanks(const std::string& dir, const ParallelLayout& layout, ExpertTransport transport,
                                     bool two_phases) {
  RankGroup::Options options;
  options.layout = layout;
  options.transport = transport;
  options.make_ops = [two_phases](int) -> std::unique_ptr<Ops> {
    auto ops = MakeCpuOps({.threads = 1});
    if (two_phases) return std::make_unique<TwoPhaseOps>(std::move(ops));
    return ops;
  };
  auto ranks = RankGroup::Create(std::move(options));
  if (!ranks.ok()) ADD_FAILURE() << ranks.status();
  const auto config = LoadModelConfig(dir);
  K3_CHECK(ranks.ok() && config.ok());
  LoadOptions load;
  load.print_progress = false;
  const absl::Status loaded = (*ranks)->Load(dir, *config, load);
  if (!loaded.ok()) ADD_FAILURE() << loaded;
  K3_CHECK(loaded.ok());
  return *std::move(ranks);
}

ModelConfig WideK3Config() {
  ModelConfig config = SmallK3Config();
  config.num_hidden_layers = 8;
  config.layers = {LayerKind::kKda, LayerKind::kKda, LayerKind::kKda, LayerKind::kMla,
                   LayerKind::kKda, LayerKind::kKda, LayerKind::kKda, LayerKind::kMla};
  config.attn_res_block_size = 3;
  config.kda_heads = 8;
  config.num_attention_heads = 8;
  config.num_experts = 32;
  config.num_experts_per_token = 4;
  config.intermediate_size = 96;
  return config;
}

SequenceLogits RunSequence(RankGroup& ranks, int32_t data_rank, const std::vector<int32_t>& tokens, int64_t chunk) {
  const int64_t length = static_cast<int64_t>(tokens.size());
  std::vector<SequenceLogits> results(static_cast<size_t>(ranks.local_ranks()));
  const absl::Status status = RunInGroup(ranks, data_rank, chunk, [&](int local, const ForwardNotice& announce) {
    SequenceLogits& result = results[static_cast<size_t>(local)];
    const Model& model = ranks.model(local);
    SequenceRunner runner(model, ranks.ops(local), length, chunk, /*page_size=*/16);
    runner.before_forward = announce;
    RecordingProbe probe(model.config().num_experts_per_token, &result.experts);
    for (int64_t begin = 0; begin < length; begin += chunk) {
      const int64_t count = std::min(chunk, length - begin);
      std::vector<int32_t> rows(static_cast<size_t>(count));
      std::iota(rows.begin(), rows.end(), 0);
      const std::vector<float> logits =
          runner.Append({tokens.data() + begin, static_cast<size_t>(count)}, rows, &probe);
      result.logits.insert(result.logits.end(), logits.begin(), logits.end());
    }
    return absl::OkStatus();
  });
  if (!status.ok()) ADD_FAILURE() << status;
  const SequenceLogits* first = nullptr;
  for (int local = 0; local < ranks.local_ranks(); ++local) {
    if (ranks.data_rank_of(local) != data_rank) continue;
    const SequenceLogits& result = results[static_cast<size_t>(local)];
    if (first == nullptr) first = &result;
    EXPECT_EQ(result.logits, first->logits) << "the ranks of a group disagree";
    EXPECT_EQ(result.experts, first->experts);
  }
  return *first;
}

double RelativeError(const std::vector<float>& actual, const std::vector<float>& expected) {
  if (actual.size() != expected.size()) return INFINITY;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double d = static_cast<double>(actual[i]) - expected[i];
    difference += d * d;
    norm += static_cast<double>(expected[i]) * expected[i];
  }
  return std::sqrt(difference / norm);
}

std::vector<int32_t> SomeTokens(uint64_t seed, int32_t count, int64_t vocab_size) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab_size));
  return tokens;
}

}  // namespace k3::testing
