#include <gtest/gtest.h>

#include "kernels/cpu/cpu_ops.h"
#include "tests/kernels/op_fixture.h"
#include "tests/kernels/oracle.h"

namespace k3::testing {
namespace {

class GemmTest : public OpTest {
 protected:
  std::vector<float> Run(const LinearWeight& weight, const std::vector<float>& x, int64_t rows) {
    const DeviceMatrix input(ops(), act(), rows, weight.in, x);
    const DeviceMatrix out(ops(), act(), rows, weight.out);
    ops().Linear({input, &weight, out, false}, ops().stream());
    return out.Get();
  }
};
K3_INSTANTIATE_OPS(GemmTest);

struct Shape {
  int64_t rows, in, out;
};

TEST_P(GemmTest, MatchesTheOracleForEveryWeightTypeAndShape) {
  Random random(1);
  for (const Shape& s : std::vector<Shape>{{1, 256, 1154},
                                           {1, 1, 1},
                                           {2, 7, 3},
                                           {3, 64, 33},
                                           {4, 65, 31},
                                           {5, 100, 257},
                                           {7, 130, 64},
                                           {11, 32, 95},
                                           {12, 33, 96},
                                           {13, 257, 130},
                                           {16, 256, 100},
                                           {49, 48, 65},
                                           {100, 20, 40},
                                           // A few rows against wide weights.
                                           {1, 2304, 37},
                                           {2, 520, 41},
                                           {3, 4104, 35},
                                           {1, 4096, 33},
                                           {4, 3584, 35},
                                           {4, 1024, 18}}) {
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      const std::vector<float> x = Round(random.Normal(s.rows * s.in), act());
      const std::vector<float> w = Round(random.Normal(s.out * s.in), dtype);
      const OwnedTensor tensor = MakeTensor(w, dtype, {s.out, s.in});
      const std::unique_ptr<LinearWeight> weight = ops().MakeLinear({&tensor.tensor, 1});
      EXPECT_EQ(weight->out, s.out);
      EXPECT_EQ(weight->in, s.in);
      ExpectClose(
          Run(*weight, x, s.rows), oracle::Linear(oracle::ToDouble(x), w, s.rows, s.in, s.out), tolerance(),
          std::to_string(s.rows) + "x" + std::to_string(s.in) + "x" + std::to_string(s.out) + " " + Name(dtype));
    }
  }
}

TEST_P(GemmTest, StacksPartsAndReadsColumnShards) {
  Random random(2);
  const int64_t rows = 3, in = 40;
  const std::vector<float> first = Round(random.Normal(5 * 100), DType::kBF16);  // a shard: 40 columns of 100
  const std::vector<float> second = Round(random.Normal(34 * in), DType::kBF16);
  OwnedTensor shard = MakeTensor(first, DType::kBF16, {5, in});
  shard.tensor.row_stride = 100;
  shard.tensor.data = shard.bytes.data() + 2 * 17;  // columns 17..56
  const OwnedTensor whole = MakeTensor(second, DType::kBF16, {34, in});
  const std::vector<HostTensor> parts = {shard.tensor, whole.tensor};
  shard.bytes.resize(shard.bytes.size());
  const std::unique_ptr<LinearWeight> weight = ops().MakeLinear(parts);
  std::vector<float> stacked;
  for (int64_t r = 0; r < 5; ++r) stacked.insert(stacked.end(), &first[r * 100 + 17], &first[r * 100 + 17] + in);
  stacked.insert(stacked.end(), second.begin(), second.end());
  const std::vector<float> x = Round(random.Normal(rows * in), act());
  ExpectClose(Run(*weight, x, rows), oracle::Linear(oracle::ToDouble(x), stacked, rows, in, 39), tolerance());
}

TEST_P(GemmTest, PairsAreTheTwoProducts) {
  Random random(5);
  // Alike, of other widths, of other numbers of rows, none.
  for (const auto& [a, b] : std::vector<std::pair<Shape, Shape>>{{{1, 128, 70}, {1, 128, 70}},
                                                                 {{3, 2304, 33}, {3, 2304, 33}},
                                                                 {{1, 128, 70}, {1, 128, 64}},
                                                                 {{2, 64, 40}, {9, 64, 40}},
                                                                 {{0, 64, 40}, {1, 64, 40}}}) {
    std::vector<OwnedTensor> tensors;
    std::vector<std::unique_ptr<LinearWeight>> weights;
    std::vector<DeviceMatrix> x, together, apart;
    std::vector<std::vector<float>> start;
    for (const Shape& s : {a, b}) {
      tensors.push_back(MakeTensor(Round(random.Normal(s.out * s.in), DType::kBF16), DType::kBF16, {s.out, s.in}));
      weights.push_back(ops().MakeLinear({&tensors.back().tensor, 1}));
      x.emplace_back(ops(), act(), s.rows, s.in, Round(random.Normal(s.rows * s.in), act()));
      start.push_back(Round(random.Normal(s.rows * s.out), act()));
      together.emplace_back(ops(), act(), s.rows, s.out, start.back());
      apart.emplace_back(ops(), act(), s.rows, s.out, start.back());
    }
    const auto params = [&](size_t i, const DeviceMatrix& out) {
      return LinearParams{.x = x[i], .weight = weights[i].get(), .y = out, .accumulate = i == 1};
    };
    ops().LinearPair(params(0, together[0]), params(1, together[1]), ops().stream());
    for (size_t i = 0; i < 2; ++i) {
      ops().Linear(params(i, apart[i]), ops().stream());
      EXPECT_EQ(together[i].Get(), apart[i].Get()) << a.rows << " x " << a.in << " and " << b.rows << " x " << b.in;
    }
  }
}

TEST_P(GemmTest, WhatRunsBesideIsThereAfterTheJoin) {
  Random random(6);
  const int64_t in = 256, out = 300;
  const OwnedTensor tensor = MakeTensor(Round(random.Normal(out * in), DType::kBF16), DType::kBF16, {out, in});
  const std::unique_ptr<LinearWeight> weight = ops().MakeLinear({&tensor.tensor, 1});
  for (const int64_t rows : {int64_t{1}, int64_t{40}}) {
    const DeviceMatrix x(ops(), act(), rows, in, Round(random.Normal(rows * in), act()));
    const DeviceMatrix main(ops(), act(), rows, out), side(ops(), act(), rows, out);
    const auto run = [&] {
      const Stream beside = ops().Fork(ops().stream());
      ops().Linear({x, weight.get(), side, false}, beside);
      ops().Linear({x, weight.get(), main, false}, ops().stream());
      if (beside != ops().stream()) ops().Join(beside, ops().stream());
      ops().Linear({x, weight.get(), side, true}, ops().stream());
    };
    run();
    const std::vector<float> once = main.Get(), twice = side.Get();
    for (size_t i = 0; i < once.size(); ++i) EXPECT_NEAR(twice[i], 2 * once[i], 1e-2 * std::abs(once[i]) + 1e-6);
    if (!ops().can_capture()) continue;
    const std::unique_ptr<CapturedWork> work = ops().Capture(run, ops().stream());
    for (int i = 0; i < 3; ++i) ops().Launch(*work, ops().stream());
    EXPECT_EQ(main.Get(), once);
    EXPECT_EQ(side.Get(), twice);
  }
}

TEST_P(GemmTest, AccumulatesAndWritesColumnSlices) {
  Random random(3);
  for (const auto& [rows, in] : std::vector<std::pair<int64_t, int64_t>>{{6, 50}, {1, 2312}, {3, 136}}) {
    const int64_t out = 70;
    const std::vector<float> x = Round(random.Normal(rows * in), act());
    const std::vector<float> w = Round(random.Normal(out * in), DType::kBF16);
    const std::vector<float> start = Round(random.Normal(rows * 100), act());
    const OwnedTensor tensor = MakeTensor(w, DType::kBF16, {out, in});
    const std::unique_ptr<LinearWeight> weight = ops().MakeLinear({&tensor.tensor, 1});
    const DeviceMatrix input(ops(), act(), rows, in, x);
    const DeviceMatrix wide(ops(), act(), rows, 100, start);
    ops().Linear({input, weight.get(), wide.view().Columns(16, out), true}, ops().stream());
    oracle::Doubles expected = oracle::ToDouble(start);
    const oracle::Doubles product = oracle::Linear(oracle::ToDouble(x), w, rows, in, out);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < out; ++c) expected[r * 100 + 16 + c] += product[r * out + c];
    }
    ExpectClose(wide.Get(), expected, tolerance());
  }
}

