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

// --- balance over destination ranks ---

// What RouterBalance counts and chooses, straight from its description.
struct BalanceReference {
  BalanceReference(const RouterTopKParams& p, int32_t groups)
      : p(p), groups(groups), margins(groups * kMarginBins), load(groups) {}

  std::vector<int32_t> Best(const std::vector<float>& values, int32_t count) const {
    std::vector<int32_t> order(values.size());
    for (size_t e = 0; e < order.size(); ++e) order[e] = static_cast<int32_t>(e);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return values[a] > values[b]; });
    order.resize(static_cast<size_t>(count));
    return order;
  }
  // `own`: s + b of a row. Returns the choice, ascending.
  std::vector<int32_t> Add(const std::vector<float>& own, const float* delta, bool observed) {
    std::vector<float> biased = own;
    bool shifted = false;
    for (int32_t e = 0; e < p.experts; ++e) biased[e] += delta[GroupOfExpert(e, p.experts, groups)];
    for (int32_t g = 0; g < groups; ++g) shifted |= delta[g] != 0;
    const std::vector<int32_t> picks = Best(biased, std::min(2 * p.top_k, p.experts));
    std::vector<int32_t> ids(picks.begin(), picks.begin() + p.top_k), exact = Best(own, p.top_k);
    for (int32_t e : ids) ++load[GroupOfExpert(e, p.experts, groups)];
    if (observed) {
      ++sums[0];
      if (p.top_k < static_cast<int32_t>(picks.size())) {
        for (int32_t e : picks) {
          const float margin = biased[picks[p.top_k]] - own[e];
          const int bin = static_cast<int>(std::clamp((margin + 0.25f) * 256.0f, 0.0f, 127.0f));
          ++margins[GroupOfExpert(e, p.experts, groups) * kMarginBins + bin];
        }
        sums[1] += static_cast<uint64_t>((biased[picks[p.top_k - 1]] - biased[picks.back()]) * (1 << 20));
        for (int32_t e : ids) sums[2] += std::find(exact.begin(), exact.end(), e) == exact.end();
      }
    }
    std::sort(ids.begin(), ids.end());
    return ids;
  }

  RouterTopKParams p;
  int32_t groups;
  std::vector<uint32_t> margins, load;
  std::vector<uint64_t> sums = std::vector<uint64_t>(kBalanceSums);
};

TEST_P(RouterTest, ExpertsAreSharedOutAsOverRanks) {
  for (const auto& [experts, groups] : {std::pair{32, 8}, std::pair{896, 16}, std::pair{10, 4}, std::pair{7, 7}}) {
    for (int32_t g = 0; g < groups; ++g) {
      for (int32_t e = experts * g / groups; e < experts * (g + 1) / groups; ++e) {
        EXPECT_EQ(GroupOfExpert(e, experts, groups), g) << e << " of " << experts;
      }
    }
  }
}

