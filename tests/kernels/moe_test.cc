#include <numeric>

#include "kernels/core/mxfp4.h"
#include "tests/kernels/op_fixture.h"
#include "tests/kernels/oracle.h"

namespace k3::testing {
namespace {

enum class WeightKind { kBf16, kMxfp4 };

class MoeTest : public OpTest {
 protected:
  struct Layer {
    int64_t in = 0, inner = 0;
    std::vector<oracle::Expert> plain;  // all experts, dequantised
    std::vector<OwnedTensor> owned;     // storage behind `host`
    std::vector<HostExpert> host;
    ActivationSpec activation{Activation::kSitu, 4, 25};
    bool mxfp8_inputs = false;
  };

  struct Scales {  // MXFP4 scale codes
    uint8_t least, most;
  };

  // `first`: of the weights of both products of the input.
  static Layer MakeLayer(WeightKind kind, int32_t experts, int64_t in, int64_t inner, uint32_t seed,
                         Scales first = {121, 125}, Scales second = {121, 125}) {
    Random random(seed);
    Layer layer;
    layer.in = in;
    layer.inner = inner;
    layer.owned.reserve(static_cast<size_t>(experts) * 6);
    for (int32_t e = 0; e < experts; ++e) {
      HostExpert host;
      oracle::Expert plain;
      const auto make = [&](int64_t rows, int64_t cols, HostTensor& w, HostTensor& scale, std::vector<float>& values,
                            Scales range) {
        if (kind == WeightKind::kBf16) {
          values = Round(random.Normal(rows * cols, 0.2f), DType::kBF16);
          layer.owned.push_back(MakeTensor(values, DType::kBF16, {rows, cols}));
          w = layer.owned.back().tensor;
          return;
        }
        const std::vector<uint8_t> packed = random.Bytes(rows * cols / 2, 0, 255);
        const std::vector<uint8_t> scales = random.Bytes(rows * cols / 32, range.least, range.most);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols; ++c) {
            values.push_back(Mxfp4Value(packed.data() + r * cols / 2, scales.data() + r * cols / 32, c));
          }
        }
        layer.owned.push_back(MakeBytes(packed, {rows, cols / 2}));
        w = layer.owned.back().tensor;
        layer.owned.push_back(MakeBytes(scales, {rows, cols / 32}));
        scale = layer.owned.back().tensor;
      };
      make(inner, in, host.w1, host.w1_scale, plain.w1, first);
      make(inner, in, host.w3, host.w3_scale, plain.w3, first);
      make(in, inner, host.w2, host.w2_scale, plain.w2, second);
      layer.plain.push_back(std::move(plain));
      layer.host.push_back(host);
    }
    return layer;
  }

  std::vector<float> Run(const Layer& layer, const ExpertWeights& experts, const std::vector<float>& x,
                         const std::vector<int32_t>& ids, const std::vector<float>& weights, int32_t top_k,
                         DType out_dtype) {
    const int64_t tokens = static_cast<int64_t>(ids.size()) / top_k;
    const DeviceMatrix input(ops(), act(), tokens, layer.in, x), out(ops(), out_dtype, tokens, layer.in);
    const DeviceArray<int32_t> device_ids(ops(), ids);
    const DeviceArray<float> device_weights(ops(), weights);
    const DeviceBytes scratch(ops(), ops().MoeScratchBytes(tokens, top_k, experts.count, layer.in, layer.inner));
    MoeExpertsParams params;
    params.x = input;
    params.ids = device_ids.data();
    params.weights = device_weights.data();
    params.top_k = top_k;
    params.experts = &experts;
    params.activation = layer.activation;
    params.mxfp8_inputs = layer.mxfp8_inputs;
    params.out = out;
    params.scratch = scratch.data();
    ops().MoeExperts(params, ops().stream());
    return out.Get();
  }

