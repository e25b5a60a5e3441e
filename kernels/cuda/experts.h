#pragma once

#include <memory>
#include <span>

#include "kernels/cuda/device.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/weights.h"

namespace k3::cuda {

// Makes expert weights. Safe to use from several threads at once.
class ExpertMaker {
 public:
  ExpertMaker(const Device& device, Uploader& uploader) : device_(device), uploader_(uploader) {}
  std::unique_ptr<ExpertWeights> Make(int32_t first, std::span<const HostExpert> experts);

 private:
  const Device& device_;
  Uploader& uploader_;
};

}  // namespace k3::cuda
