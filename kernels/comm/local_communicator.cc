#include "kernels/comm/local_communicator.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>

#include "kernels/core/error.h"
#include "kernels/core/tree_sum.h"

namespace k3 {

// What the ranks of a group share.
class LocalGroup {
 public:
  LocalGroup(int size, std::chrono::milliseconds timeout)
      : timeout(timeout), calls_(static_cast<size_t>(size)), present_(static_cast<size_t>(size)) {}

  struct Call {
    const char* op = "";
    const void* data = nullptr;
    uint64_t size = 0;
    const int32_t* sent = nullptr;  // AllToAllRows only
  };

  int size() const { return static_cast<int>(calls_.size()); }
  const Call& call(int rank) const { return calls_[static_cast<size_t>(rank)]; }
  Call& call(int rank) { return calls_[static_cast<size_t>(rank)]; }

  // Waits until all ranks are here. The last one runs `last` before the others go on.
  template <typename Last>
  void Rendezvous(int rank, const Last& last) {
    std::unique_lock lock(mutex_);
    ThrowIfAborted();
    present_[static_cast<size_t>(rank)] = true;
    const uint64_t generation = generation_;
    if (++arrived_ == size()) {
      last();
      arrived_ = 0;
      std::fill(present_.begin(), present_.end(), false);
      ++generation_;
      wake_.notify_all();
      return;
    }
    const bool in_time = wake_.wait_for(lock, timeout, [&] { return generation_ != generation || aborted_; });
    // A result that is complete is good even when the group has ended since.
    if (generation_ != generation) return;
    if (!in_time) {
      std::string missing;
      for (int r = 0; r < size(); ++r) {
        if (!present_[static_cast<size_t>(r)]) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
      }
      AbortLocked("rank " + missing + " of " + std::to_string(size()) + " did not enter " +
                  calls_[static_cast<size_t>(rank)].op + " within " + std::to_string(timeout.count()) + " ms");
    }
    ThrowIfAborted();
  }

  void Abort(const std::string& why) noexcept {
    std::vector<std::shared_ptr<LocalGroup>> children;
    {
      std::lock_guard lock(mutex_);
      AbortLocked(why);
      for (const std::weak_ptr<LocalGroup>& child : children_) {
        if (auto alive = child.lock()) children.push_back(std::move(alive));
      }
    }
    for (const auto& child : children) child->Abort(why);
  }

  void Check() {
    std::lock_guard lock(mutex_);
    ThrowIfAborted();
  }

  void AddChild(const std::shared_ptr<LocalGroup>& child) {
    std::lock_guard lock(mutex_);
    children_.push_back(child);
  }

  const std::chrono::milliseconds timeout;
  std::vector<float> sums;                                          // of the AllReduce under way
  std::vector<std::pair<std::shared_ptr<LocalGroup>, int>> places;  // of the Split under way, by rank

