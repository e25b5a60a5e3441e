#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/core/error.h"
#include "tests/kernels/op_fixture.h"

// Rows and parts as they travel between ranks: copies, sums in the fixed tree, slots by destination. Which test covers
// which op of kernels/ops.h: kernels/README.md, "Tests of the ops".
namespace k3::testing {
namespace {

constexpr int64_t kEdges[] = {1, 15, 16, 17, 63, 64, 65};

class RowsTest : public OpTest {
 protected:
  // Types that sums and slots take on this backend.
  std::vector<DType> types() const {
    return ops().is_cpu() ? std::vector<DType>{DType::kF32} : std::vector<DType>{DType::kF32, DType::kBF16};
  }
};
K3_INSTANTIATE_OPS(RowsTest);

// The tree of core/tree_sum.h, written out: neighbours, then neighbours of the sums.
float Tree(std::vector<float> level) {
  while (level.size() > 1) {
    std::vector<float> next;
    for (size_t i = 0; i < level.size(); i += 2) {
      next.push_back(i + 1 < level.size() ? level[i] + level[i + 1] : level[i]);
    }
    level = next;
  }
  return level[0];
}

std::vector<float> TreeOfParts(const std::vector<float>& data, int parts, DType dtype) {
  const size_t count = data.size() / static_cast<size_t>(parts);
  std::vector<float> sums;
  for (size_t i = 0; i < count; ++i) {
    std::vector<float> values;
    for (size_t p = 0; p < static_cast<size_t>(parts); ++p) values.push_back(data[p * count + i]);
    sums.push_back(Tree(values));
  }
  return Round(sums, dtype);
}

TEST_P(RowsTest, CopyMatrixCopiesRowsAndNothingBetweenThem) {
  Random random(11);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t rows : kEdges) {
      for (const int64_t cols : kEdges) {
        const std::vector<float> values = Round(random.Normal(rows * cols), dtype);
        const DeviceMatrix from(ops(), dtype, rows, cols, values, /*gap=*/3), to(ops(), dtype, rows, cols, /*gap=*/9);
        ops().CopyMatrix({from, to}, ops().stream());
        ExpectSameBits(to.Get(), values, std::to_string(rows) + "x" + std::to_string(cols));  // Get looks at the gaps
      }
    }
  }
  // Part of the columns, as the gathered logits use it.
  const std::vector<float> values = random.Normal(6 * 5);
  const DeviceMatrix part(ops(), DType::kF32, 6, 5, values), whole(ops(), DType::kF32, 6, 10);
  ops().CopyMatrix({part, whole.view().Columns(5, 5)}, ops().stream());
  ops().CopyMatrix({part, whole.view().Columns(0, 5)}, ops().stream());
  const std::vector<float> both = whole.Get();
  for (int64_t row = 0; row < 6; ++row) {
    ExpectSameBits(Slice(both, 5, row * 2, 1), Slice(values, 5, row, 1));
    ExpectSameBits(Slice(both, 5, row * 2 + 1, 1), Slice(values, 5, row, 1));
  }
  ops().CopyMatrix({part.view().Rows(0, 0), whole.view().Columns(0, 5).Rows(0, 0)}, ops().stream());
}

TEST_P(RowsTest, CopyMatrixRefusesOtherShapes) {
  const DeviceMatrix from(ops(), DType::kF32, 3, 4), narrow(ops(), DType::kF32, 3, 3), low(ops(), DType::kF32, 2, 4);
  const DeviceMatrix other(ops(), DType::kBF16, 3, 4);
  for (const DeviceMatrix* to : {&narrow, &low, &other}) {
    EXPECT_THROW(ops().CopyMatrix({from, *to}, ops().stream()), DeviceError);
  }
}

TEST_P(RowsTest, TreeSumAddsNeighboursFirst) {
  Random random(12);
  for (const DType dtype : types()) {
    for (const int parts : {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64}) {
      for (const int64_t count : kEdges) {
        const std::vector<float> data = Round(random.Normal(parts * count, /*stddev=*/100), dtype);
        const std::string what = std::to_string(parts) + " parts of " + std::to_string(count);
        const std::vector<float> expected = TreeOfParts(data, parts, dtype);
        DeviceBytes in(ops(), data.size() * SizeOf(dtype)), out(ops(), static_cast<size_t>(count) * SizeOf(dtype));
        const std::vector<uint8_t> encoded = Encode(data, dtype);
        in.Upload(encoded.data(), encoded.size());
        const TreeSumParams params{
            .data = in.data(), .parts = parts, .count = count, .dtype = dtype, .out = out.data()};
        ops().TreeSum(params, ops().stream());
        ExpectSameBits(Decode(out.Download(), dtype), expected, what);
        // In place of the first part.
        TreeSumParams in_place = params;
        in_place.out = in.data();
        ops().TreeSum(in_place, ops().stream());
        std::vector<float> first = Decode(in.Download(), dtype);
        first.resize(static_cast<size_t>(count));
        ExpectSameBits(first, expected, what + " in place");
      }
    }
  }
}