TEST_P(GemmTest, WritesF32WhateverTheActivationType) {
  Random random(4);
  const int64_t rows = 5, in = 64, out = 40;
  const std::vector<float> x = Round(random.Normal(rows * in), act());
  const std::vector<float> w = Round(random.Normal(out * in), DType::kBF16);
  const OwnedTensor tensor = MakeTensor(w, DType::kBF16, {out, in});
  const std::unique_ptr<LinearWeight> weight = ops().MakeLinear({&tensor.tensor, 1});
  const DeviceMatrix input(ops(), act(), rows, in, x);
  const DeviceMatrix logits(ops(), DType::kF32, rows, out);
  ops().Linear({input, weight.get(), logits, false}, ops().stream());
  // Products of rounded inputs summed in fp32: no rounding of the output, hence the tight tolerance on every backend.
  ExpectClose(logits.Get(), oracle::Linear(oracle::ToDouble(x), w, rows, in, out), 1e-5);
}

TEST_P(GemmTest, RowsDoNotDependOnTheBatch) {
  if (!batch_invariant()) GTEST_SKIP() << "not a batch-invariant backend";
  Random random(5);
  const int64_t rows = 65, in = 300, out = 200;
  const std::vector<float> x = Round(random.Normal(rows * in), act());
  const OwnedTensor tensor = MakeTensor(random.Normal(out * in), DType::kBF16, {out, in});
  const std::unique_ptr<LinearWeight> weight = ops().MakeLinear({&tensor.tensor, 1});
  const std::vector<float> all = Run(*weight, x, rows);
  for (int64_t count = 1; count <= 30; ++count) {
    ExpectSameBits(Run(*weight, Slice(x, in, 65 - count, count), count), Slice(all, out, 65 - count, count),
                   std::to_string(count) + " rows");
  }
}

