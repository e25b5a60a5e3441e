#pragma once

#include <functional>
#include <memory>

#include "kernels/comm/communicator.h"
#include "kernels/ops.h"

namespace k3 {

// How the ranks of one process join each other over NCCL (RankGroup::Options::make_world). The id is drawn when the
// first one does.
std::function<std::unique_ptr<Communicator>(int rank, Ops& ops)> NcclWorld(int ranks, bool fixed_sums);

}  // namespace k3