TEST_P(RowsTest, TreeSumOfManyElementsIsThatOfFew) {
  Random random(13);
  constexpr int64_t kCount = 70001;
  constexpr int kParts = 6;
  const std::vector<float> data = random.Normal(kParts * kCount);
  const DeviceArray<float> in(ops(), data), out(ops(), static_cast<size_t>(kCount));
  ops().TreeSum({.data = in.data(), .parts = kParts, .count = kCount, .out = out.data()}, ops().stream());
  ExpectSameBits(out.Get(), TreeOfParts(data, kParts, DType::kF32));
}

TEST_P(RowsTest, TreeSumRefusals) {
  const DeviceArray<float> data(ops(), 8), out(ops(), 8);
  const TreeSumParams good{.data = data.data(), .parts = 2, .count = 4, .out = out.data()};
  ops().TreeSum(good, ops().stream());
  TreeSumParams bad = good;
  bad.parts = 0;
  EXPECT_THROW(ops().TreeSum(bad, ops().stream()), DeviceError);
  bad.parts = 100000;
  EXPECT_THROW(ops().TreeSum(bad, ops().stream()), DeviceError);
  bad = good;
  bad.data = nullptr;
  EXPECT_THROW(ops().TreeSum(bad, ops().stream()), DeviceError);
  bad = good;
  bad.dtype = DType::kF16;
  EXPECT_THROW(ops().TreeSum(bad, ops().stream()), DeviceError);
  bad = good;
  bad.count = 0;
  bad.data = bad.out = nullptr;
  ops().TreeSum(bad, ops().stream());  // nothing to do
}

// --- slots ---

// Everything of one PackSlots call.
struct Slots {
  int64_t tokens, rows, width;
  int32_t top_k, experts, parts, first_part, peers;
  DType dtype;
  std::vector<float> x, weights;
  std::vector<int32_t> ids;

  Slots(Random& random, DType dtype_in, int64_t tokens_in, int64_t width_in)
      : tokens(tokens_in),
        rows(tokens_in + 2),
        width(width_in),
        top_k(3),
        experts(22),
        parts(6),
        first_part(1),
        peers(4),
        dtype(dtype_in) {
    x = Round(random.Normal(tokens * width), dtype);
    weights = random.Uniform(tokens * top_k, 0, 1);
    for (int64_t i = 0; i < tokens; ++i) {
      // Some tokens have fewer experts or none, as padding has.
      std::vector<int32_t> picks;
      const int count = random.Int(0, 9) == 0 ? random.Int(0, top_k - 1) : top_k;
      while (static_cast<int>(picks.size()) < count) {
        const int32_t id = random.Int(0, experts - 1);
        if (std::find(picks.begin(), picks.end(), id) == picks.end()) picks.push_back(id);
      }
      std::sort(picks.begin(), picks.end());
      picks.resize(static_cast<size_t>(top_k), -1);
      ids.insert(ids.end(), picks.begin(), picks.end());
    }
  }
  bool Wants(int64_t token, int32_t peer) const {
    const int32_t part = first_part + peer;
    for (int32_t j = 0; j < top_k; ++j) {
      const int32_t id = ids[static_cast<size_t>(token * top_k + j)];
      if (id >= experts * part / parts && id < experts * (part + 1) / parts) return true;
    }
    return false;
  }
};