  void Check(const Layer& layer, int32_t first, int32_t count, const std::vector<int32_t>& ids, int32_t top_k,
             uint32_t seed, const std::string& what, float deviation = 1) {
    Random random(seed);
    const int64_t tokens = static_cast<int64_t>(ids.size()) / top_k;
    const std::vector<float> x = Round(random.Normal(tokens * layer.in, deviation), act());
    const std::vector<float> weights = random.Uniform(tokens * top_k, 0, 1);
    const std::unique_ptr<ExpertWeights> experts =
        ops().MakeExperts(first, std::span(layer.host).subspan(static_cast<size_t>(first), static_cast<size_t>(count)));
    EXPECT_EQ(experts->first, first);
    EXPECT_EQ(experts->count, count);
    const std::vector<oracle::Expert> local(layer.plain.begin() + first, layer.plain.begin() + first + count);
    const oracle::Doubles expected =
        oracle::Moe(oracle::ToDouble(x), ids, oracle::ToDouble(weights), top_k, local, first, layer.activation, tokens,
                    layer.in, layer.inner, layer.mxfp8_inputs);
    // Two products and an activation in a row.
    ExpectClose(Run(layer, *experts, x, ids, weights, top_k, act()), expected, 3 * tolerance(), what);
    ExpectClose(Run(layer, *experts, x, ids, weights, top_k, DType::kF32), expected, 3 * tolerance(), what + " to F32");
  }

  // Sorted distinct ids per token.
  static std::vector<int32_t> RandomIds(int64_t tokens, int32_t experts, int32_t top_k, uint32_t seed) {
    std::mt19937 engine(seed);
    std::vector<int32_t> ids, all(static_cast<size_t>(experts));
    std::iota(all.begin(), all.end(), 0);
    for (int64_t t = 0; t < tokens; ++t) {
      std::shuffle(all.begin(), all.end(), engine);
      std::vector<int32_t> picks(all.begin(), all.begin() + top_k);
      std::sort(picks.begin(), picks.end());
      ids.insert(ids.end(), picks.begin(), picks.end());
    }
    return ids;
  }
  // Every token picks `first` and the next.
  static std::vector<int32_t> PairIds(int64_t tokens, int32_t first) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < 2 * tokens; ++i) ids.push_back(first + static_cast<int32_t>(i % 2));
    return ids;
  }
};
K3_INSTANTIATE_OPS(MoeTest);

TEST_P(MoeTest, MatchesTheOracle) {
  for (WeightKind kind : {WeightKind::kBf16, WeightKind::kMxfp4}) {
    const Layer layer = MakeLayer(kind, 8, 128, 96, 1);
    for (int64_t tokens : {1, 2, 15, 16, 17, 63, 64, 65, 200}) {
      Check(layer, 0, 8, RandomIds(tokens, 8, 2, 2), 2, static_cast<uint32_t>(tokens),
            std::to_string(tokens) + " tokens");
    }
  }
}

// Elements that fall to the other side of a tie, because the activation before it was rounded elsewhere, differ by a
// sixteenth: few of them, hence the wider tolerance.
TEST_P(MoeTest, InputsRoundedToMxfp8) {
  Layer layer = MakeLayer(WeightKind::kMxfp4, 8, 128, 96, 33);
  layer.mxfp8_inputs = true;
  for (int64_t tokens : {1, 2, 17, 64, 200}) {
    Random random(34);
    const std::vector<float> x = Round(random.Normal(tokens * layer.in, 3), act());
    const std::vector<int32_t> ids = RandomIds(tokens, 8, 2, 35);
    const std::vector<float> weights = random.Uniform(tokens * 2, 0, 1);
    const std::unique_ptr<ExpertWeights> experts = ops().MakeExperts(0, layer.host);
    const oracle::Doubles expected = oracle::Moe(oracle::ToDouble(x), ids, oracle::ToDouble(weights), 2, layer.plain, 0,
                                                 layer.activation, tokens, layer.in, layer.inner, true);
    const double close = act() == DType::kBF16 ? 2e-2 : ops().is_cpu() ? 1e-5 : 2e-3;
    const std::string what = std::to_string(tokens) + " tokens";
    ExpectClose(Run(layer, *experts, x, ids, weights, 2, act()), expected, close, what);
    // Unrounded inputs are several times as far away.
    const oracle::Doubles plain = oracle::Moe(oracle::ToDouble(x), ids, oracle::ToDouble(weights), 2, layer.plain, 0,
                                              layer.activation, tokens, layer.in, layer.inner);
    double difference = 0, norm = 0;
    for (size_t i = 0; i < plain.size(); ++i) {
      difference += (plain[i] - expected[i]) * (plain[i] - expected[i]);
      norm += expected[i] * expected[i];
    }
    EXPECT_GT(std::sqrt(difference / norm), 2.5e-2) << what;
  }
}

