#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "engine/quantile_control.h"
#include "kernels/ops.h"
#include "tests/testing/routing_world.h"

// Balance on synthetic tokens, by the router itself: how even ranks are loaded, and at what price in choices changed.
// Tied to published figures only in that the mild shift gives the imbalance seen on a real run with 16 ranks; the hard
// one is a stress case. How many choices must change at least depends on the world alone: of a rank with more than
// kappa times its share, the excess. Worlds of other seeds give the same 1.40 with several hot ranks, where even the
// best possible choice keeps less than 0.94; this one has one hot rank and some warm ones.
namespace k3 {
namespace {

using testing::RoutingWorld;

constexpr uint32_t kSeed = 66;
constexpr float kMildGap = 0.19f;
constexpr float kHardGap = 1.25f;
constexpr int32_t kTopK = RoutingWorld::kTopK, kExperts = RoutingWorld::kExperts;

Ops& CpuOps() {
  static const std::unique_ptr<Ops> ops = MakeCpuOps({.threads = 2});
  return *ops;
}

// Trained once; a copy draws the same tokens whatever ran before.
RoutingWorld Mild() {
  static const RoutingWorld world(kMildGap, kSeed);
  return world;
}
RoutingWorld Hard() {
  static const RoutingWorld world(kHardGap, kSeed);
  return world;
}

double MaxOverMean(const std::vector<double>& load) {
  const double sum = std::accumulate(load.begin(), load.end(), 0.0);
  return *std::max_element(load.begin(), load.end()) * static_cast<double>(load.size()) / sum;
}

// One source rank that routes a single layer, with or without control.
class Source {
 public:
  Source(const RoutingWorld& world, int32_t groups, const QuantileOptions* options)
      : world_(world),
        controlled_(options != nullptr),
        control_(1, groups, kTopK, options != nullptr ? *options : QuantileOptions{}) {}

  // Replays a recorded epoch.
  Source(const RoutingWorld& world, const BiasEpoch& epoch)
      : world_(world), controlled_(false), control_(kTopK, epoch) {}

  // Routes the tokens and ends the step. Adds to `load` [groups]; returns how many
  // choices differ from those without a bias.
  uint64_t Route(const std::vector<float>& logits, bool prompt, std::vector<double>* load,
                 std::vector<int32_t>* ids = nullptr) {
    const int32_t groups = control_.groups();
    const auto epoch = control_.current();
    const int64_t tokens = static_cast<int64_t>(logits.size()) / kExperts;
    std::vector<uint32_t> margins(static_cast<size_t>(groups * kMarginBins)), chosen(static_cast<size_t>(groups));
    std::vector<uint64_t> sums(kBalanceSums);
    std::vector<int32_t> sequences(static_cast<size_t>(tokens)), picks(static_cast<size_t>(tokens * kTopK));
    std::vector<float> weights(picks.size());
    const int32_t slot = 0;
    const RouterBalance balance{.groups = groups,
                                .delta = epoch->delta.data(),
                                .slot_stride = groups,
                                .slot_of_sequence = &slot,
                                .sequence_of_token = sequences.data(),
                                .margins = margins.data(),
                                .load = chosen.data(),
                                .sums = sums.data()};
    RouterTopKParams router;
    router.logits = logits.data();
    router.tokens = tokens;
    router.experts = kExperts;
    router.top_k = kTopK;
    router.bias = world_.bias().data();
    router.ids = picks.data();
    router.weights = weights.data();
    router.balance = &balance;
    CpuOps().RouterTopK(router, CpuOps().stream());
    for (int32_t g = 0; g < groups; ++g) (*load)[static_cast<size_t>(g)] += chosen[static_cast<size_t>(g)];
    if (ids != nullptr) *ids = picks;
    if (controlled_) {
      control_.histogram(0).Add(margins.data(), sums.data());
      if (control_.StepEnds(tokens, prompt)) control_.Update();
    }
    return sums[2];
  }
  const QuantileControl& control() const { return control_; }