// Sizes at which a device takes other kernels for few rows than for many: the bits of a row stay.
TEST_P(GemmTest, BitsOfARowAreThoseOfManyRows) {
  if (!batch_invariant()) GTEST_SKIP() << "not a batch-invariant backend";
  Random random(6);
  const int64_t rows = 300;
  for (const auto [in, out] : {std::pair<int64_t, int64_t>{32, 40}, {288, 200}, {1056, 72}, {128, 17000}}) {
    const std::vector<float> x = Round(random.Normal(rows * in), act());
    const std::vector<float> w = Round(random.Normal(out * in), DType::kBF16);
    const OwnedTensor tensor = MakeTensor(w, DType::kBF16, {out, in});
    const std::unique_ptr<LinearWeight> weight = ops().MakeLinear({&tensor.tensor, 1});
    const std::vector<float> all = Run(*weight, x, rows);
    const int64_t checked = std::min<int64_t>(rows, 2'000'000 / (in * out) + 3);  // the oracle is slow
    ExpectClose(Slice(all, out, rows - checked, checked),
                oracle::Linear(oracle::ToDouble(Slice(x, in, rows - checked, checked)), w, checked, in, out),
                tolerance());
    for (int64_t count : {1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 200}) {
      ExpectSameBits(Run(*weight, Slice(x, in, rows - count, count), count), Slice(all, out, rows - count, count),
                     std::to_string(count) + " rows of " + std::to_string(in) + " to " + std::to_string(out));
    }
  }
}

TEST_P(GemmTest, ZeroRowsAreAllowed) {
  const OwnedTensor tensor = MakeTensor(std::vector<float>(12, 1.0f), DType::kF32, {3, 4});
  const std::unique_ptr<LinearWeight> weight = ops().MakeLinear({&tensor.tensor, 1});
  EXPECT_TRUE(Run(*weight, {}, 0).empty());
}

