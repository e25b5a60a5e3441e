#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/process_link.h"
#include "engine/process_place.h"
#include "engine/rank_group.h"

namespace k3 {

// The processes of one server beside their collectives: who starts, what each can hold, steps out and results back, and
// the news that one has ended. The first process leads; the others know only it.
class ProcessGroup {
 public:
  // Comes together. `agreement` must be the same everywhere: version, model and layout as text.
  static absl::StatusOr<std::unique_ptr<ProcessGroup>> Join(const ProcessPlace& place, const std::string& agreement,
                                                            std::chrono::milliseconds patience);
  ~ProcessGroup();

  bool leads() const { return place_.process == 0; }
  const ProcessPlace& place() const { return place_; }

  // At the start, before Watch: every process gives its word, all get everybody's, by process.
  absl::StatusOr<std::vector<std::string>> Exchange(std::string_view own);

  // From now on messages are collected as they come, and the end of a peer is told at once, on a thread of this object.
  void Watch(std::function<void(const std::string& why)> on_lost);

  enum Kind : uint32_t { kWord = 1, kPlan, kScrub, kResult, kFailure, kEnd };
  // The leader to all others, or a follower to the leader.
  absl::Status Send(Kind kind, std::string_view bytes);
  // The next message of a process (a follower has only process 0). UNAVAILABLE when it has ended.
  absl::StatusOr<ProcessLink::Message> Next(int process);
  // Whether a message of it waits.
  bool Waits(int process);

 private:
  struct Peer {
    std::unique_ptr<ProcessLink> link;
    std::deque<ProcessLink::Message> inbox;  // guarded by mutex_
    absl::Status lost;                       // guarded by mutex_
    std::thread reader;
  };
  explicit ProcessGroup(ProcessPlace place) : place_(std::move(place)) {}
  Peer& peer(int process) { return peers_[leads() ? static_cast<size_t>(process - 1) : 0]; }
  void Read(size_t index);

  const ProcessPlace place_;
  std::vector<Peer> peers_;  // the leader: all others by number; others: the leader
  std::function<void(const std::string&)> on_lost_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ending_ = false;
};

// The steps of all processes to the leader's engine: its own ranks and, over the group, everybody else's.
class ProcessRunner final : public StepRunner {
 public:
  ProcessRunner(RankGroup& own, ProcessGroup& group) : own_(own), group_(group) {}
  int max_in_flight() const override { return own_.max_in_flight(); }
  absl::Status Submit(const StepPlan& plan) override;
  absl::Status Wait(StepResult* result) override;
  absl::Status Run(const StepPlan& plan, StepResult* result) override;
  void Scrub(int32_t data_rank, const std::vector<PageId>& pages, const std::vector<StateSlot>& slots) override;
  int32_t vocab_size() const override { return own_.vocab_size(); }

 private:
  RankGroup& own_;
  ProcessGroup& group_;
};

// The other side: runs what the leader sends until it says so or ends. OK when it said so.
absl::Status FollowLeader(RankGroup& own, ProcessGroup& group);

}  // namespace k3
