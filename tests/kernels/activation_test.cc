#include "tests/kernels/op_fixture.h"
#include "tests/kernels/oracle.h"

namespace k3::testing {
namespace {

class ActivationTest : public OpTest {};
K3_INSTANTIATE_OPS(ActivationTest);

TEST_P(ActivationTest, MatchesTheOracle) {
  Random random(1);
  const std::vector<ActivationSpec> specs = {
      {Activation::kSitu, 4, 25}, {Activation::kSitu, 1, 0}, {Activation::kSwiglu, 1, 0}};
  for (const ActivationSpec& spec : specs) {
    for (int64_t width : {1, 15, 16, 17, 100, 1024}) {
      for (float scale : {0.01f, 2.0f, 60.0f}) {
        const int64_t rows = 9;
        const std::vector<float> gate_up = Round(random.Normal(rows * 2 * width, scale), act());
        const DeviceMatrix in(ops(), act(), rows, 2 * width, gate_up), out(ops(), act(), rows, width);
        ops().GatedActivation({in, spec, out}, ops().stream());
        ExpectClose(out.Get(), oracle::GatedActivation(oracle::ToDouble(gate_up), spec, rows, width), tolerance(),
                    "width " + std::to_string(width) + ", scale " + std::to_string(scale));
      }
    }
  }
}

TEST_P(ActivationTest, ExtremesStayFinite) {
  const std::vector<float> extremes = {-3e38f, -1e4f, -100.0f, -20.0f, -1e-6f, 0.0f, 1e-6f, 20.0f, 100.0f, 1e4f, 3e38f};
  const int64_t width = static_cast<int64_t>(extremes.size());
  std::vector<float> gate_up = Round(extremes, act());
  gate_up.insert(gate_up.end(), gate_up.rbegin(), gate_up.rend());
  const ActivationSpec spec{Activation::kSitu, 4, 25};
  const DeviceMatrix in(ops(), act(), 1, 2 * width, gate_up), out(ops(), act(), 1, width);
  ops().GatedActivation({in, spec, out}, ops().stream());
  ExpectClose(out.Get(), oracle::GatedActivation(oracle::ToDouble(gate_up), spec, 1, width), tolerance());
  for (float x : out.Get()) EXPECT_LE(std::fabs(x), 100.5f);
}

TEST_P(ActivationTest, NanStaysNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (Activation kind : {Activation::kSitu, Activation::kSwiglu}) {
    const DeviceMatrix in(ops(), act(), 1, 4, {nan, 1, 1, nan}), out(ops(), act(), 1, 2);
    ops().GatedActivation({in, {kind, 4, 25}, out}, ops().stream());
    for (float x : out.Get()) EXPECT_TRUE(std::isnan(x));
  }
}

}  // namespace
}  // namespace k3::testing