 private:
  const RoutingWorld& world_;
  bool controlled_;
  QuantileControl control_;
};

struct Balance {
  double max_over_mean = 0;  // the mean over steps
  double kept = 0;           // share of choices that are the exact router's
  double best_kept = 0;      // the most that can be kept when no rank gets more than 1.05 times its share
};

// Chunks of 1024 tokens on each of four source ranks, an update after each.
Balance Simulate(RoutingWorld& world, const RoutingWorld::Mix& mix, int32_t groups, const QuantileOptions* options,
                 int warm_up, int steps) {
  constexpr int kSources = 4, kTokens = 1024;
  std::vector<Source> ranks(kSources, Source(world, groups, options));
  Balance balance;
  uint64_t overrides = 0;
  std::vector<double> all(static_cast<size_t>(groups));
  for (int step = 0; step < warm_up + steps; ++step) {
    std::vector<double> load(static_cast<size_t>(groups));
    uint64_t changed = 0;
    for (Source& rank : ranks) changed += rank.Route(world.Logits(kTokens, mix), /*prompt=*/true, &load);
    if (step < warm_up) continue;
    balance.max_over_mean += MaxOverMean(load) / steps;
    overrides += changed;
    for (size_t g = 0; g < all.size(); ++g) all[g] += load[g];
  }
  const double choices = static_cast<double>(steps) * kSources * kTokens * kTopK;
  balance.kept = 1 - static_cast<double>(overrides) / choices;
  balance.best_kept = 1;
  for (const double load : all) balance.best_kept -= std::max(0.0, load / choices - 1.05 / groups);
  return balance;
}

void Show(const char* name, const Balance& balance) {
  std::printf("%-24s max/mean %.3f kept %.4f (without control at most %.4f could be kept)\n", name,
              balance.max_over_mean, balance.kept, balance.best_kept);
}

QuantileOptions NoGuards() {
  QuantileOptions options;
  options.guards = false;
  return options;
}

// The generator gives the imbalance of the frozen bias that it was calibrated for: 1.03, 1.073 and 1.40.
TEST(RoutingBalanceTest, FrozenRows) {
  RoutingWorld mild = Mild(), hard = Hard();
  const Balance training = Simulate(mild, RoutingWorld::kTrainingMix, 16, nullptr, 0, 4);
  const Balance shifted = Simulate(mild, RoutingWorld::kShiftedMix, 16, nullptr, 0, 4);
  const Balance stressed = Simulate(hard, RoutingWorld::kShiftedMix, 16, nullptr, 0, 4);
  Show("frozen, training mix", training);
  Show("frozen, mild shift", shifted);
  Show("frozen, hard shift", stressed);
  EXPECT_NEAR(training.max_over_mean, 1.03, 0.02);
  EXPECT_NEAR(shifted.max_over_mean, 1.073, 0.02);
  EXPECT_NEAR(stressed.max_over_mean, 1.40, 0.02);
  EXPECT_EQ(stressed.kept, 1.0);
}

TEST(RoutingBalanceTest, SixteenRanksUnderAHardShift) {
  const QuantileOptions options = NoGuards();
  RoutingWorld hard = Hard();
  const Balance frozen = Simulate(hard, RoutingWorld::kShiftedMix, 16, nullptr, 0, 2);
  const Balance stressed = Simulate(hard, RoutingWorld::kShiftedMix, 16, &options, 6, 5);
  Show("control, hard shift", stressed);
  std::printf("%-24s %.4f\n", "best possible", frozen.best_kept);
  EXPECT_LE(stressed.max_over_mean, 1.15);
  EXPECT_GE(stressed.kept, 0.94);
  // Nothing is changed beyond what must be: near the optimum of this world.
  EXPECT_GE(stressed.kept, frozen.best_kept - 0.015);
}

TEST(RoutingBalanceTest, SixteenRanksUnderAMildShiftAndNone) {
  const QuantileOptions options = NoGuards();
  RoutingWorld mild = Mild();
  const Balance shifted = Simulate(mild, RoutingWorld::kShiftedMix, 16, &options, 6, 5);
  Show("control, mild shift", shifted);
  EXPECT_LE(shifted.max_over_mean, 1.06);
  EXPECT_GE(shifted.kept, 0.985);
  const Balance training = Simulate(mild, RoutingWorld::kTrainingMix, 16, &options, 6, 5);
  Show("control, training mix", training);
  EXPECT_GE(training.kept, 0.999);
}

// The guard is for shifts like the hard one: it holds the share of changed choices down, and balance with it.
TEST(RoutingBalanceTest, TheGuardHoldsOverridesDown) {
  const QuantileOptions guarded;
  RoutingWorld hard = Hard();
  const Balance held = Simulate(hard, RoutingWorld::kShiftedMix, 16, &guarded, 20, 3);
  Show("guarded, hard shift", held);
  EXPECT_GE(held.kept, 0.965);
  EXPECT_LT(held.max_over_mean, 1.36);
}

// The domain flips every 40 steps, 128 tokens a rank and step, four steps to an update: 24 steps later the balance is
// within a tenth of the steady one.
TEST(RoutingBalanceTest, SettlesWithin24StepsOfAFlip) {
  const QuantileOptions options = NoGuards();
  RoutingWorld hard = Hard();
  constexpr RoutingWorld::Mix kOther = {0.03, 0.9, 0.04, 0.03};
  std::vector<Source> ranks(4, Source(hard, 16, &options));
  double settled = 0, steady = 0, at_flip = 0;
  for (int step = 0; step < 120; ++step) {
    std::vector<double> load(16);
    const bool flipped = step / 40 % 2 == 1;
    for (Source& rank : ranks) {
      rank.Route(hard.Logits(128, flipped ? kOther : RoutingWorld::kShiftedMix), /*prompt=*/false, &load);
    }
    const double balance = MaxOverMean(load);
    const int since = step % 40;
    if (step < 40) continue;
    if (since < 4) at_flip += balance / 8;
    if (since >= 24 && since < 32) settled += balance / 16;
    if (since >= 32) steady += balance / 16;
  }
  std::printf("at the flip %.3f, 24 to 31 steps later %.3f, then %.3f\n", at_flip, settled, steady);
  EXPECT_GT(at_flip, steady * 1.1);
  EXPECT_LE(settled, steady * 1.1);
}

// Two ranks see the same tokens in different order and come to the same epochs, bit for bit; and a router that is given
// the recorded epochs makes the same choices again.
TEST(RoutingBalanceTest, OrderDoesNotMatterAndEpochsReplay) {
  const QuantileOptions options;
  RoutingWorld hard = Hard();
  Source forward(hard, 16, &options), shuffled(hard, 16, &options);
  std::mt19937 random(3);
  for (int step = 0; step < 8; ++step) {
    const std::vector<float> logits = hard.Logits(256, RoutingWorld::kShiftedMix);
    std::vector<size_t> order(256);
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    std::vector<float> mixed;
    for (const size_t t : order) {
      mixed.insert(mixed.end(), logits.begin() + static_cast<ptrdiff_t>(t * kExperts),
                   logits.begin() + static_cast<ptrdiff_t>((t + 1) * kExperts));
    }
    const auto epoch = forward.control().current();
    std::vector<double> one(16), other(16), again(16);
    std::vector<int32_t> ids, replayed;
    forward.Route(logits, /*prompt=*/true, &one, &ids);
    shuffled.Route(mixed, /*prompt=*/true, &other);
    EXPECT_EQ(one, other);
    EXPECT_EQ(forward.control().current()->number, shuffled.control().current()->number);
    EXPECT_EQ(forward.control().current()->delta, shuffled.control().current()->delta);
    Source recorded(hard, *epoch);
    recorded.Route(logits, /*prompt=*/true, &again, &replayed);
    EXPECT_EQ(ids, replayed);
  }
  EXPECT_GE(forward.control().current()->number, 3u);
  const auto& delta = forward.control().current()->delta;
  EXPECT_LT(*std::min_element(delta.begin(), delta.end()), 0.0f);
  EXPECT_LE(*std::max_element(delta.begin(), delta.end()), 0.0f);
}

}  // namespace
}  // namespace k3
