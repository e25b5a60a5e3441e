#include "server/commands/version.h"

#include <google/protobuf/stubs/common.h>
#include <grpcpp/grpcpp.h>

#include "absl/strings/str_cat.h"
#include "kernels/core/error.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/ops.h"
#include "server/version.h"

namespace k3 {
namespace {

// The instruction sets that are both compiled in and there.
std::string CpuKinds() {
  std::string kinds;
  const std::pair<CpuIsa, const char*> all[] = {
      {CpuIsa::kScalar, "scalar"}, {CpuIsa::kAvx2, "avx2"}, {CpuIsa::kAvx512, "avx512"}};
  for (const auto& [isa, name] : all) {
    if (Kernels(isa) != nullptr) absl::StrAppend(&kinds, kinds.empty() ? "" : " ", name);
  }
  return kinds;
}

}  // namespace

std::string VersionText() {
  std::string text;
  const auto line = [&text](const char* name, const std::string& value) {
    absl::StrAppend(&text, name, std::string(10 - std::string(name).size(), ' '), value, "\n");
  };
  line("k3serve", kVersion);
  line("commit", kCommit);
  line("compiler", absl::StrCat("gcc-compatible ", __VERSION__));
  line("grpc", grpc::Version());
  line("protobuf", google::protobuf::internal::VersionString(GOOGLE_PROTOBUF_VERSION));
  line("cuda", kCudaVersion);
  line("nccl", "not compiled in");
  line("cpu", CpuKinds());
  line("gpu", std::string(kCudaVersion) == "not compiled in" ? "not compiled in"
                                                             : absl::StrCat("sm_90a; ", CudaDeviceCount(), " found"));
  return text;
}

}  // namespace k3