TEST_P(RouterTest, BalanceShiftsWholeRanksAndCountsMargins) {
  Random random(12);
  const int64_t rows = 70;
  for (const auto& [experts, top_k, groups] : {std::tuple{32, 4, 8}, std::tuple{896, 16, 16}, std::tuple{100, 7, 3},
                                               std::tuple{8, 4, 2}, std::tuple{4, 4, 2}}) {
    for (int variant = 0; variant < 3; ++variant) {
      RouterTopKParams params = Params(rows, experts, top_k);
      params.biased_weights = variant == 2;
      const std::vector<float> bias = variant == 1 ? std::vector<float>{} : random.Normal(experts, 0.05f);
      const std::vector<float> logits = random.Normal(rows * experts, 0.7f);
      const Result exact = Run(params, logits, bias);
      // Slot 0 changes nothing, slot 1 lowers some ranks, slot 2 one of them by much. Three slots, of two layers each.
      std::vector<float> delta(static_cast<size_t>(3 * 2 * groups));
      for (int32_t g = 0; g < groups; ++g) delta[2 * groups + g] = g % 3 == 0 ? -0.02f * static_cast<float>(g + 1) : 0;
      delta[4 * groups + groups - 1] = -0.2f;
      std::vector<int32_t> slots = {0, 1, 2, 1}, sequences;
      for (int64_t t = 0; t < rows; ++t) sequences.push_back(static_cast<int32_t>(t * 4 / rows));
      const int32_t live = 60;
      const DeviceArray<float> device_delta(ops(), delta);
      const DeviceArray<int32_t> device_slots(ops(), slots), device_sequences(ops(), sequences);
      const DeviceArray<int32_t> device_live(ops(), std::vector<int32_t>{live});
      const DeviceArray<uint32_t> margins(ops(), std::vector<uint32_t>(groups * kMarginBins)),
          load(ops(), std::vector<uint32_t>(groups));
      const DeviceArray<uint64_t> sums(ops(), std::vector<uint64_t>(kBalanceSums));
      RouterBalance balance;
      balance.groups = groups;
      balance.delta = device_delta.data();
      balance.slot_stride = 2 * groups;
      balance.slot_of_sequence = device_slots.data();
      balance.sequence_of_token = device_sequences.data();
      balance.observe_every = variant == 0 ? 1 : 3;
      balance.margins = margins.data();
      balance.load = load.data();
      balance.sums = sums.data();
      params.balance = &balance;
      params.live_tokens = device_live.data();
      const Result result = Run(params, logits, bias);

      BalanceReference reference(params, groups);
      const std::string what = std::to_string(experts) + " experts, variant " + std::to_string(variant);
      for (int64_t t = 0; t < rows; ++t) {
        const std::vector<int32_t> ids = Slice(result.ids, top_k, t, 1);
        if (t >= live) {
          EXPECT_EQ(ids, std::vector<int32_t>(top_k, -1)) << what;
          continue;
        }
        std::vector<float> own(static_cast<size_t>(experts));
        for (int32_t e = 0; e < experts; ++e) {
          own[e] = 1.0f / (1.0f + std::exp(-logits[t * experts + e])) + (bias.empty() ? 0.0f : bias[e]);
        }
        const int32_t slot = slots[sequences[t]];
        ASSERT_EQ(ids, reference.Add(own, delta.data() + slot * 2 * groups, t % balance.observe_every == 0))
            << what << ", row " << t;
        // A bias of zero leaves the very bits of the exact router.
        if (slot != 0) continue;
        EXPECT_EQ(ids, Slice(exact.ids, top_k, t, 1)) << what;
        EXPECT_EQ(Slice(result.weights, top_k, t, 1), Slice(exact.weights, top_k, t, 1)) << what;
      }
      EXPECT_EQ(load.Get(), reference.load) << what;
      const std::vector<uint64_t> counted = sums.Get();
      EXPECT_EQ(counted[0], reference.sums[0]) << what;
      EXPECT_EQ(counted[2], reference.sums[2]) << what;
      EXPECT_EQ(counted[3], 0u);
      // Scores differ in their last bits between backends, so a gap may be a unit off and a margin in the next bin.
      EXPECT_NEAR(static_cast<double>(counted[1]), static_cast<double>(reference.sums[1]), 60) << what;
      const std::vector<uint32_t> bins = margins.Get();
      for (int32_t g = 0; g < groups; ++g) {
        int64_t below = 0, expected = 0, most = 0;
        for (int bin = 0; bin < kMarginBins; ++bin) {
          below += bins[g * kMarginBins + bin];
          expected += reference.margins[g * kMarginBins + bin];
          most = std::max(most, std::abs(below - expected));
        }
        EXPECT_EQ(below, expected) << what;
        EXPECT_LE(most, 2) << what;
      }
    }
  }
}

TEST_P(RouterTest, BalanceCountsTheSameInAnyOrder) {
  Random random(13);
  const int64_t rows = 96, experts = 64;
  const int32_t groups = 8, top_k = 8;
  const std::vector<float> logits = random.Normal(rows * experts, 0.7f), bias = random.Normal(experts, 0.05f);
  std::vector<float> reversed;
  for (int64_t t = rows; t-- > 0;)
    reversed.insert(reversed.end(), logits.begin() + t * experts, logits.begin() + (t + 1) * experts);
  std::vector<uint32_t> first_margins, first_load;
  std::vector<uint64_t> first_sums;
  const std::vector<float>* const orders[] = {&logits, &reversed};
  for (const std::vector<float>* order : orders) {
    RouterTopKParams params = Params(rows, experts, top_k);
    const DeviceArray<float> delta(ops(), std::vector<float>{0, -0.01f, 0, -0.03f, 0, 0, -0.2f, 0});
    const DeviceArray<int32_t> slots(ops(), std::vector<int32_t>{0}), sequences(ops(), std::vector<int32_t>(rows));
    const DeviceArray<uint32_t> margins(ops(), std::vector<uint32_t>(groups * kMarginBins)),
        load(ops(), std::vector<uint32_t>(groups));
    const DeviceArray<uint64_t> sums(ops(), std::vector<uint64_t>(kBalanceSums));
    const RouterBalance balance{.groups = groups,
                                .delta = delta.data(),
                                .slot_stride = groups,
                                .slot_of_sequence = slots.data(),
                                .sequence_of_token = sequences.data(),
                                .margins = margins.data(),
                                .load = load.data(),
                                .sums = sums.data()};
    params.balance = &balance;
    Run(params, *order, bias);
    if (first_sums.empty()) {
      first_margins = margins.Get();
      first_load = load.Get();
      first_sums = sums.Get();
    } else {
      EXPECT_EQ(margins.Get(), first_margins);
      EXPECT_EQ(load.Get(), first_load);
      EXPECT_EQ(sums.Get(), first_sums);
    }
  }
}

