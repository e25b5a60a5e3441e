#include "tests/kernels/op_fixture.h"
#include "tests/kernels/oracle.h"

namespace k3::testing {
namespace {

class NormTest : public OpTest {};
K3_INSTANTIATE_OPS(NormTest);

TEST_P(NormTest, RmsNormMatchesTheOracle) {
  Random random(1);
  for (int64_t cols : {1, 15, 16, 17, 63, 64, 65, 128, 200, 7168}) {
    for (int64_t rows : {1, 3, 17}) {
      const std::vector<float> x = Round(random.Normal(rows * cols, 3), act());
      const std::vector<float> weight = random.Normal(cols, 0.3f, 1);
      const DeviceMatrix input(ops(), act(), rows, cols, x);
      const DeviceMatrix out(ops(), act(), rows, cols);
      const DeviceArray<float> device_weight(ops(), weight);
      ops().RmsNorm({input, device_weight.data(), 1e-5f, out}, ops().stream());
      ExpectClose(out.Get(), oracle::RmsNorm(oracle::ToDouble(x), weight, 1e-5, rows, cols), tolerance(),
                  std::to_string(rows) + "x" + std::to_string(cols));
    }
  }
}

TEST_P(NormTest, RmsNormWorksInPlaceAndOnZeroRows) {
  Random random(2);
  const int64_t rows = 5, cols = 96;
  const std::vector<float> x = Round(random.Normal(rows * cols), act());
  const std::vector<float> weight = random.Normal(cols);
  const DeviceArray<float> device_weight(ops(), weight);
  const DeviceMatrix matrix(ops(), act(), rows, cols, x);
  ops().RmsNorm({matrix, device_weight.data(), 1e-5f, matrix}, ops().stream());
  ExpectClose(matrix.Get(), oracle::RmsNorm(oracle::ToDouble(x), weight, 1e-5, rows, cols), tolerance());
  const DeviceMatrix empty(ops(), act(), 0, cols);
  ops().RmsNorm({empty, device_weight.data(), 1e-5f, empty}, ops().stream());
}

TEST_P(NormTest, RowOfZerosStaysZero) {
  const int64_t cols = 80;
  const DeviceMatrix x(ops(), act(), 1, cols, std::vector<float>(cols, 0.0f));
  const DeviceArray<float> weight(ops(), std::vector<float>(cols, 2.0f));
  const DeviceMatrix out(ops(), act(), 1, cols);
  ops().RmsNorm({x, weight.data(), 1e-6f, out}, ops().stream());
  EXPECT_EQ(out.Get(), std::vector<float>(cols, 0.0f));
}

TEST_P(NormTest, AddRmsNormUpdatesTheStream) {
  Random random(3);
  for (bool with_delta : {true, false}) {
    const int64_t rows = 7, cols = 130;
    const std::vector<float> stream = Round(random.Normal(rows * cols), act());
    const std::vector<float> delta = Round(random.Normal(rows * cols), act());
    const std::vector<float> weight = random.Normal(cols);
    const DeviceMatrix device_stream(ops(), act(), rows, cols, stream), device_delta(ops(), act(), rows, cols, delta);
    const DeviceMatrix out(ops(), act(), rows, cols);
    const DeviceArray<float> device_weight(ops(), weight);
    ops().AddRmsNorm({device_stream, with_delta ? device_delta.view() : MatrixView{}, device_weight.data(), 1e-5f, out},
                     ops().stream());
    oracle::Doubles sum = oracle::ToDouble(stream);
    for (size_t i = 0; with_delta && i < sum.size(); ++i) sum[i] += double{delta[i]};
    ExpectClose(device_stream.Get(), sum, tolerance(), "stream");
    ExpectClose(out.Get(), oracle::RmsNorm(sum, weight, 1e-5, rows, cols), tolerance(), "out");
  }
}

TEST_P(NormTest, RowsDoNotDependOnTheBatch) {
  if (!batch_invariant()) GTEST_SKIP() << "not a batch-invariant backend";
  Random random(4);
  const int64_t rows = 64, cols = 1000;
  const std::vector<float> x = random.Normal(rows * cols);
  const DeviceArray<float> weight(ops(), random.Normal(cols));
  const DeviceMatrix all(ops(), act(), rows, cols, x);
  const DeviceMatrix all_out(ops(), act(), rows, cols);
  ops().RmsNorm({all, weight.data(), 1e-5f, all_out}, ops().stream());
  for (int64_t r : {0, 31, 63}) {
    const DeviceMatrix one(ops(), act(), 1, cols, Slice(x, cols, r, 1));
    const DeviceMatrix out(ops(), act(), 1, cols);
    ops().RmsNorm({one, weight.data(), 1e-5f, out}, ops().stream());
    ExpectSameBits(out.Get(), Slice(all_out.Get(), cols, r, 1), "row " + std::to_string(r));
  }
}

TEST_P(NormTest, WrongShapesAreRefusedWithNumbers) {
  const DeviceMatrix x(ops(), act(), 2, 16, std::vector<float>(32, 1.0f)), out(ops(), act(), 2, 17);
  const DeviceArray<float> weight(ops(), std::vector<float>(16, 1.0f));
  try {
    ops().RmsNorm({x, weight.data(), 1e-5f, out}, ops().stream());
    FAIL() << "no error";
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("[2, 16]"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("[2, 17]"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace k3::testing
