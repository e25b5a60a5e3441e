#pragma once

#include <array>
#include <memory>
#include <string>

#include "kernels/comm/communicator.h"
#include "kernels/ops.h"

// NCCL behind the Communicator interface, on the CUDA backend. The library is loaded when it is first asked for, so
// that a single GPU needs none.
namespace k3 {

// What all ranks of a communicator must know to find each other; made by one, brought to the others by whoever starts
// them.
struct NcclId {
  std::array<char, 128> bytes{};
};

struct NcclOptions {
  // Sums in the order of tree_sum.h: gathered and added here, at more bytes. Otherwise the order is the library's,
  // which depends on sizes where more than two ranks meet.
  bool fixed_sums = false;
};

// "2.28.9", or empty when this build or this machine has none. Never throws.
std::string NcclVersion() noexcept;

// Both throw DeviceError: built without CUDA, no library found, or what NCCL says. The communicator is made on the
// device of `ops`, which must outlive it, by all ranks at once, each on its own thread.
NcclId MakeNcclId();
std::unique_ptr<Communicator> MakeNcclCommunicator(const NcclId& id, int rank, int size, Ops& ops,
                                                   const NcclOptions& options = {});

}  // namespace k3