TEST_P(MoeTest, WidthsThatAreNotMultiplesOf64) {
  Check(MakeLayer(WeightKind::kMxfp4, 4, 96, 160, 3), 0, 4, RandomIds(9, 4, 3, 4), 3, 5, "MXFP4 96 x 160");
  if (!ops().is_cpu()) return;
  Check(MakeLayer(WeightKind::kBf16, 3, 50, 33, 6), 0, 3, RandomIds(9, 3, 1, 7), 1, 8, "BF16 50 x 33");
}

// 128 is the last for which one factor of bf16 does for the scale of a weight.
TEST_P(MoeTest, Mxfp4ScalesAroundOne) {
  for (uint8_t most : {128, 129, 131}) {
    const Scales scales = {118, most};
    const Layer layer = MakeLayer(WeightKind::kMxfp4, 4, 64, 64, 28, scales, scales);
    for (int64_t tokens : {9, 200}) {
      Check(layer, 0, 4, RandomIds(tokens, 4, 2, 29), 2, 30,
            std::to_string(tokens) + " tokens, scale codes to " + std::to_string(most));
    }
  }
}

// Scales near both ends of what fp32 can hold, with inputs that make up for them.
TEST_P(MoeTest, Mxfp4ScalesFarFromOne) {
  struct Case {
    Scales scales;
    float deviation;
  };
  for (const auto& [scales, deviation] :
       {Case{{0, 6}, 0x1p121f}, Case{{20, 30}, 0x1p100f}, Case{{225, 235}, 0x1p-104f}, Case{{244, 250}, 0x1p-119f}}) {
    const Layer layer = MakeLayer(WeightKind::kMxfp4, 4, 96, 64, 36, scales);
    for (int64_t tokens : {3, 9, 40, 200}) {
      Check(layer, 0, 4, RandomIds(tokens, 4, 2, 37), 2, 38,
            std::to_string(tokens) + " tokens, scale codes from " + std::to_string(scales.least), deviation);
    }
  }
}

// A token or two at the widths for which the device has kernels without a remainder, all experts here or some.
TEST_P(MoeTest, FewTokensAtRealWidths) {
  for (const auto& [in, inner] : std::vector<std::pair<int64_t, int64_t>>{{2304, 40}, {1792, 1024}, {264, 264}}) {
    const Layer layer = MakeLayer(WeightKind::kBf16, 12, in, inner, 16);
    for (const auto& [tokens, top_k] :
         std::vector<std::pair<int64_t, int32_t>>{{2, 8}, {1, 8}, {3, 8}, {1, 3}, {2, 11}}) {
      const std::vector<int32_t> ids = RandomIds(tokens, 12, top_k, 17);
      const std::string what =
          std::to_string(tokens) + " tokens, " + std::to_string(in) + " x " + std::to_string(inner);
      Check(layer, 0, 12, ids, top_k, 18, what);
      if (ops().is_cpu()) break;  // which has one kernel for all of them
      Check(layer, 4, 5, ids, top_k, 19, what + ", some experts");
    }
  }
}

TEST_P(MoeTest, SwigluExperts) {
  Layer layer = MakeLayer(WeightKind::kBf16, 6, 64, 64, 9);
  layer.activation = {Activation::kSwiglu, 1, 0};
  Check(layer, 0, 6, RandomIds(20, 6, 2, 10), 2, 11, "SwiGLU");
  Check(layer, 0, 6, RandomIds(150, 6, 2, 10), 2, 11, "SwiGLU of many tokens");
  // Gates up to some hundreds, whose sigmoids leave the range of floats.
  Check(layer, 0, 6, RandomIds(150, 6, 2, 10), 2, 11, "SwiGLU of large inputs", 80);
}

