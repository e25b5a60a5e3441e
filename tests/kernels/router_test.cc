#include <algorithm>
#include <cmath>

#include "tests/kernels/op_fixture.h"
#include "tests/kernels/oracle.h"

namespace k3::testing {
namespace {

class RouterTest : public OpTest {
 protected:
  struct Result {
    std::vector<int32_t> ids;
    std::vector<float> weights;
  };
  Result Run(RouterTopKParams params, const std::vector<float>& logits, const std::vector<float>& bias,
             const std::vector<int32_t>& forced = {}) {
    const DeviceArray<float> device_logits(ops(), logits), device_bias(ops(), bias);
    const DeviceArray<int32_t> device_forced(ops(), forced);
    const size_t picks = static_cast<size_t>(params.tokens * params.top_k);
    const DeviceArray<int32_t> ids(ops(), picks);
    const DeviceArray<float> weights(ops(), picks);
    params.logits = device_logits.data();
    params.bias = bias.empty() ? nullptr : device_bias.data();
    params.forced_ids = forced.empty() ? nullptr : device_forced.data();
    params.ids = ids.data();
    params.weights = weights.data();
    ops().RouterTopK(params, ops().stream());
    return {ids.Get(), weights.Get()};
  }
  static RouterTopKParams Params(int64_t tokens, int32_t experts, int32_t top_k) {
    RouterTopKParams params;
    params.tokens = tokens;
    params.experts = experts;
    params.top_k = top_k;
    return params;
  }
};
K3_INSTANTIATE_OPS(RouterTest);

TEST_P(RouterTest, MatchesTheOracle) {
  Random random(1);
  for (const auto& [experts, top_k] :
       {std::pair{1, 1}, std::pair{8, 2}, std::pair{32, 4}, std::pair{100, 7}, std::pair{256, 8}, std::pair{896, 16}}) {
    for (RouterScore score : {RouterScore::kSigmoid, RouterScore::kSoftmax}) {
      for (int variant = 0; variant < 4; ++variant) {
        RouterTopKParams params = Params(33, experts, top_k);
        params.score = score;
        params.renormalize = variant != 1;
        params.biased_weights = variant == 2;
        params.scale = variant == 3 ? 2.446f : 1.0f;
        const std::vector<float> logits = random.Normal(33 * experts, 2);
        const std::vector<float> bias = variant == 1 ? std::vector<float>{} : random.Normal(experts, 0.1f);
        const Result result = Run(params, logits, bias);
        const oracle::RouterResult expected = oracle::Router(oracle::ToDouble(logits), bias, params);
        const std::string what = std::to_string(experts) + " experts, variant " + std::to_string(variant);
        for (int64_t t = 0; t < 33; ++t) {
          if (expected.margin[t] < 1e-6) continue;
          EXPECT_EQ(Slice(result.ids, top_k, t, 1), Slice(expected.ids, top_k, t, 1)) << what << ", token " << t;
          ExpectClose(Slice(result.weights, top_k, t, 1), Slice(expected.weights, top_k, t, 1), 1e-5, what);
        }
      }
    }
  }
}

TEST_P(RouterTest, GroupsLimitTheChoice) {
  Random random(2);
  for (const auto& [groups, topk_group] : {std::pair{8, 3}, std::pair{4, 1}, std::pair{32, 8}}) {
    RouterTopKParams params = Params(50, 64, 4);
    params.groups = groups;
    params.topk_group = topk_group;
    const std::vector<float> logits = random.Normal(50 * 64), bias = random.Normal(64, 0.2f);
    const Result result = Run(params, logits, bias);
    const oracle::RouterResult expected = oracle::Router(oracle::ToDouble(logits), bias, params);
    EXPECT_EQ(result.ids, expected.ids) << groups << " groups";
    ExpectClose(result.weights, expected.weights, 1e-5);
  }
}

// B38: ties go to the lower id at every batch size.
TEST_P(RouterTest, TiesGoToTheLowerId) {
  for (int64_t tokens : {1, 2, 8, 64, 1024}) {
    const Result result = Run(Params(tokens, 896, 16), std::vector<float>(static_cast<size_t>(tokens * 896), 0.25f),
                              std::vector<float>(896, 7.0f));
    for (int64_t i = 0; i < tokens * 16; ++i) ASSERT_EQ(result.ids[i], i % 16) << tokens << " tokens";
    for (float w : result.weights) ASSERT_NEAR(w, 1.0 / 16, 1e-6);
  }
}

// B38: product, scores, bias and selection in fp32 at every batch size, at the published shape.
TEST_P(RouterTest, SelectionFollowsFp64AtThePublishedShape) {
  if (slow()) GTEST_SKIP() << "too slow; equal bits by the GEMM tests";
  Random random(3);
  const int64_t hidden = 7168, experts = 896, tokens = 1024;
  const std::vector<float> x = Round(random.Normal(tokens * hidden), DType::kBF16);
  const std::vector<float> w = Round(random.Normal(experts * hidden, 0.02f), DType::kBF16);
  const std::vector<float> bias = random.Normal(experts, 0.25f, 7);
  const OwnedTensor tensor = MakeTensor(w, DType::kBF16, {experts, hidden});
  const std::unique_ptr<LinearWeight> weight = ops().MakeLinear({&tensor.tensor, 1});
  // The fp64 side is the same for every backend.
  static const oracle::RouterResult expected = oracle::Router(
      oracle::Linear(oracle::ToDouble(x), w, tokens, hidden, experts), bias, Params(tokens, experts, 16));
  for (int64_t batch : {1, 2, 8, 64, 1024}) {
    const int64_t steps = std::min<int64_t>(tokens / batch, 24);
    for (int64_t step = 0; step < steps; ++step) {
      const DeviceMatrix input(ops(), act(), batch, hidden, Slice(x, hidden, step * batch, batch));
      const DeviceMatrix logits(ops(), DType::kF32, batch, experts, 0);
      ops().Linear({input, weight.get(), logits, false}, ops().stream());
      const Result result = Run(Params(batch, experts, 16), logits.Get(), bias);
      for (int64_t t = 0; t < batch; ++t) {
        const int64_t token = step * batch + t;
        if (expected.margin[token] < 1e-5) continue;
        ASSERT_EQ(Slice(result.ids, 16, t, 1), Slice(expected.ids, 16, token, 1))
            << "batch " << batch << ", token " << token;
        // From the unbiased scores: with the bias of 7 all weights would be nearly equal.
        ExpectClose(Slice(result.weights, 16, t, 1), Slice(expected.weights, 16, token, 1), 1e-4);
      }
    }
  }
}

TEST_P(RouterTest, ForcedIdsKeepTheirOwnScores) {
  Random random(4);
  RouterTopKParams params = Params(3, 16, 2);
  const std::vector<float> logits = random.Normal(3 * 16);
  const std::vector<int32_t> forced = {0, 15, 3, 4, 7, 8};
  const Result result = Run(params, logits, {}, forced);
  EXPECT_EQ(result.ids, forced);
  for (int64_t t = 0; t < 3; ++t) {
    double s[2];
    for (int j = 0; j < 2; ++j) s[j] = 1 / (1 + std::exp(-double{logits[t * 16 + forced[2 * t + j]]}));
    for (int j = 0; j < 2; ++j) EXPECT_NEAR(result.weights[2 * t + j], s[j] / (s[0] + s[1]), 1e-6);
  }
}

TEST_P(RouterTest, NanLogitsStillGiveValidIds) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> logits(2 * 10, nan);
  for (int e = 0; e < 10; ++e) logits[10 + e] = static_cast<float>(e);
  const Result result = Run(Params(2, 10, 3), logits, {});
  std::vector<int32_t> first(result.ids.begin(), result.ids.begin() + 3);
  EXPECT_TRUE(std::is_sorted(first.begin(), first.end()));
  EXPECT_TRUE(first[0] >= 0 && first[2] < 10 && first[0] != first[1] && first[1] != first[2]);
  for (int j = 0; j < 3; ++j) EXPECT_TRUE(std::isnan(result.weights[j]));
  EXPECT_EQ(std::vector<int32_t>(result.ids.begin() + 3, result.ids.end()), (std::vector<int32_t>{7, 8, 9}));
}

TEST_P(RouterTest, PaddingHasNoExperts) {
  Random random(9);
  for (int32_t live : {0, 1, 5, 9, 12}) {
    RouterTopKParams params = Params(9, 32, 4);
    const std::vector<float> logits = random.Normal(9 * 32, 2);
    const Result all = Run(params, logits, {});
    const DeviceArray<int32_t> count(ops(), std::vector<int32_t>{live});
    params.live_tokens = count.data();
    const Result padded = Run(params, logits, {});
    for (int64_t t = 0; t < 9; ++t) {
      EXPECT_EQ(Slice(padded.ids, 4, t, 1), t < live ? Slice(all.ids, 4, t, 1) : std::vector<int32_t>(4, -1));
      EXPECT_EQ(Slice(padded.weights, 4, t, 1), t < live ? Slice(all.weights, 4, t, 1) : std::vector<float>(4, 0.0f));
    }
  }
}

TEST_P(RouterTest, ImpossibleChoicesAreRefusedWithNumbers) {
  const std::vector<float> logits(8);
  EXPECT_THROW(Run(Params(1, 8, 9), logits, {}), DeviceError);
  RouterTopKParams params = Params(1, 8, 4);
  params.groups = 4;
  params.topk_group = 1;
  try {
    Run(params, logits, {});
    FAIL() << "no error";
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("top_k = 4"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace k3::testing
