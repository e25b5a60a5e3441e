#include "kernels/cuda/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <string>

#include "kernels/cuda/device.h"

namespace k3::cuda {
namespace {

// From the driver, which is not linked: a machine without one can still start and say so.
PFN_cuTensorMapEncodeTiled_v12000 Encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  K3_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
  K3_REQUIRE(found == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled (12.0 or newer needed)");
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

}  // namespace

CUtensorMap MatrixBoxes(const void* data, int64_t planes, int64_t plane_stride, int64_t rows, int64_t cols, int64_t ld,
                        int box_rows) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = Encode();
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(planes)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(ld) * 2, static_cast<cuuint64_t>(plane_stride) * 2};  // bytes
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes, strides,
                                 box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  K3_REQUIRE(result == CUDA_SUCCESS, "no tensor map for [" + std::to_string(planes) + "][" + std::to_string(rows) +
                                         ", " + std::to_string(cols) + "]: driver error " + std::to_string(result));
  return map;
}

}  // namespace k3::cuda
