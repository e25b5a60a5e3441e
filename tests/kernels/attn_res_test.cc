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

}  // namespace
}  // namespace k3::testing
