#include <algorithm>
#include <tuple>

#include "tests/kernels/op_fixture.h"
#include "tests/kernels/oracle.h"

namespace k3::testing {
namespace {

class EmbedTest : public OpTest {};
K3_INSTANTIATE_OPS(EmbedTest);

TEST_P(EmbedTest, CopiesRowsOfEveryTableType) {
  Random random(1);
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (int64_t cols : {1, 17, 256}) {
      const int64_t vocab = 50;
      const std::vector<float> values = Round(random.Normal(vocab * cols), dtype);
      const OwnedTensor tensor = MakeTensor(values, dtype, {vocab, cols});
      const MatrixView table = ops().MakeTable(tensor.tensor);
      const std::vector<int32_t> tokens = {0, 49, 7, 7, 31};
      const DeviceArray<int32_t> device_tokens(ops(), tokens);
      const DeviceMatrix out(ops(), act(), 5, cols);
      ops().Embed({device_tokens.data(), table, out}, ops().stream());
      std::vector<float> expected;
      for (int32_t token : tokens) {
        const std::vector<float> row = Slice(values, cols, token, 1);
        expected.insert(expected.end(), row.begin(), row.end());
      }
      ExpectSameBits(out.Get(), Round(expected, act()), std::string(Name(dtype)) + " " + std::to_string(cols));
    }
  }
}

TEST_P(EmbedTest, BeginStepPutsDrawnTokensIn) {
  // Row 2 drew nothing.
  const DeviceArray<int32_t> drawn(ops(), std::vector<int32_t>{70, 71, -1, 73});
  const DeviceArray<int32_t> tokens(ops(), std::vector<int32_t>{5, -1, -4, 0, -3, -2, 9});
  ops().BeginStep({.tokens = tokens.data(), .num_tokens = 6, .drawn = drawn.data()}, ops().stream());
  EXPECT_EQ(tokens.Get(), (std::vector<int32_t>{5, 70, 73, 0, 0, 71, 9}));
  const DeviceArray<int32_t> known(ops(), std::vector<int32_t>{4, 0});
  ops().BeginStep({.tokens = known.data(), .num_tokens = 2}, ops().stream());
  EXPECT_EQ(known.Get(), (std::vector<int32_t>{4, 0}));
  ops().BeginStep({}, ops().stream());
}

TEST_P(EmbedTest, BeginStepSpreadsThePageTable) {
  for (const auto& [sequences, stride, wide] : {std::tuple{1, 1, 1}, std::tuple{3, 5, 9}, std::tuple{70, 1300, 2000}}) {
    std::vector<int32_t> packed(static_cast<size_t>(sequences * stride));
    for (size_t i = 0; i < packed.size(); ++i) packed[i] = static_cast<int32_t>(i) - 1;
    const DeviceArray<int32_t> from(ops(), packed), width(ops(), std::vector<int32_t>{stride});
    const DeviceArray<int32_t> table(ops(), static_cast<size_t>(sequences * wide));
    ops().BeginStep({.packed_table = from.data(),
                     .packed_stride = width.data(),
                     .sequences = sequences,
                     .table = table.data(),
                     .table_stride = wide},
                    ops().stream());
    std::vector<int32_t> expected(table.size(), -1);  // the rest stays as it was
    for (int s = 0; s < sequences; ++s) {
      std::copy_n(packed.begin() + s * stride, stride, expected.begin() + s * wide);
    }
    EXPECT_EQ(table.Get(), expected);
  }
}

TEST_P(EmbedTest, GatherRowsPicksRows) {
  Random random(2);
  for (DType dtype : {act(), DType::kF32}) {
    const int64_t rows = 9, cols = 33;
    const std::vector<float> x = Round(random.Normal(rows * cols), dtype);
    const std::vector<int32_t> picks = {8, 0, 3, 3};
    const DeviceMatrix in(ops(), dtype, rows, cols, x), out(ops(), dtype, 4, cols);
    const DeviceArray<int32_t> row(ops(), picks);
    ops().GatherRows({in, row.data(), out}, ops().stream());
    std::vector<float> expected;
    for (int32_t r : picks) {
      const std::vector<float> values = Slice(x, cols, r, 1);
      expected.insert(expected.end(), values.begin(), values.end());
    }
    ExpectSameBits(out.Get(), expected);
  }
}

TEST_P(EmbedTest, RandomTablesAreRepeatable) {
  HostTensor table;
  table.dtype = DType::kBF16;
  table.shape = {20, 8};
  table.random_stddev = 1;
  table.random_seed = 3;
  const DeviceArray<int32_t> tokens(ops(), std::vector<int32_t>{0, 19});
  const DeviceMatrix first(ops(), act(), 2, 8), second(ops(), act(), 2, 8);
  ops().Embed({tokens.data(), ops().MakeTable(table), first}, ops().stream());
  ops().Embed({tokens.data(), ops().MakeTable(table), second}, ops().stream());
  ExpectSameBits(first.Get(), second.Get());
  EXPECT_NE(Slice(first.Get(), 8, 0, 1), Slice(first.Get(), 8, 1, 1));
}

TEST(EmbedCpuTest, TokenOutsideTheTableIsRefused) {
  Ops& ops = BackendOps(Backends().front());
  const OwnedTensor tensor = MakeTensor(std::vector<float>(8, 1.0f), DType::kF32, {4, 2});
  const MatrixView table = ops.MakeTable(tensor.tensor);
  for (int32_t token : {-1, 4}) {
    const DeviceArray<int32_t> tokens(ops, std::vector<int32_t>{token});
    const DeviceMatrix out(ops, DType::kF32, 1, 2);
    EXPECT_THROW(ops.Embed({tokens.data(), table, out}, nullptr), DeviceError) << token;
  }
}

}  // namespace
}  // namespace k3::testing
