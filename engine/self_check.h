#pragma once

#include "absl/status/status.h"
#include "engine/rank_group.h"

namespace k3 {

// SelfCheck of model/self_check.h on all ranks: every data-parallel group computes once while the others lend their
// experts, so that all connections between ranks have been used before the first request.
absl::Status SelfCheck(RankGroup& ranks);

}  // namespace k3
