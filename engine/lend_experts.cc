#include "engine/lend_experts.h"

#include <condition_variable>
#include <mutex>
#include <vector>

#include "engine/model/sequence_runner.h"

namespace k3 {
namespace {

// The passes of the group that computes, in order, for those that lend.
class Passes {
 public:
  void Announce(int64_t tokens) {
    std::lock_guard lock(mutex_);
    tokens_.push_back(tokens);
    wake_.notify_all();
  }
  void End() {
    std::lock_guard lock(mutex_);
    ended_ = true;
    wake_.notify_all();
  }
  // Tokens of pass `index`; 0 when there is none any more.
  int64_t Wait(size_t index) {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [&] { return index < tokens_.size() || ended_; });
    return index < tokens_.size() ? tokens_[index] : 0;
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<int64_t> tokens_;
  bool ended_ = false;
};

}  // namespace

absl::Status RunInGroup(RankGroup& ranks, int32_t data_rank, int64_t max_chunk,
                        const std::function<absl::Status(int local, const ForwardNotice& announce)>& work) {
  Passes passes;
  return ranks.ForEach([&](int local) -> absl::Status {
    if (ranks.data_rank_of(local) != data_rank) {
      SequenceRunner runner(ranks.model(local), ranks.ops(local), /*max_context=*/1, max_chunk);
      for (size_t pass = 0; const int64_t tokens = passes.Wait(pass); ++pass) runner.LendExperts(tokens);
      return absl::OkStatus();
    }
    const bool first = ranks.tensor_rank_of(local) == 0;
    const ForwardNotice announce = [&, first](int64_t tokens) {
      if (first) passes.Announce(tokens);
    };
    // Ends the lenders however this ends.
    struct End {
      Passes* passes;
      ~End() {
        if (passes != nullptr) passes->End();
      }
    } end{first ? &passes : nullptr};
    return work(local, announce);
  });
}

}  // namespace k3
