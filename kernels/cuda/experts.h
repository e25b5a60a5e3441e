#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/weights.h"

namespace k3::cuda {

// Makes expert weights and owns the space in which MXFP4 experts are expanded for large products. Safe to use from
// several threads at once.
class ExpertMaker {
 public:
  ExpertMaker(const Device& device, Uploader& uploader) : device_(device), uploader_(uploader) {}
  std::unique_ptr<ExpertWeights> Make(int32_t first, std::span<const HostExpert> experts);

 private:
  void* Space(size_t bytes);

  const Device& device_;
  Uploader& uploader_;
  std::mutex mutex_;
  std::vector<DeviceMemory> spaces_;  // guarded by mutex_; of growing size, the last is handed out
};

}  // namespace k3::cuda