// B37: all tokens to one pair of experts, to the first or the last, others empty; guard bytes are checked by the
// fixture.
TEST_P(MoeTest, AllTokensToTheSameExperts) {
  const Layer layer = MakeLayer(WeightKind::kMxfp4, 8, 64, 64, 12);
  for (int64_t tokens : {1, 63, 64, 65, 1024}) {
    if (slow() && tokens == 1024) continue;
    for (int32_t first : {6, 0}) {
      Check(layer, 0, 8, PairIds(tokens, first), 2, 13, std::to_string(tokens) + " tokens to " + std::to_string(first));
    }
  }
  // Expert 0 gets none, expert 3 all.
  std::vector<int32_t> ids = RandomIds(65, 7, 1, 14), spread;
  for (int32_t id : ids) {
    const int32_t other = id + 1 == 3 ? 7 : id + 1;
    spread.push_back(std::min(3, other));
    spread.push_back(std::max(3, other));
  }
  Check(layer, 0, 8, spread, 2, 15, "one empty, one full");
}

// Every token picks expert 5 and another: few picks an expert on average, very many of one.
TEST_P(MoeTest, OneExpertAmongManyGetsMostTokens) {
  constexpr int32_t kExperts = 64;
  for (WeightKind kind : {WeightKind::kBf16, WeightKind::kMxfp4}) {
    const Layer layer = MakeLayer(kind, kExperts, 64, 32, 31);
    for (int64_t tokens : {9, 80, 700}) {
      std::vector<int32_t> ids;
      for (int32_t id : RandomIds(tokens, kExperts - 1, 1, 32)) {
        const int32_t other = id < 5 ? id : id + 1;
        ids.push_back(std::min(other, 5));
        ids.push_back(std::max(other, 5));
      }
      Check(layer, 0, kExperts, ids, 2, 33, std::to_string(tokens) + " tokens");
    }
  }
}

// The tiles of the large products are as wide as an expert's picks ask for, up to 320.
TEST_P(MoeTest, AnyNumberOfPicksAnExpert) {
  const std::vector<int32_t> counts = {17,  0,   50,   90,  128, 150, 161, 200, 209, 216, 225, 233,
                                       241, 249, 256,  257, 265, 273, 281, 288, 296, 300, 305, 313,
                                       1,   321, 1500, 7,   8,   9,   15,  16,  33,  63,  64,  65};
  for (WeightKind kind : {WeightKind::kBf16, WeightKind::kMxfp4}) {
    if (slow() && kind == WeightKind::kMxfp4) continue;
    const Layer layer = MakeLayer(kind, static_cast<int32_t>(counts.size()), 64, 96, 25);
    std::vector<int32_t> ids;
    for (size_t e = 0; e < counts.size(); ++e)
      ids.insert(ids.end(), static_cast<size_t>(counts[e]), static_cast<int32_t>(e));
    std::shuffle(ids.begin(), ids.end(), std::mt19937(26));
    Check(layer, 0, static_cast<int32_t>(counts.size()), ids, 1, 27, "every width");
  }
}

// More tiles of the large products than a device takes at a time: the second product waits for the first's in parts.
TEST_P(MoeTest, ManyTilesOfBothProducts) {
  constexpr int32_t kExperts = 80;
  for (WeightKind kind : {WeightKind::kBf16, WeightKind::kMxfp4}) {
    if (slow() && kind == WeightKind::kMxfp4) continue;
    Layer layer = MakeLayer(kind, kExperts, 160, 96, 34);
    layer.activation = {Activation::kSwiglu, 1, 0};
    // Ten of the experts get half of the picks, and expert 3 none.
    std::vector<int32_t> ids;
    std::mt19937 engine(35);
    for (int i = 0; i < 2200; ++i) {
      const int32_t id = static_cast<int32_t>(engine() % (i % 2 == 0 ? 10 : kExperts));
      ids.push_back(id == 3 ? 4 : id);
    }
    Check(layer, 0, kExperts, ids, 1, 36, "bf16 or MXFP4 " + std::to_string(static_cast<int>(kind)));
  }
}

