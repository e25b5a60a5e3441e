#pragma once

#include <cstdlib>
#include <cstring>

#include "kernels/cuda/ptx.cuh"

// Programmatic dependent launch: a kernel whose first parameter is an Awaited starts while the kernels ahead of it in
// the stream still run, so that its launch and what it does before Wait cost no time of their own.
namespace k3::cuda {

// A kernel argument that is to be had only by waiting for the earlier kernels. Launch (launch.cuh) starts exactly the
// kernels early that take one as their first parameter; they call Wait once in every thread, and before that read
// nothing but weights and write nothing. As every such kernel waits for the ones ahead to have ended, each also waits
// for all before those.
template <typename T>
class Awaited {
 public:
  Awaited(const T& value) : value_(value) {}  // implicit: Launch takes the plain value
  // Lets the next kernel start, and returns when the earlier ones have ended and their writes are visible.
  __device__ __forceinline__ const T& Wait() const {
    GridDependencyRelease();
    GridDependencyWait();
    return value_;
  }

 private:
  T value_;
};

template <typename... Params>
constexpr bool kStartsEarly = false;
template <typename T, typename... Rest>
constexpr bool kStartsEarly<Awaited<T>, Rest...> = true;

// K3_DEPENDENT_LAUNCH=0 in the environment: every kernel starts when the one ahead has ended.
inline bool DependentLaunch() {
  static const bool on = [] {
    const char* value = std::getenv("K3_DEPENDENT_LAUNCH");
    return value == nullptr || std::strcmp(value, "0") != 0;
  }();
  return on;
}

}  // namespace k3::cuda
