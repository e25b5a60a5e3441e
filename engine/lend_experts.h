#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "engine/rank_group.h"

namespace k3 {

// Runs `work` on the ranks of one data-parallel group, outside of any step: the self-check, `verify`, tests. The other
// groups' ranks lend their experts to every forward pass that is announced, of at most `max_chunk` tokens. All ranks of
// this process take part; the group must be of this process too, and `work` must make the same passes on each of its
// ranks.
//   work(local, announce): `announce(tokens)` comes before each pass, see SequenceRunner::before_forward.
using ForwardNotice = std::function<void(int64_t)>;
absl::Status RunInGroup(RankGroup& ranks, int32_t data_rank, int64_t max_chunk,
                        const std::function<absl::Status(int local, const ForwardNotice& announce)>& work);

}  // namespace k3
