#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/core/tensor.h"
#include "kernels/cuda/device.h"

namespace k3::cuda {

// A piece of device memory that frees itself. Made and freed on any thread.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(int ordinal, size_t bytes);
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory();

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  int ordinal_ = 0;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Moves host tensors into device memory through page-locked staging buffers, from any number of threads: each upload
// borrows a lane (two buffers and a stream) for its duration. Uploads have finished when Upload returns.
class Uploader {
 public:
  explicit Uploader(int ordinal);
  ~Uploader();
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  // The matrix [rows, cols] of `tensor` (1-D tensors count as one row; U8 as it is, without conversion) to contiguous
  // rows of type `to` at `device`. A tensor without data is filled with its random values.
  void Upload(const HostTensor& tensor, void* device, DType to);
  // Plain bytes.
  void UploadBytes(const void* host, void* device, size_t bytes);

 private:
  struct Lane;
  class Loan;
  std::unique_ptr<Lane> Borrow();
  void Return(std::unique_ptr<Lane> lane);

  int ordinal_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> idle_;  // guarded by mutex_
};

}  // namespace k3::cuda
