#pragma once

#include <stdexcept>
#include <string>

namespace k3 {

// A failed device, cuBLAS or NCCL call, or a launch that the host-side checks refuse. Carries the call, the place and
// the library's text. Not survivable: the engine fails its requests, reports unhealthy and the process exits with 70.
class DeviceError : public std::runtime_error {
 public:
  explicit DeviceError(const std::string& what) : std::runtime_error(what) {}
};

}  // namespace k3
