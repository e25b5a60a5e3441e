#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "kernels/attn_res_form.h"
#include "tests/kernels/op_fixture.h"
#include "tests/kernels/oracle.h"

namespace k3::testing {
namespace {

class AttnResTest : public OpTest {
 protected:
  struct Case {
    int64_t rows, cols;
    int live_block;
    bool delta, restart;
  };
  // Runs one case; returns the bank and the output.
  std::pair<std::vector<float>, std::vector<float>> Run(const Case& c, const std::vector<float>& bank,
                                                        const std::vector<float>& delta,
                                                        const std::vector<float>& query, const std::vector<float>& norm,
                                                        int64_t gap) {
    // Blocks lie `gap` rows apart; the gap stays poisoned.
    const int64_t stride = (c.rows + gap) * c.cols;
    std::vector<float> spread;
    for (int j = 0; j <= c.live_block; ++j) {
      const std::vector<float> block = Slice(bank, c.rows * c.cols, j, 1);
      spread.insert(spread.end(), block.begin(), block.end());
      spread.resize(static_cast<size_t>((j + 1) * stride), std::numeric_limits<float>::quiet_NaN());
    }
    DeviceBytes device_bank(ops(), spread.size() * SizeOf(act()));
    const std::vector<uint8_t> encoded = Encode(spread, act());
    device_bank.Upload(encoded.data(), encoded.size());
    const DeviceMatrix device_delta(ops(), act(), c.rows, c.cols, delta);
    const DeviceArray<float> device_query(ops(), query), device_norm(ops(), norm);
    const DeviceMatrix out(ops(), act(), c.rows, c.cols);
    AttnResMixParams params;
    params.bank = device_bank.data();
    params.block_stride = stride;
    params.live_block = c.live_block;
    params.rows = c.rows;
    params.cols = c.cols;
    if (c.delta) params.delta = device_delta;
    params.restart = c.restart;
    params.query = device_query.data();
    params.mix_eps = 1e-5f;
    params.norm_weight = device_norm.data();
    params.norm_eps = 1e-5f;
    params.out = out;
    ops().AttnResMix(params, ops().stream());
    const std::vector<float> after = Decode(device_bank.Download(), act());
    std::vector<float> packed;
    for (int j = 0; j <= c.live_block; ++j) {
      const std::vector<float> block = Slice(after, 1, j * stride, c.rows * c.cols);
      packed.insert(packed.end(), block.begin(), block.end());
    }
    return {packed, out.Get()};
  }
};
K3_INSTANTIATE_OPS(AttnResTest);

TEST_P(AttnResTest, MatchesTheOracle) {
  Random random(1);
  for (int64_t cols : {1, 17, 64, 250, 1024, 7168}) {
    for (int live_block : {0, 1, 2, 3, 4, 5, 6, 7, 8, 16}) {
      if (cols == 7168 && live_block % 4 != 0) continue;
      for (const auto& [delta, restart] : {std::pair{false, false}, std::pair{true, false}, std::pair{true, true}}) {
        const Case c{5, cols, live_block, delta, restart};
        std::vector<float> bank = Round(random.Normal((live_block + 1) * c.rows * cols, 2), act());
        // A restarted block holds nothing that may be read.
        if (restart) std::fill(bank.end() - c.rows * cols, bank.end(), std::numeric_limits<float>::quiet_NaN());
        const std::vector<float> add = Round(random.Normal(c.rows * cols), act());
        const std::vector<float> query = random.Normal(cols, 0.5f), norm = random.Normal(cols, 0.2f, 1);
        const auto [bank_after, out] = Run(c, bank, add, query, norm, 3);

        std::vector<oracle::Doubles> blocks;
        for (int j = 0; j <= live_block; ++j) blocks.push_back(oracle::ToDouble(Slice(bank, c.rows * cols, j, 1)));
        if (delta) {
          std::vector<float> live(add.size());
          for (size_t i = 0; i < add.size(); ++i)
            live[i] = restart ? add[i] : static_cast<float>(blocks.back()[i]) + add[i];
          blocks.back() = oracle::ToDouble(Round(live, act()));
        }
        const std::string what = std::to_string(cols) + " columns, live block " + std::to_string(live_block);
        ExpectSameBits(Slice(bank_after, c.rows * cols, live_block, 1),
                       std::vector<float>(blocks.back().begin(), blocks.back().end()), what);
        ExpectClose(out, oracle::AttnRes(blocks, query, 1e-5, norm, 1e-5, c.rows, cols).normed, 2 * tolerance(), what);
      }
    }
  }
}

// So many rows that a device keeps blocks resident, which take several each.
TEST_P(AttnResTest, ManyRowsAreAsAFew) {
  Random random(3);
  const int64_t rows = 1100;
  for (int64_t cols : {64, 328}) {
    for (int live_block : {0, 1, 2, 3, 4, 5, 6, 7, 8}) {
      if (cols != 64 && live_block % 3 != 0) continue;
      for (const auto& [delta, restart] : {std::pair{false, false}, std::pair{true, false}, std::pair{true, true}}) {
        if (live_block == 0 && restart) continue;
        const std::vector<float> bank = Round(random.Normal((live_block + 1) * rows * cols, 2), act());
        const std::vector<float> add = Round(random.Normal(rows * cols), act());
        const std::vector<float> query = random.Normal(cols, 0.5f), norm = random.Normal(cols, 0.2f, 1);
        const auto all = Run({rows, cols, live_block, delta, restart}, bank, add, query, norm, 0);
        // Parts of 100 and of 20 rows, for which a device may spread a row over blocks.
        for (int64_t begin = 0, few = 100; begin < rows;
             begin += few, few = std::min<int64_t>(120 - few, rows - begin)) {
          std::vector<float> part;
          for (int j = 0; j <= live_block; ++j) {
            part.insert(part.end(), bank.begin() + (j * rows + begin) * cols,
                        bank.begin() + (j * rows + begin + few) * cols);
          }
          const std::vector<float> part_add(add.begin() + begin * cols, add.begin() + (begin + few) * cols);
          const auto some = Run({few, cols, live_block, delta, restart}, part, part_add, query, norm, 0);
          const std::vector<float> want(all.second.begin() + begin * cols, all.second.begin() + (begin + few) * cols);
          ExpectSameBits(some.second, want, "rows from " + std::to_string(begin));
          ExpectSameBits(Slice(some.first, few * cols, live_block, 1),
                         {all.first.begin() + (live_block * rows + begin) * cols,
                          all.first.begin() + (live_block * rows + begin + few) * cols},
                         "live rows from " + std::to_string(begin));
        }
      }
    }
  }
}

TEST_P(AttnResTest, LargeScoresPickOneSource) {
  // Scores of +-cols: the softmax must neither overflow nor lose the small source entirely to NaN.
  const Case c{1, 128, 1, false, false};
  std::vector<float> bank(256, 1.0f);
  std::fill(bank.begin() + 128, bank.end(), -3.0f);
  const std::vector<float> ones(128, 1.0f);
  const auto result = Run(c, bank, std::vector<float>(128), ones, ones, 0);
  ExpectClose(result.second, oracle::Doubles(128, 1 / std::sqrt(1 + 1e-5)), tolerance());
}

TEST_P(AttnResTest, RowsDoNotDependOnTheBatch) {
  if (!batch_invariant()) GTEST_SKIP() << "not a batch-invariant backend";
  Random random(2);
  const int64_t rows = 40, cols = 300;
  const std::vector<float> bank = Round(random.Normal(3 * rows * cols), act());
  const std::vector<float> delta = Round(random.Normal(rows * cols), act());
  const std::vector<float> query = random.Normal(cols), norm = random.Normal(cols);
  const auto all = Run({rows, cols, 2, true, false}, bank, delta, query, norm, 0);
  for (int64_t r : {0, 7, 39}) {
    std::vector<float> row_bank;
    for (int j = 0; j < 3; ++j) {
      const std::vector<float> row = Slice(bank, cols, j * rows + r, 1);
      row_bank.insert(row_bank.end(), row.begin(), row.end());
    }
    const auto one = Run({1, cols, 2, true, false}, row_bank, Slice(delta, cols, r, 1), query, norm, 0);
    ExpectSameBits(one.second, Slice(all.second, cols, r, 1), "row " + std::to_string(r));
  }
}

// --- two phases ---

class AttnResPhasesTest : public OpTest {
 protected:
  struct Shape {
    int64_t rows, cols;
    int closed;
    int sites = 1;
  };
  enum Update { kNone, kAdd, kRestart };
  struct Data {
    std::vector<float> bank;   // [closed + 1][rows, cols]
    std::vector<float> delta;  // [rows, cols]
    std::vector<std::vector<float>> queries;
    std::vector<float> norm;
  };
  struct Site {
    std::vector<float> live, out;
  };