TEST_P(RowsTest, PackSlotsSendsEachRowOnceToEveryRankItChose) {
  Random random(14);
  for (const DType dtype : types()) {
    for (const int64_t tokens : {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{16}, int64_t{17}, int64_t{63},
                                 int64_t{64}, int64_t{65}, int64_t{600}}) {
      for (const int64_t width : {int64_t{5}, int64_t{64}}) {
        SCOPED_TRACE(std::to_string(tokens) + " rows of " + std::to_string(width));
        const Slots s(random, dtype, tokens, width);
        const int64_t all = s.peers * s.rows;
        const DeviceMatrix x(ops(), dtype, std::max<int64_t>(tokens, 1), width,
                             s.tokens > 0 ? s.x : random.Normal(width));
        const DeviceMatrix out(ops(), dtype, all, width);
        const DeviceArray<int32_t> ids(ops(), s.ids), counts(ops(), 4), slots(ops(), static_cast<size_t>(all));
        const DeviceArray<float> weights(ops(), s.weights);
        const DeviceArray<int32_t> out_ids(ops(), static_cast<size_t>(all * s.top_k));
        const DeviceArray<float> out_weights(ops(), static_cast<size_t>(all * s.top_k));
        ops().PackSlots({.x = x.view().Rows(0, tokens),
                         .ids = ids.data(),
                         .weights = weights.data(),
                         .top_k = s.top_k,
                         .experts = s.experts,
                         .parts = s.parts,
                         .first_part = s.first_part,
                         .peers = s.peers,
                         .rows = s.rows,
                         .out = out,
                         .out_ids = out_ids.data(),
                         .out_weights = out_weights.data(),
                         .counts = counts.data(),
                         .slots = slots.data()},
                        ops().stream());
        const std::vector<float> got = out.Get(), got_weights = out_weights.Get();
        const std::vector<int32_t> got_ids = out_ids.Get(), got_counts = counts.Get(), got_slots = slots.Get();
        for (int32_t peer = 0; peer < s.peers; ++peer) {
          int32_t used = 0;
          for (int64_t t = 0; t < tokens; ++t) {
            const int32_t slot = got_slots[static_cast<size_t>(peer * s.rows + t)];
            ASSERT_EQ(slot, s.Wants(t, peer) ? used : -1) << "peer " << peer << " row " << t;
            if (slot < 0) continue;
            ++used;
            const int64_t at = peer * s.rows + slot;
            ExpectSameBits(Slice(got, width, at, 1), Slice(s.x, width, t, 1));
            EXPECT_EQ(Slice(got_ids, s.top_k, at, 1), Slice(s.ids, s.top_k, t, 1));
            ExpectSameBits(Slice(got_weights, s.top_k, at, 1), Slice(s.weights, s.top_k, t, 1));
          }
          EXPECT_EQ(got_counts[static_cast<size_t>(peer)], used);
          for (int64_t slot = used; slot < s.rows; ++slot) {
            EXPECT_THAT(Slice(got_ids, s.top_k, peer * s.rows + slot, 1), ::testing::Each(-1));
            // What is not sent is not written either: still the poison.
            EXPECT_TRUE(std::isnan(got[static_cast<size_t>((peer * s.rows + slot) * width)]));
          }
        }
      }
    }
  }
}

TEST_P(RowsTest, SumSlotsAddsWhatCameBackInTheTreeOverPeers) {
  Random random(15);
  for (const DType dtype : types()) {
    for (const int peers : {1, 2, 3, 4, 7, 8, 16, 17, 64}) {
      for (const int64_t tokens : kEdges) {
        const int64_t rows = tokens + 1, width = 17;
        // Row t has a slot at some of the peers; slots that nobody asks for hold NaN.
        std::vector<int32_t> slots(static_cast<size_t>(peers * rows), 1 << 30);
        std::vector<float> data(static_cast<size_t>(peers * rows * width), NAN),
            parts(static_cast<size_t>(peers * tokens * width));
        for (int p = 0; p < peers; ++p) {
          int32_t used = 0;
          for (int64_t t = 0; t < tokens; ++t) {
            const bool there = random.Int(0, 2) > 0;
            slots[static_cast<size_t>(p * rows + t)] = there ? used : -1;
            if (!there) continue;
            const std::vector<float> row = Round(random.Normal(width, 100), dtype);
            std::copy(row.begin(), row.end(), data.begin() + (p * rows + used) * width);
            std::copy(row.begin(), row.end(), parts.begin() + (p * tokens + t) * width);
            ++used;
          }
        }
        DeviceBytes in(ops(), data.size() * SizeOf(dtype));
        const std::vector<uint8_t> encoded = Encode(data, dtype);
        in.Upload(encoded.data(), encoded.size());
        const DeviceArray<int32_t> device_slots(ops(), slots);
        const DeviceMatrix out(ops(), dtype, tokens, width);
        ops().SumSlots(
            {.data = in.data(), .slots = device_slots.data(), .peers = peers, .rows = rows, .out = out.view()},
            ops().stream());
        ExpectSameBits(out.Get(), TreeOfParts(parts, peers, dtype),
                       std::to_string(peers) + " peers, " + std::to_string(tokens) + " rows");
      }
    }
  }
}

