#include "kernels/core/mxfp4.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/cpu/cpu_ops.h"
#include "tests/kernels/op_fixture.h"

namespace k3::testing {
namespace {

// B39.
TEST(Mxfp4Test, ScaleCodesArePowersOfTwo) {
  for (int code : {0, 1, 119, 126, 127, 128, 134, 135, 253, 254}) {
    EXPECT_EQ(E8m0ToFloat(static_cast<uint8_t>(code)), std::ldexp(1.0f, code - 127)) << code;
  }
  EXPECT_TRUE(std::isnan(E8m0ToFloat(255)));
}

TEST(Mxfp4Test, ElementCodesAndTheirOrderInAByte) {
  const float expected[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  for (int code = 0; code < 16; ++code) {
    const uint8_t scale = 127;
    const uint8_t low = static_cast<uint8_t>(code), high = static_cast<uint8_t>(code << 4);
    EXPECT_EQ(Mxfp4Value(&low, &scale, 0), expected[code]);
    EXPECT_EQ(Mxfp4Value(&low, &scale, 1), 0.0f);
    EXPECT_EQ(Mxfp4Value(&high, &scale, 1), expected[code]);
    EXPECT_EQ(std::signbit(Mxfp4Value(&low, &scale, 0)), code >= 8);
  }
}

TEST(Mxfp4Test, ElementBeyondFp32IsInfiniteNeverNan) {
  const uint8_t six = 7, scale = 254;
  EXPECT_TRUE(std::isinf(Mxfp4Value(&six, &scale, 0)));
}

// The multiplying kernels decode every scale and element code exactly as the function above.
class Mxfp4OpsTest : public OpTest {};
K3_INSTANTIATE_OPS(Mxfp4OpsTest);

TEST_P(Mxfp4OpsTest, KernelsDecodeEveryCode) {
  if (!ops().is_cpu()) GTEST_SKIP() << "reads the weights back through fp32 sums";
  // One row per scale code 0..254, the 16 element codes twice. Each pick reads one column through W1, W3 gives 1, and
  // W2 is the identity; SwiGLU with a huge gate would be inexact, so the weights are read through W2 instead.
  const int64_t rows = 255, cols = 32;
  std::vector<uint8_t> packed, scales;
  for (int64_t r = 0; r < rows; ++r) {
    for (int i = 0; i < 16; ++i) packed.push_back(static_cast<uint8_t>(i % 8 * 2 | (i % 8 * 2 + 1) << 4));
    scales.push_back(static_cast<uint8_t>(r));
  }
  const PanelMatrix matrix =
      PanelMatrix::PackMxfp4(MakeBytes(packed, {rows, cols / 2}).tensor, MakeBytes(scales, {rows, 1}).tensor);
  // `packed` tensors are temporaries: PackMxfp4 copies.
  const KernelTable* table = nullptr;
  for (CpuIsa isa : {CpuIsa::kScalar, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (Kernels(isa) != nullptr && GetParam().name == std::string("cpu_") + Kernels(isa)->name) table = Kernels(isa);
  }
  ASSERT_NE(table, nullptr);
  for (int64_t k = 0; k < cols; ++k) {
    std::vector<float> x(cols, 0.0f), y(rows);
    x[k] = 1;
    const float* x_row = x.data();
    float* y_row = y.data();
    table->gemm(matrix, 0, matrix.panels(), &x_row, &y_row, 1, false);
    for (int64_t r = 0; r < rows; ++r) {
      const float expected = Mxfp4Value(packed.data() + r * 16, &scales[r], k);
      // An infinite weight elsewhere in the row times zero is NaN: rows with the two top codes are checked by k alone.
      if (r >= 253) {
        EXPECT_TRUE(std::isnan(y[r]) || std::isinf(y[r])) << r;
      } else {
        EXPECT_EQ(y[r], expected) << "scale code " << r << ", column " << k;
      }
    }
  }
}

TEST(Mxfp4PackTest, MismatchedScalesAreRefusedByName) {
  const OwnedTensor packed = MakeBytes(std::vector<uint8_t>(64), {2, 32}, "experts.5.w1.weight_packed");
  const OwnedTensor scale = MakeBytes(std::vector<uint8_t>(6), {2, 3}, "experts.5.w1.weight_scale");
  try {
    PanelMatrix::PackMxfp4(packed.tensor, scale.tensor);
    FAIL() << "no error";
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("experts.5.w1.weight_packed"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("[2, 3]"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace k3::testing