  Data Draw(const Shape& shape, uint32_t seed) {
    Random random(seed);
    Data data;
    data.bank = Round(random.Normal((shape.closed + 1) * shape.rows * shape.cols, 2), act());
    data.delta = Round(random.Normal(shape.rows * shape.cols), act());
    // Scores of a few units, whatever the width.
    const float deviation = 2 / std::sqrt(static_cast<float>(shape.cols));
    for (int s = 0; s < shape.sites; ++s) data.queries.push_back(random.Normal(shape.cols, deviation));
    data.norm = random.Normal(shape.cols, 0.2f, 1);
    return data;
  }

  // The closed blocks mixed for all sites, then each site on the same bank as given: all of them add the delta to the
  // same live sum. Checks that nothing is written but the live sum, out and `mixes`.
  std::vector<Site> Run(const Shape& shape, const Data& data, Update update, bool two_phases = true, int64_t gap = 0) {
    const int64_t each = shape.rows * shape.cols, stride = each + gap * shape.cols;
    std::vector<float> spread;
    for (int j = 0; j <= shape.closed; ++j) {
      spread.insert(spread.end(), data.bank.begin() + j * each, data.bank.begin() + (j + 1) * each);
      spread.resize(static_cast<size_t>((j + 1) * stride), std::numeric_limits<float>::quiet_NaN());
    }
    // A restarted block holds nothing that may be read.
    if (update == kRestart) {
      std::fill_n(spread.begin() + shape.closed * stride, each, std::numeric_limits<float>::quiet_NaN());
    }
    const std::vector<uint8_t> encoded = Encode(spread, act());
    DeviceBytes bank(ops(), encoded.size());
    DeviceBytes mixes(ops(), AttnResMixesBytes(shape.rows, shape.cols, act()));
    const DeviceMatrix delta(ops(), act(), shape.rows, shape.cols, data.delta);
    const DeviceArray<float> norm(ops(), data.norm);
    std::vector<std::unique_ptr<DeviceArray<float>>> queries;
    AttnResClosedParams closed;
    closed.bank = bank.data();
    closed.block_stride = stride;
    closed.closed = shape.closed;
    closed.rows = shape.rows;
    closed.cols = shape.cols;
    closed.sites = shape.sites;
    closed.mix_eps = 1e-5f;
    closed.mixes = mixes.data();
    for (int s = 0; s < shape.sites; ++s) {
      queries.push_back(std::make_unique<DeviceArray<float>>(ops(), data.queries[s]));
      closed.queries[s] = queries.back()->data();
    }
    bank.Upload(encoded.data(), encoded.size());
    if (two_phases) ops().AttnResClosed(closed, ops().stream());
    std::vector<Site> sites;
    for (int s = 0; s < shape.sites; ++s) {
      const DeviceMatrix out(ops(), act(), shape.rows, shape.cols);
      AttnResMixParams mix;
      mix.bank = bank.data();
      mix.block_stride = stride;
      mix.live_block = shape.closed;
      mix.rows = shape.rows;
      mix.cols = shape.cols;
      if (update != kNone) mix.delta = delta;
      mix.restart = update == kRestart;
      mix.query = closed.queries[s];
      mix.mix_eps = mix.norm_eps = 1e-5f;
      mix.norm_weight = norm.data();
      mix.out = out;
      if (two_phases) {
        mix.mixes = mixes.data();
        mix.site = s;
        mix.mixes_settled = s > 0;
      }
      ops().AttnResMix(mix, ops().stream());
      std::vector<uint8_t> after = bank.Download();
      const size_t live = static_cast<size_t>(shape.closed * stride) * SizeOf(act());
      const std::vector<float> values = Decode({after.begin() + static_cast<int64_t>(live), after.end()}, act());
      sites.push_back({Slice(values, 1, 0, each), out.Get()});
      std::copy_n(encoded.begin() + static_cast<int64_t>(live), each * static_cast<int64_t>(SizeOf(act())),
                  after.begin() + static_cast<int64_t>(live));
      EXPECT_TRUE(after == encoded) << "closed blocks or what lies between blocks changed";
      bank.Upload(encoded.data(), encoded.size());
    }
    return sites;
  }