TEST_P(RowsTest, SlotsRefuseWhatDoesNotFit) {
  Random random(16);
  const Slots s(random, DType::kF32, 4, 8);
  const DeviceMatrix x(ops(), DType::kF32, 4, 8, s.x), out(ops(), DType::kF32, s.peers * s.rows, 8, 0);
  const DeviceArray<int32_t> ids(ops(), s.ids), counts(ops(), 4), slots(ops(), 64), out_ids(ops(), 100);
  const DeviceArray<float> weights(ops(), s.weights), out_weights(ops(), 100);
  const PackSlotsParams good{.x = x,
                             .ids = ids.data(),
                             .weights = weights.data(),
                             .top_k = s.top_k,
                             .experts = s.experts,
                             .parts = s.parts,
                             .first_part = s.first_part,
                             .peers = s.peers,
                             .rows = s.rows,
                             .out = out,
                             .out_ids = out_ids.data(),
                             .out_weights = out_weights.data(),
                             .counts = counts.data(),
                             .slots = slots.data()};
  ops().PackSlots(good, ops().stream());
  const auto refused = [&](auto&& change) {
    PackSlotsParams bad = good;
    change(bad);
    EXPECT_THROW(ops().PackSlots(bad, ops().stream()), DeviceError);
  };
  refused([](PackSlotsParams& p) { p.first_part = 3; });
  refused([](PackSlotsParams& p) { p.rows = 3; });
  refused([](PackSlotsParams& p) { p.top_k = 0; });
  refused([](PackSlotsParams& p) { p.ids = nullptr; });
  refused([](PackSlotsParams& p) { p.counts = nullptr; });
  refused([](PackSlotsParams& p) { p.out = p.out.Rows(0, 5); });
  const SumSlotsParams sum{
      .data = out.view().data, .slots = slots.data(), .peers = s.peers, .rows = s.rows, .out = x.view()};
  SumSlotsParams bad = sum;
  bad.rows = 3;
  EXPECT_THROW(ops().SumSlots(bad, ops().stream()), DeviceError);
  bad = sum;
  bad.peers = 0;
  EXPECT_THROW(ops().SumSlots(bad, ops().stream()), DeviceError);
  bad = sum;
  bad.slots = nullptr;
  EXPECT_THROW(ops().SumSlots(bad, ops().stream()), DeviceError);
}

// --- one rank's share of an embedding table, and plain memory ---

TEST_P(RowsTest, SharesOfATableAddUpToTheTable) {
  Random random(17);
  constexpr int64_t kVocab = 70, kShare = 35;
  for (const int64_t cols : kEdges) {
    const std::vector<float> values = Round(random.Normal(kVocab * cols), DType::kBF16);
    for (const int64_t count : kEdges) {
      std::vector<int32_t> tokens;
      for (int64_t t = 0; t < count; ++t) tokens.push_back(random.Int(0, kVocab - 1));
      const DeviceArray<int32_t> device_tokens(ops(), tokens);
      std::vector<float> sum(static_cast<size_t>(count * cols));
      for (const int64_t first : {int64_t{0}, kShare}) {
        const OwnedTensor tensor = MakeTensor(Slice(values, cols, first, kShare), DType::kBF16, {kShare, cols});
        const DeviceMatrix out(ops(), act(), count, cols);
        ops().Embed({.tokens = device_tokens.data(),
                     .table = ops().MakeTable(tensor.tensor),
                     .out = out,
                     .is_share = true,
                     .first_id = first},
                    ops().stream());
        const std::vector<float> part = out.Get();
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
      }
      std::vector<float> expected;
      for (const int32_t token : tokens) {
        const std::vector<float> row = Slice(values, cols, token, 1);
        expected.insert(expected.end(), row.begin(), row.end());
      }
      ExpectSameBits(sum, Round(expected, act()));
    }
  }
}

TEST_P(RowsTest, MemoryIsCopiedAndFilledToTheByte) {
  for (const int64_t bytes : kEdges) {
    const size_t size = static_cast<size_t>(bytes);
    std::vector<uint8_t> values(size);
    for (size_t i = 0; i < size; ++i) values[i] = static_cast<uint8_t>(i * 7 + 1);
    DeviceBytes from(ops(), size), to(ops(), size);  // which look at their guards when they end
    from.Upload(values.data(), size);
    ops().CopyOnDevice(to.data(), from.data(), size, ops().stream());
    EXPECT_EQ(to.Download(), values);
    ops().Fill(to.data(), 0x3C, size, ops().stream());
    EXPECT_EQ(to.Download(), std::vector<uint8_t>(size, 0x3C));
    ops().Fill(to.data(), 0xFF, 0, ops().stream());
    EXPECT_EQ(to.Download(), std::vector<uint8_t>(size, 0x3C));
  }
}

}  // namespace
}  // namespace k3::testing
