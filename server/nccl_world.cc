#include "server/nccl_world.h"

#include <mutex>

#include "kernels/comm/nccl.h"

namespace k3 {

std::function<std::unique_ptr<Communicator>(int, Ops&)> NcclWorld(int ranks, bool fixed_sums) {
  const auto once = std::make_shared<std::once_flag>();
  const auto id = std::make_shared<NcclId>();
  return [=](int rank, Ops& ops) {
    std::call_once(*once, [&] { *id = MakeNcclId(); });
    return MakeNcclCommunicator(*id, rank, ranks, ops, {.fixed_sums = fixed_sums});
  };
}

}  // namespace k3
