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

// Sizes in elements and strides in bytes, innermost first; strides are those of dimension 1 and up. `promotion`: what
// the second-level cache fetches at a time. Where the copy asks for the rest anyway, more than a row of the box, 128
// bytes, only adds traffic between the halves of that cache, by half.
template <int kRank>
CUtensorMap Boxes(const void* data, const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                  const cuuint32_t (&box)[kRank], CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = Encode();
  cuuint32_t steps[kRank];
  std::string shape = "[";
  for (int i = kRank - 1; i >= 0; --i) {
    steps[i] = 1;
    shape += std::to_string(sizes[i]);
    shape += i > 0 ? ", " : "]";
  }
  CUtensorMap map;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  K3_REQUIRE(result == CUDA_SUCCESS, "no tensor map for " + shape + ": driver error " + std::to_string(result));
  return map;
}

}  // namespace

CUtensorMap MatrixBoxes(const void* data, int64_t planes, int64_t plane_stride, int64_t rows, int64_t cols, int64_t ld,
                        int box_rows, int box_cols, int fetch) {
  return Boxes<3>(data, {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(planes)},
                  {static_cast<cuuint64_t>(ld) * 2, static_cast<cuuint64_t>(plane_stride) * 2},
                  {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows), 1},
                  box_cols == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                  fetch == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

CUtensorMap LineBoxes(const void* data, int64_t pages, int64_t page_stride, int64_t page_size, int64_t cols) {
  return Boxes<4>(
      data,
      {64, static_cast<cuuint64_t>(page_size), static_cast<cuuint64_t>(cols / 64), static_cast<cuuint64_t>(pages)},
      {static_cast<cuuint64_t>(cols) * 2, 128, static_cast<cuuint64_t>(page_stride)},
      {64, 8, static_cast<cuuint32_t>(cols / 64), 1}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

CUtensorMap PairBoxes(const void* data, int64_t planes, int64_t rows, int64_t pairs, int box_pairs) {
  const auto bytes = [](int64_t count) { return static_cast<cuuint64_t>(count) * 2; };
  return Boxes<3>(data,
                  {static_cast<cuuint64_t>(pairs), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(planes)},
                  {bytes(pairs), bytes(pairs * rows)}, {static_cast<cuuint32_t>(box_pairs), 8, 1},
                  CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

}  // namespace k3::cuda