TEST_P(GemmTest, WrongWidthsAreRefusedWithNumbers) {
  const OwnedTensor tensor = MakeTensor(std::vector<float>(12, 1.0f), DType::kF32, {3, 4});
  const std::unique_ptr<LinearWeight> weight = ops().MakeLinear({&tensor.tensor, 1});
  const DeviceMatrix x(ops(), act(), 2, 5), y(ops(), act(), 2, 3);
  try {
    ops().Linear({x, weight.get(), y, false}, ops().stream());
    FAIL() << "no error";
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("[2, 4]"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("[2, 5]"), std::string::npos) << error.what();
  }
}

TEST_P(GemmTest, RandomWeightsAreNormalAndRepeatable) {
  HostTensor random_tensor;
  random_tensor.dtype = DType::kBF16;
  random_tensor.shape = {200, 300};
  random_tensor.random_stddev = 0.5f;
  random_tensor.random_seed = 7;
  const std::unique_ptr<LinearWeight> weight = ops().MakeLinear({&random_tensor, 1});
  // The identity reads the weights back.
  std::vector<float> identity(300 * 300);
  for (int64_t i = 0; i < 300; ++i) identity[i * 300 + i] = 1;
  const std::vector<float> w = Run(*weight, identity, 300);
  double sum = 0, squares = 0;
  for (float x : w) {
    sum += double{x};
    squares += double{x} * double{x};
  }
  const double n = static_cast<double>(w.size());
  EXPECT_NEAR(sum / n, 0, 0.01);
  EXPECT_NEAR(std::sqrt(squares / n), 0.5, 0.01);
  const std::unique_ptr<LinearWeight> again = ops().MakeLinear({&random_tensor, 1});
  ExpectSameBits(Run(*again, identity, 300), w);
}

// The CPU's instruction sets and thread counts agree bit for bit.
class GemmIsaTest : public ::testing::TestWithParam<CpuIsa> {};

std::vector<float> CpuLinear(Ops& ops, const HostTensor& tensor, const std::vector<float>& x, int64_t rows) {
  const std::unique_ptr<LinearWeight> weight = ops.MakeLinear({&tensor, 1});
  const DeviceMatrix input(ops, DType::kF32, rows, weight->in, x), out(ops, DType::kF32, rows, weight->out);
  ops.Linear({input, weight.get(), out, false}, nullptr);
  return out.Get();
}

TEST_P(GemmIsaTest, EqualsTheScalarLoopsBitForBit) {
  const std::unique_ptr<Ops> scalar = MakeCpuOpsFor(CpuIsa::kScalar, 1);
  for (int threads : {1, 2, 3}) {
    const std::unique_ptr<Ops> fast = MakeCpuOpsFor(GetParam(), threads);
    if (fast == nullptr) GTEST_SKIP() << "not available on this processor";
    Random random(6);
    for (const Shape& s : std::vector<Shape>{{1, 129, 300},
                                             {2, 64, 70},
                                             {3, 50, 129},
                                             {4, 33, 64},
                                             {5, 33, 64},
                                             {6, 31, 65},
                                             {9, 70, 99},
                                             {12, 64, 40},
                                             {25, 40, 33},
                                             {60, 33, 70}}) {
      for (DType dtype : {DType::kBF16, DType::kF32}) {
        const std::vector<float> x = random.Normal(s.rows * s.in);
        const OwnedTensor tensor = MakeTensor(random.Normal(s.out * s.in), dtype, {s.out, s.in});
        ExpectSameBits(CpuLinear(*fast, tensor.tensor, x, s.rows), CpuLinear(*scalar, tensor.tensor, x, s.rows),
                       std::to_string(s.rows) + "x" + std::to_string(s.in) + "x" + std::to_string(s.out));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, GemmIsaTest, ::testing::Values(CpuIsa::kAvx2, CpuIsa::kAvx512));

}  // namespace
}  // namespace k3::testing