 private:
  void ThrowIfAborted() const {
    if (aborted_) throw DeviceError("communication ended: " + reason_);
  }
  void AbortLocked(const std::string& why) noexcept {
    if (!aborted_) reason_ = why;
    aborted_ = true;
    wake_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Call> calls_;    // written by its rank before a rendezvous, read by others until the next
  std::vector<bool> present_;  // guarded by mutex_, like all below
  int arrived_ = 0;
  uint64_t generation_ = 0;
  bool aborted_ = false;
  std::string reason_;
  std::vector<std::weak_ptr<LocalGroup>> children_;
};

std::vector<std::unique_ptr<Communicator>> LocalCommunicator::MakeGroup(int size, std::chrono::milliseconds timeout) {
  const auto group = std::make_shared<LocalGroup>(size, timeout);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<LocalCommunicator>(group, r));
  return ranks;
}

LocalCommunicator::LocalCommunicator(std::shared_ptr<LocalGroup> group, int rank)
    : HostCommunicator(rank, group->size()), group_(std::move(group)) {}

void LocalCommunicator::Enter(const char* op, const void* data, uint64_t size) {
  Enter(op, data, size, [] {});
}

template <typename Last>
void LocalCommunicator::Enter(const char* op, const void* data, uint64_t size, const Last& last) {
  LocalGroup::Call& own = group_->call(rank());
  own.op = op;
  own.data = data;
  own.size = size;
  group_->Rendezvous(rank(), last);
  for (int r = 0; r < this->size(); ++r) {
    const LocalGroup::Call& other = group_->call(r);
    if (std::strcmp(other.op, op) == 0 && other.size == size) continue;
    const std::string what = "ranks disagree: rank " + std::to_string(rank()) + " entered " + op + " of " +
                             std::to_string(size) + ", rank " + std::to_string(r) + " " + other.op + " of " +
                             std::to_string(other.size);
    group_->Abort(what);
    throw DeviceError(what);
  }
}

void LocalCommunicator::Leave() {
  group_->Rendezvous(rank(), [] {});
}

void LocalCommunicator::DoAllReduce(float* data, int64_t count) {
  // Each rank adds one part of the elements; the parts meet in `sums`.
  Enter("AllReduce", data, static_cast<uint64_t>(count), [&] {
    if (group_->sums.size() < static_cast<size_t>(count)) group_->sums.resize(static_cast<size_t>(count));
  });
  const auto part = [this](int r) { return static_cast<const float*>(group_->call(r).data); };
  TreeSum(part, size(), count * rank() / size(), count * (rank() + 1) / size(), group_->sums.data());
  Leave();
  std::memcpy(data, group_->sums.data(), static_cast<size_t>(count) * sizeof(float));
}

void LocalCommunicator::DoAllGather(const void* in, void* out, size_t bytes) {
  Enter("AllGather", in, bytes);
  for (int r = 0; r < size(); ++r) {
    char* to = static_cast<char*>(out) + static_cast<size_t>(r) * bytes;
    const void* from = group_->call(r).data;
    if (to != from && bytes > 0) std::memcpy(to, from, bytes);
  }
  Leave();
}

void LocalCommunicator::DoReduceScatter(const float* in, float* out, int64_t count) {
  Enter("ReduceScatter", in, static_cast<uint64_t>(count));
  const int64_t offset = count * rank();
  const auto part = [&](int r) { return static_cast<const float*>(group_->call(r).data) + offset; };
  TreeSum(part, size(), 0, count, out);
  Leave();
}

void LocalCommunicator::DoAllToAll(const void* in, void* out, size_t bytes) {
  Enter("AllToAll", in, bytes);
  for (int r = 0; r < size() && bytes > 0; ++r) {
    std::memcpy(static_cast<char*>(out) + static_cast<size_t>(r) * bytes,
                static_cast<const char*>(group_->call(r).data) + static_cast<size_t>(rank()) * bytes, bytes);
  }
  Leave();
}

void LocalCommunicator::DoAllToAllRows(const void* in, void* out, int64_t rows, size_t row_bytes, const int32_t* sent,
                                       int32_t* received) {
  group_->call(rank()).sent = sent;
  const size_t block = static_cast<size_t>(rows) * row_bytes;
  Enter("AllToAllRows", in, block);
  for (int r = 0; r < size(); ++r) {
    const LocalGroup::Call& from = group_->call(r);
    const int32_t count = from.sent[rank()];
    if (received != nullptr) received[r] = count;
    if (count == 0 || row_bytes == 0) continue;
    std::memcpy(static_cast<char*>(out) + static_cast<size_t>(r) * block,
                static_cast<const char*>(from.data) + static_cast<size_t>(rank()) * block,
                static_cast<size_t>(count) * row_bytes);
  }
  Leave();
}

void LocalCommunicator::DoBroadcast(void* data, size_t bytes, int root) {
  Enter("Broadcast", data, bytes);
  if (rank() != root && bytes > 0) std::memcpy(data, group_->call(root).data, bytes);
  Leave();
}

std::unique_ptr<Communicator> LocalCommunicator::Split(int color, int key) {
  const int mine[2] = {color, key};
  Enter("Split", mine, 0);
  group_->Rendezvous(rank(), [&] {
    // By color, then key, then rank.
    struct Member {
      int color, key, rank;
    };
    std::vector<Member> members;
    for (int r = 0; r < size(); ++r) {
      const int* asked = static_cast<const int*>(group_->call(r).data);
      members.push_back({asked[0], asked[1], r});
    }
    std::sort(members.begin(), members.end(), [](const Member& a, const Member& b) {
      return a.color != b.color ? a.color < b.color : a.key != b.key ? a.key < b.key : a.rank < b.rank;
    });
    group_->places.assign(members.size(), {});
    for (size_t begin = 0, end = 0; begin < members.size(); begin = end) {
      while (end < members.size() && members[end].color == members[begin].color) ++end;
      const auto child = std::make_shared<LocalGroup>(static_cast<int>(end - begin), group_->timeout);
      for (size_t i = begin; i < end; ++i) {
        group_->places[static_cast<size_t>(members[i].rank)] = {child, static_cast<int>(i - begin)};
      }
    }
  });
  auto [child, place] = group_->places[static_cast<size_t>(rank())];
  if (place == 0) group_->AddChild(child);
  auto split = std::make_unique<LocalCommunicator>(std::move(child), place);
  Leave();
  return split;
}

void LocalCommunicator::Abort(const std::string& why) noexcept { group_->Abort(why); }
void LocalCommunicator::Check() { group_->Check(); }

}  // namespace k3