// B37: the experts of 2 and 8 ranks; the ranks' sums add up to the whole.
TEST_P(MoeTest, RanksComputeTheirOwnExperts) {
  const Layer layer = MakeLayer(WeightKind::kMxfp4, 8, 64, 32, 16);
  for (int32_t ranks : {2, 8}) {
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const int32_t count = 8 / ranks;
      Check(layer, rank * count, count, RandomIds(40, 8, 2, 17), 2, 18, "rank " + std::to_string(rank));
    }
    // Nobody here: rows come out zero.
    Check(layer, 0, 8 / ranks, PairIds(5, 6), 2, 19, "no local pick");
  }
}

TEST_P(MoeTest, RowsDoNotDependOnTheBatch) {
  if (!batch_invariant()) GTEST_SKIP() << "not a batch-invariant backend";
  for (WeightKind kind : {WeightKind::kMxfp4, WeightKind::kBf16}) {
    // The larger number is planned by many blocks on devices.
    for (const int64_t tokens : {100, 1500}) {
      if (slow() && tokens > 100) continue;
      Layer layer = MakeLayer(kind, 8, 128, 96, 20);
      if (kind == WeightKind::kBf16) layer.activation = {Activation::kSwiglu, 1, 0};
      const std::unique_ptr<ExpertWeights> experts = ops().MakeExperts(0, layer.host);
      Random random(21);
      const std::vector<float> x = Round(random.Normal(tokens * 128), act());
      const std::vector<float> weights = random.Uniform(tokens * 3, 0, 1);
      const std::vector<int32_t> ids = RandomIds(tokens, 8, 3, 22);
      const std::vector<float> all = Run(layer, *experts, x, ids, weights, 3, act());
      for (int64_t count : {1, 2, 7, 33, 90}) {
        for (int64_t begin : {int64_t{0}, tokens - count}) {
          const std::vector<float> part = Run(layer, *experts, Slice(x, 128, begin, count), Slice(ids, 3, begin, count),
                                              Slice(weights, 3, begin, count), 3, act());
          ExpectSameBits(part, Slice(all, 128, begin, count),
                         std::to_string(count) + " tokens from " + std::to_string(begin));
        }
      }
    }
  }
}

TEST_P(MoeTest, MismatchedExpertsAreRefusedByName) {
  Layer layer = MakeLayer(WeightKind::kBf16, 2, 64, 32, 23);
  layer.host[1].w2 = layer.host[1].w1;
  layer.host[1].w2.name = "experts.1.w2.weight";
  try {
    ops().MakeExperts(0, layer.host);
    FAIL() << "no error";
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("experts.1.w2.weight"), std::string::npos) << error.what();
  }
}

TEST_P(MoeTest, RandomMxfp4ExpertsHaveTheWantedSpread) {
  HostExpert host;
  const auto random_tensor = [](HostTensor& w, HostTensor& scale, int64_t rows, int64_t cols, uint64_t seed) {
    w.dtype = scale.dtype = DType::kU8;
    w.shape = {rows, cols / 2};
    scale.shape = {rows, cols / 32};
    w.random_stddev = scale.random_stddev = 0.1f;
    w.random_seed = scale.random_seed = seed;
  };
  random_tensor(host.w1, host.w1_scale, 64, 64, 1);
  random_tensor(host.w3, host.w3_scale, 64, 64, 2);
  random_tensor(host.w2, host.w2_scale, 64, 64, 3);
  const std::unique_ptr<ExpertWeights> experts = ops().MakeExperts(0, {&host, 1});
  Layer layer;
  layer.in = layer.inner = 64;
  Random random(24);
  const std::vector<float> x = Round(random.Normal(64 * 64), act());
  const std::vector<float> out =
      Run(layer, *experts, x, std::vector<int32_t>(64, 0), std::vector<float>(64, 1.0f), 1, DType::kF32);
  const double squares = std::inner_product(out.begin(), out.end(), out.begin(), 0.0);
  EXPECT_GT(squares, 0.01);
  EXPECT_LT(squares / 4096, 10);
  ExpectSameBits(Run(layer, *ops().MakeExperts(0, {&host, 1}), x, std::vector<int32_t>(64, 0),
                     std::vector<float>(64, 1.0f), 1, DType::kF32),
                 out);
}

}  // namespace
}  // namespace k3::testing