// All tokens want the first rank's experts; what is beyond its capacity goes to near candidates of ranks with room.
TEST_P(RouterTest, SoftCapSwapsWhatIsCheapAndDropsNothing) {
  Random random(14);
  const int64_t rows = 40;
  const int32_t experts = 32, groups = 4, top_k = 4, width = 2 * top_k;
  for (const float tau : {0.0f, 0.03f, 1.0f}) {
    RouterTopKParams params = Params(rows, experts, top_k);
    std::vector<float> logits = random.Normal(rows * experts, 0.3f);
    for (int64_t t = 0; t < rows; ++t) {
      for (int32_t e = 0; e < 8; ++e) logits[t * experts + e] += 0.35f;
    }
    const DeviceArray<float> delta(ops(), std::vector<float>(groups));
    const DeviceArray<int32_t> slots(ops(), std::vector<int32_t>{0}), sequences(ops(), std::vector<int32_t>(rows));
    const DeviceArray<uint32_t> margins(ops(), std::vector<uint32_t>(groups * kMarginBins)),
        load(ops(), std::vector<uint32_t>(groups));
    const DeviceArray<uint64_t> sums(ops(), std::vector<uint64_t>(kBalanceSums));
    const DeviceArray<int32_t> candidates(ops(), static_cast<size_t>(rows * width));
    const DeviceArray<float> values(ops(), static_cast<size_t>(rows * width)),
        scores(ops(), static_cast<size_t>(rows * width));
    const DeviceArray<int32_t> live(ops(), std::vector<int32_t>{36});
    RouterBalance balance{.groups = groups,
                          .delta = delta.data(),
                          .slot_stride = groups,
                          .slot_of_sequence = slots.data(),
                          .sequence_of_token = sequences.data(),
                          .margins = margins.data(),
                          .load = load.data(),
                          .sums = sums.data()};
    balance.candidates = candidates.data();
    balance.candidate_values = values.data();
    balance.candidate_scores = scores.data();
    const DeviceArray<float> device_logits(ops(), logits);
    const DeviceArray<int32_t> ids(ops(), static_cast<size_t>(rows * top_k));
    const DeviceArray<float> weights(ops(), static_cast<size_t>(rows * top_k));
    params.balance = &balance;
    params.live_tokens = live.data();
    params.logits = device_logits.data();
    params.ids = ids.data();
    params.weights = weights.data();
    ops().RouterTopK(params, ops().stream());
    const std::vector<int32_t> before = ids.Get();
    const std::vector<uint32_t> wanted = load.Get();
    RouterSoftCapParams cap{.balance = &balance,
                            .tokens = rows,
                            .experts = experts,
                            .top_k = top_k,
                            .tau = tau,
                            .live_tokens = live.data(),
                            .ids = ids.data(),
                            .weights = weights.data()};
    ops().RouterSoftCap(cap, ops().stream());
    const std::vector<int32_t> after = ids.Get();
    const std::vector<float> mixed = weights.Get(), value = values.Get(), score = scores.Get();
    const std::vector<int32_t> candidate = candidates.Get();

    // Again, in the order that the rule gives.
    const int32_t capacity = static_cast<int32_t>(std::ceil(1.10f * 36 * top_k / groups));
    std::vector<int32_t> room(groups, capacity), seen(groups);
    for (int32_t i = 0; i < 36 * top_k; ++i) --room[before[i] / 8];
    uint64_t swaps = 0;
    std::vector<uint32_t> expected_load(groups);
    for (int64_t t = 0; t < 36; ++t) {
      std::vector<int32_t> places;
      for (int32_t j = 0; j < top_k; ++j) {
        int32_t place = j;
        if (++seen[candidate[t * width + j] / 8] > capacity) {
          for (int32_t c = top_k; c < width; ++c) {
            const bool near = value[t * width + c] >= value[t * width + top_k] - tau;
            if (!near || room[candidate[t * width + c] / 8] <= 0 ||
                std::find(places.begin(), places.end(), c) != places.end())
              continue;
            --room[candidate[t * width + c] / 8];
            place = c;
            ++swaps;
            break;
          }
        }
        places.push_back(place);
      }
      std::sort(places.begin(), places.end(),
                [&](int32_t a, int32_t b) { return candidate[t * width + a] < candidate[t * width + b]; });
      float sum = 0;
      for (int32_t c : places) sum += score[t * width + c];
      for (int32_t j = 0; j < top_k; ++j) {
        EXPECT_EQ(after[t * top_k + j], candidate[t * width + places[j]]) << "tau " << tau << ", row " << t;
        EXPECT_NEAR(mixed[t * top_k + j], score[t * width + places[j]] / sum, 1e-6);
        ++expected_load[after[t * top_k + j] / 8];
      }
    }
    for (int64_t i = 36 * top_k; i < rows * top_k; ++i) EXPECT_EQ(after[i], -1);
    EXPECT_EQ(load.Get(), expected_load);
    EXPECT_EQ(sums.Get()[3], swaps);
    EXPECT_GT(wanted[0], static_cast<uint32_t>(capacity));
    EXPECT_GE(swaps, tau == 1.0f ? 10u : 0u);
  }
}

}  // namespace
}  // namespace k3::testing
