#include "engine/self_check.h"

#include "engine/model/self_check.h"
#include "engine/model/sequence_runner.h"

namespace k3 {

absl::Status SelfCheck(RankGroup& ranks) {
  // The passes of a check are known, so that groups of other processes need not be told of them.
  for (int32_t group = 0; group < ranks.layout().data; ++group) {
    const absl::Status status = ranks.ForEach([&](int local) -> absl::Status {
      if (ranks.data_rank_of(local) == group) return SelfCheck(ranks.model(local), ranks.ops(local));
      SequenceRunner lender(ranks.model(local), ranks.ops(local), /*max_context=*/1, kSelfCheckTokens);
      for (int32_t pass = 0; pass < kSelfCheckPasses; ++pass) lender.LendExperts(kSelfCheckTokens);
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace k3
