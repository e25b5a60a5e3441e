#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <source_location>
#include <string>
#include <utility>

#include "kernels/core/tensor.h"
#include "kernels/cuda/device.h"

// Grid arithmetic and the one way in which kernels are launched: with the error checked and named.
namespace k3::cuda {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared = 0;     // dynamic shared memory, bytes
  unsigned cluster = 1;  // blocks along x that form a cluster
  // May start once every block of the launch before has called GridDependencyRelease or ended. Until GridDependencyWait
  // it writes nothing, and reads nothing that launches before it, back to one that is no product or norm, write.
  bool early = false;
  // All blocks, which are no more than fit, are on the device at a time, whatever else runs there: they wait for each
  // other.
  bool together = false;
};

// Launches `kernel` and checks the launch. Asynchronous errors surface at the next synchronization.
template <typename... Params, typename... Args>
void Launch(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream, const char* name,
            Args&&... args) {
  if (shape.shared > 48 * 1024) {
    Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared)),
          name);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  cudaLaunchAttribute attribute[3];
  config.attrs = attribute;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attribute[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {shape.cluster, 1, 1};
  }
  if (shape.together) {
    cudaLaunchAttribute& together = attribute[config.numAttrs++];
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
  }
  if (shape.early) {
    cudaLaunchAttribute& early = attribute[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  Check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), name);
}

// Clusters of such a launch that fit on the current device at a time.
template <typename... Params>
int ResidentClusters(void (*kernel)(Params...), const LaunchShape& shape, const char* name) {
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared)),
        name);
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {shape.cluster, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  Check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), name);
  return clusters;
}

// A matrix as the kernels take it: T is the element type that the host check has established.
template <typename T>
struct Matrix {
  T* data;
  int64_t ld;  // elements

  __host__ __device__ T* Row(int64_t row) const { return data + row * ld; }
};

template <typename T>
Matrix<T> AsMatrix(const MatrixView& view) {
  return {static_cast<T*>(view.data), view.ld};
}

inline bool Aligned(const void* data, size_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

// Whether every row of `view` starts at a 16-byte boundary, so that kernels may use 16-byte accesses.
inline bool RowsAligned16(const MatrixView& view) {
  return Aligned(view.data, 16) && view.ld * static_cast<int64_t>(SizeOf(view.dtype)) % 16 == 0;
}

}  // namespace k3::cuda