  void ExpectOracle(const Shape& shape, const Data& data, Update update, const std::vector<Site>& sites,
                    const std::string& what) {
    const int64_t each = shape.rows * shape.cols;
    std::vector<oracle::Doubles> blocks;
    for (int j = 0; j <= shape.closed; ++j) blocks.push_back(oracle::ToDouble(Slice(data.bank, each, j, 1)));
    if (update != kNone) {
      std::vector<float> live = data.delta;
      if (update == kAdd) {
        for (size_t i = 0; i < live.size(); ++i) live[i] = data.bank[shape.closed * each + i] + data.delta[i];
      }
      blocks.back() = oracle::ToDouble(Round(live, act()));
    }
    for (int s = 0; s < shape.sites; ++s) {
      const std::string at = what + ", site " + std::to_string(s);
      ExpectSameBits(sites[s].live, std::vector<float>(blocks.back().begin(), blocks.back().end()), at);
      ExpectClose(sites[s].out,
                  oracle::AttnRes(blocks, data.queries[s], 1e-5, data.norm, 1e-5, shape.rows, shape.cols).normed,
                  2 * tolerance(), at);
    }
  }

  static std::string Name(const Shape& shape) {
    return std::to_string(shape.rows) + " rows of " + std::to_string(shape.cols) + ", " + std::to_string(shape.closed) +
           " closed blocks, " + std::to_string(shape.sites) + " sites";
  }
};
K3_INSTANTIATE_OPS(AttnResPhasesTest);

TEST_P(AttnResPhasesTest, MatchTheOracle) {
  uint32_t seed = 1;
  for (int64_t cols : {1, 17, 64, 250, 264, 1024}) {
    for (int closed : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16}) {
      const Shape shape{3, cols, closed, 1 + static_cast<int>(seed % kAttnResSites)};
      const Data data = Draw(shape, seed);
      const Update update = static_cast<Update>(seed++ % 3);
      ExpectOracle(shape, data, update, Run(shape, data, update, true, 2), Name(shape));
    }
  }
}

TEST_P(AttnResPhasesTest, MatchTheOracleAtTheEdgesOfRows) {
  for (int64_t rows : {1, 15, 16, 17, 63, 64, 65}) {
    for (int closed : {1, 6, 8}) {
      for (Update update : {kNone, kAdd, kRestart}) {
        const Shape shape{rows, 128, closed, kAttnResSites};
        const Data data = Draw(shape, static_cast<uint32_t>(rows));
        ExpectOracle(shape, data, update, Run(shape, data, update, true, 1), Name(shape));
      }
    }
  }
}

TEST_P(AttnResPhasesTest, MatchTheOracleAtTheWidthOfK3) {
  for (const Shape& shape : {Shape{5, 7168, 8, 8}, Shape{2, 7168, 1, 3}, Shape{3, 2304, 7, 6}, Shape{1, 8192, 8, 2}}) {
    const Data data = Draw(shape, 5);
    ExpectOracle(shape, data, kAdd, Run(shape, data, kAdd), Name(shape));
  }
}

// Also the distance of the two forms from each other: no more than that of either from the oracle.
TEST_P(AttnResPhasesTest, ManyRowsAndTheOtherForm) {
  for (int closed : {1, 3, 8}) {
    const Shape shape{1024, slow() ? 32 : 136, closed, 2};
    const Data data = Draw(shape, 7);
    const std::vector<Site> two = Run(shape, data, kAdd), one = Run(shape, data, kAdd, false);
    ExpectOracle(shape, data, kAdd, two, Name(shape));
    for (int s = 0; s < shape.sites; ++s) {
      ExpectSameBits(two[s].live, one[s].live, Name(shape));
      ExpectClose(two[s].out, oracle::ToDouble(one[s].out), 2 * tolerance(), Name(shape));
    }
  }
}

// What a row gives does not depend on the rows beside it, whatever they hold.
TEST_P(AttnResPhasesTest, RowsKeepToThemselves) {
  const Shape shape{7, 264, 5, 4};
  Data data = Draw(shape, 8);
  const std::vector<Site> all = Run(shape, data, kAdd);
  for (int64_t r = 0; r < shape.rows; ++r) {
    Data one = data;
    one.bank.clear();
    for (int j = 0; j <= shape.closed; ++j) {
      const std::vector<float> row = Slice(data.bank, shape.cols, j * shape.rows + r, 1);
      one.bank.insert(one.bank.end(), row.begin(), row.end());
    }
    one.delta = Slice(data.delta, shape.cols, r, 1);
    const std::vector<Site> alone = Run({1, shape.cols, shape.closed, shape.sites}, one, kAdd);
    for (int s = 0; s < shape.sites; ++s) {
      ExpectSameBits(alone[s].out, Slice(all[s].out, shape.cols, r, 1), "row " + std::to_string(r));
    }
  }
  // Two rows that are not numbers.
  for (int64_t r : {2, 5}) {
    for (int j = 0; j <= shape.closed; ++j) {
      std::fill_n(data.bank.begin() + (j * shape.rows + r) * shape.cols, shape.cols,
                  std::numeric_limits<float>::quiet_NaN());
    }
  }
  const std::vector<Site> poisoned = Run(shape, data, kAdd);
  for (int s = 0; s < shape.sites; ++s) {
    for (int64_t r : {0, 1, 3, 4, 6}) {
      ExpectSameBits(Slice(poisoned[s].out, shape.cols, r, 1), Slice(all[s].out, shape.cols, r, 1),
                     "beside NaN, row " + std::to_string(r));
    }
    EXPECT_TRUE(std::isnan(poisoned[s].out[static_cast<size_t>(2 * shape.cols)]));
  }
}

TEST_P(AttnResPhasesTest, RunToRunTheSameBits) {
  const Shape shape{33, 264, 8, 8};
  const Data data = Draw(shape, 9);
  const std::vector<Site> first = Run(shape, data, kAdd), second = Run(shape, data, kAdd);
  for (int s = 0; s < shape.sites; ++s) ExpectSameBits(first[s].out, second[s].out, "site " + std::to_string(s));
}

// Closed blocks and live sum of very different sizes, and a live sum that all but cancels the closed blocks' mix.
TEST_P(AttnResPhasesTest, AnySizes) {
  const Shape shape{6, 128, 3, 2};
  const int64_t each = shape.rows * shape.cols;
  Data data = Draw(shape, 10);
  const float factors[] = {1e-12f, 1e-6f, 1e-3f, 1.0f, 1e5f, 1e12f};
  for (int j = 0; j <= shape.closed; ++j) {
    for (int64_t r = 0; r < shape.rows; ++r) {
      // Rows 1 and 4: one block a million times another.
      const float factor = factors[r] * (j == 1 && r % 3 == 1 ? 1e-6f : 1.0f);
      for (int64_t c = 0; c < shape.cols; ++c) data.bank[j * each + r * shape.cols + c] *= factor;
    }
  }
  data.bank = Round(data.bank, act());
  ExpectOracle(shape, data, kNone, Run(shape, data, kNone), "sizes");

  // With a query of zeros every source gets the same weight: b0 + b1 + b2 + live is small beside each of them.
  data = Draw(shape, 11);
  for (std::vector<float>& query : data.queries) std::fill(query.begin(), query.end(), 0.0f);
  for (int64_t i = 0; i < each; ++i) {
    data.bank[each + i] = data.bank[i] * 0.5f;
    data.bank[2 * each + i] = data.bank[i] * 0.25f;
    data.bank[3 * each + i] = data.bank[i] * -1.75f * (i % 2 == 0 ? 1.0f : 0.984375f);
  }
  data.bank = Round(data.bank, act());
  if (act() == DType::kBF16) {
    // The sum is a hundredth of its terms, so the mix's rounding to fp16 shows a hundred times: 2^-12 * 100 at most.
    const std::vector<Site> sites = Run(shape, data, kNone);
    std::vector<oracle::Doubles> blocks;
    for (int j = 0; j <= shape.closed; ++j) blocks.push_back(oracle::ToDouble(Slice(data.bank, each, j, 1)));
    ExpectClose(sites[0].out,
                oracle::AttnRes(blocks, data.queries[0], 1e-5, data.norm, 1e-5, shape.rows, shape.cols).normed, 0.03,
                "cancelling");
  } else {
    ExpectOracle(shape, data, kNone, Run(shape, data, kNone), "cancelling");
  }
}

TEST_P(AttnResPhasesTest, RefusesWhatMakesNoSense) {
  const Shape shape{2, 16, 2, 1};
  DeviceBytes bank(ops(), static_cast<size_t>(3 * shape.rows * shape.cols) * SizeOf(act()));
  DeviceBytes mixes(ops(), AttnResMixesBytes(shape.rows, shape.cols, act()));
  const DeviceArray<float> query(ops(), std::vector<float>(16, 1));
  const auto run = [&](const std::function<void(AttnResClosedParams&)>& change) {
    AttnResClosedParams p;
    p.bank = bank.data();
    p.block_stride = shape.rows * shape.cols;
    p.closed = shape.closed;
    p.rows = shape.rows;
    p.cols = shape.cols;
    p.sites = 1;
    p.queries[0] = query.data();
    p.mixes = mixes.data();
    change(p);
    ops().AttnResClosed(p, ops().stream());
    ops().Synchronize(ops().stream());
  };
  EXPECT_NO_THROW(run([](AttnResClosedParams&) {}));
  EXPECT_NO_THROW(run([](AttnResClosedParams& p) { p.rows = 0; }));
  EXPECT_THROW(run([](AttnResClosedParams& p) { p.closed = 0; }), DeviceError);
  EXPECT_THROW(run([](AttnResClosedParams& p) { p.closed = 300; }), DeviceError);
  EXPECT_THROW(run([](AttnResClosedParams& p) { p.sites = 0; }), DeviceError);
  EXPECT_THROW(run([](AttnResClosedParams& p) { p.sites = kAttnResSites + 1; }), DeviceError);
  EXPECT_THROW(run([](AttnResClosedParams& p) { p.queries[0] = nullptr; }), DeviceError);
  EXPECT_THROW(run([](AttnResClosedParams& p) { p.mixes = nullptr; }), DeviceError);
  EXPECT_THROW(run([](AttnResClosedParams& p) { p.block_stride = 31; }), DeviceError);

  const DeviceMatrix out(ops(), act(), shape.rows, shape.cols);
  AttnResMixParams mix;
  mix.bank = bank.data();
  mix.block_stride = shape.rows * shape.cols;
  mix.live_block = 0;
  mix.rows = shape.rows;
  mix.cols = shape.cols;
  mix.query = mix.norm_weight = query.data();
  mix.out = out;
  mix.mixes = mixes.data();
  EXPECT_THROW(ops().AttnResMix(mix, ops().stream()), DeviceError);
  mix.live_block = 2;
  mix.site = kAttnResSites;
  EXPECT_THROW(ops().AttnResMix(mix, ops().stream()), DeviceError);
}

// Where a row's bits may not depend on the batch, the form does not either; elsewhere more rows never lead back.
TEST_P(AttnResPhasesTest, TheChoiceIsMonotonic) {
  for (int closed = 1; closed <= 9; ++closed) {
    for (int sites : {1, 5, 6, 8}) {
      const AttnResForm first = ops().ChooseAttnResForm(1, 7168, closed, sites);
      AttnResForm last = first;
      for (int64_t rows : {2, 31, 32, 33, 64, 127, 128, 129, 256, 512, 1024, 2048, 8192, 65536}) {
        const AttnResForm form = ops().ChooseAttnResForm(rows, 7168, closed, sites);
        if (batch_invariant()) {
          EXPECT_EQ(form, first) << rows << " rows, " << closed << " closed";
        }
        EXPECT_GE(form, last) << rows << " rows, " << closed << " closed";
        last = form;
      }
    }
  }
}

TEST(AttnResFormTest, TheTableIsWhatIsChosen) {
  int32_t closed_before = 0;
  for (const AttnResFormEntry& entry : AttnResFormTable()) {
    EXPECT_GT(entry.closed, closed_before);
    closed_before = entry.closed;
    const auto form = [&](int64_t rows, int32_t sites) { return MeasuredAttnResForm(rows, 7168, entry.closed, sites); };
    EXPECT_EQ(form(entry.least_rows, entry.least_sites), AttnResForm::kTwoPhases);
    EXPECT_EQ(form(entry.least_rows - 1, kAttnResSites), AttnResForm::kOnePass);
    EXPECT_EQ(form(1 << 20, entry.least_sites - 1), AttnResForm::kOnePass);
    EXPECT_NE(AttnResFormText().find("two phases from " + std::to_string(entry.least_rows) + " rows"),
              std::string::npos);
  }
  EXPECT_EQ(MeasuredAttnResForm(1, 7168, 8, 8), AttnResForm::kOnePass);        // decode
  EXPECT_EQ(MeasuredAttnResForm(8192, 7168, 8, 8), AttnResForm::kTwoPhases);   // a prompt
  EXPECT_EQ(MeasuredAttnResForm(8192, 7168, 9, 8), AttnResForm::kOnePass);     // not the fast kernel's
  EXPECT_EQ(MeasuredAttnResForm(1 << 20, 8192, 8, 8), AttnResForm::kOnePass);  // likewise
  EXPECT_EQ(MeasuredAttnResForm(1 << 20, 2304, 8, 8), AttnResForm::kOnePass);  // not measured
}

}  // namespace
}  // namespace k3::testing
