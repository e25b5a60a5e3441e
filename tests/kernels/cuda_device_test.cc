#include <gtest/gtest.h>

#include <string>

#include "kernels/ops.h"

// Start of the CUDA backend, with and without a device. The op tests list the backend only where there is one.
namespace k3 {
namespace {

std::string ErrorOf(const CudaOptions& options) {
  try {
    MakeCudaOps(options);
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "";
}

TEST(CudaDeviceTest, WithoutADeviceTheErrorSaysWhatIsNeeded) {
  if (CudaDeviceCount() > 0) GTEST_SKIP() << "this machine has a usable CUDA device";
  const std::string error = ErrorOf({});
  EXPECT_NE(error.find("CUDA"), std::string::npos) << error;
  EXPECT_TRUE(error.find("needed is") != std::string::npos || error.find("built without CUDA") != std::string::npos)
      << error;
}

TEST(CudaDeviceTest, OptionsAreChecked) {
  const int count = CudaDeviceCount();
  if (count == 0) GTEST_SKIP() << "no CUDA device that this build can use: the CUDA op tests do not run here";
  CudaOptions options;
  options.device = count;
  EXPECT_NE(ErrorOf(options).find("no CUDA device " + std::to_string(count)), std::string::npos) << ErrorOf(options);
  options.device = 0;
  options.compute_dtype = DType::kF16;
  EXPECT_NE(ErrorOf(options).find("F16"), std::string::npos) << ErrorOf(options);
}

TEST(CudaDeviceTest, DevicesReportThemselves) {
  if (CudaDeviceCount() == 0) GTEST_SKIP() << "no CUDA device that this build can use";
  for (DType dtype : {DType::kBF16, DType::kF32}) {
    CudaOptions options;
    options.compute_dtype = dtype;
    const std::unique_ptr<Ops> ops = MakeCudaOps(options);
    EXPECT_FALSE(ops->is_cpu());
    EXPECT_EQ(ops->activation_dtype(), dtype);
    EXPECT_GT(ops->TotalMemory(), ops->FreeMemory());
    EXPECT_THROW(ops->Allocate(ops->TotalMemory() * 2), DeviceError);
    void* memory = ops->Allocate(1000);  // an exhausted device still serves what fits
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 256, 0u);
    ops->Free(memory);
  }
}

}  // namespace
}  // namespace k3
