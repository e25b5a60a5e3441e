#include "kernels/cpu/kernel_table.h"

namespace k3 {

namespace scalar {
extern const KernelTable kTable;
}

#if defined(K3_CPU_X86)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}

const KernelTable* Kernels(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kScalar:
      return &scalar::kTable;
    case CpuIsa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2::kTable : nullptr;
    case CpuIsa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && Kernels(CpuIsa::kAvx2)
                 ? &avx512::kTable
                 : nullptr;
  }
  return nullptr;
}
#else
const KernelTable* Kernels(CpuIsa isa) { return isa == CpuIsa::kScalar ? &scalar::kTable : nullptr; }
#endif

const KernelTable& BestKernels() {
  for (CpuIsa isa : {CpuIsa::kAvx512, CpuIsa::kAvx2}) {
    if (const KernelTable* table = Kernels(isa)) return *table;
  }
  return *Kernels(CpuIsa::kScalar);
}

}  // namespace k3
