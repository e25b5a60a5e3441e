#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/executor.h"
#include "engine/model/parallel.h"
#include "engine/model/weights_loader.h"

namespace k3 {

// Threads, one a rank of this process, that do the same thing together. A rank that fails ends the communication of
// all, so that none waits for it. A single rank works on the caller's thread.
class RankThreads {
 public:
  explicit RankThreads(int count);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  int size() const { return count_; }
  // What to tell when a rank has failed: called once for each failure, on the rank's thread, before Run returns.
  std::function<void(int index, const absl::Status& why)> on_failure;

  // Runs `work(index)` on every thread and waits for all. Exceptions become INTERNAL. Of several failures the first in
  // time counts: the others follow from it.
  absl::Status Run(const std::function<absl::Status(int)>& work);

 private:
  void Loop(int index);
  // `work(index)`; what it throws as a status.
  static absl::Status Guarded(const std::function<absl::Status(int)>& work, int index);

  const int count_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  const std::function<absl::Status(int)>* work_ = nullptr;  // guarded by mutex_, like all below
  uint64_t round_ = 0;
  int busy_ = 0;
  bool stopping_ = false;
  absl::Status first_failure_;
  std::vector<std::thread> threads_;
};

// All ranks of this process: devices, shares of the weights, models, executors and the communicators between them. To
// the engine it is one StepRunner; a step's plan holds a part for each data-parallel group, and every rank of a group
// runs its group's part. The ranks keep in step through their collectives alone.
class RankGroup final : public StepRunner {
 public:
  struct Options {
    ParallelLayout layout;
    ExpertTransport transport = ExpertTransport::kAllGather;
    int first_rank = 0;   // of this process
    int local_ranks = 0;  // 0: all
    // The device of local rank i, called on the rank's own thread.
    std::function<std::unique_ptr<Ops>(int local)> make_ops;
    // The communicator over all ranks, called on the rank's own thread. Null: threads of this process over host memory.
    std::function<std::unique_ptr<Communicator>(int rank, Ops& ops)> make_world;
    std::chrono::milliseconds timeout = std::chrono::minutes(5);  // of the threads' communicator
    // A step that takes longer ends all communication: somebody does not come to a collective. 0: no limit.
    std::chrono::milliseconds step_timeout{0};
  };
  static absl::StatusOr<std::unique_ptr<RankGroup>> Create(Options options);
  ~RankGroup() override;

  const ParallelLayout& layout() const { return options_.layout; }
  int local_ranks() const { return static_cast<int>(ranks_.size()); }

  // Each step below runs on all ranks at once and needs the one before.
  // Every rank's share of the weights. `options` needs no shares; its progress is that of the first local rank.
  absl::Status Load(const std::string& dir, const ModelConfig& config, const LoadOptions& options);
  // Work on every local rank, on its own thread; to check or measure models.
  absl::Status ForEach(const std::function<absl::Status(int local)>& work) { return threads_.Run(work); }
  // The first local rank gets all options, the others all but its profile.
  absl::Status MakeExecutors(const StepBounds& bounds, const CacheGeometry& geometry,
                             const ExecutorOptions& options = {});
  // Executor::WarmUp of all ranks, which do the same at the same time. The first one's report.
  absl::StatusOr<WarmUpReport> WarmUp();

  Ops& ops(int local = 0) { return *ranks_[static_cast<size_t>(local)].ops; }
  const Model& model(int local = 0) const { return *ranks_[static_cast<size_t>(local)].model; }
  const LoadedModel& loaded(int local = 0) const { return *ranks_[static_cast<size_t>(local)].loaded; }
  Executor& executor(int local = 0) { return *ranks_[static_cast<size_t>(local)].executor; }
  Communicator& world(int local = 0) { return *ranks_[static_cast<size_t>(local)].world; }
  int rank_of(int local) const { return options_.first_rank + local; }
  int data_rank_of(int local) const { return layout().DataRank(rank_of(local)); }
  int tensor_rank_of(int local) const { return layout().TensorRank(rank_of(local)); }

  // What the engine drives: this object, or the executor itself where there is only one rank.
  StepRunner& runner();

  // Ends all communication; every rank fails at its next or present collective.
  void Abort(const std::string& why) noexcept;

  // Of the local ranks. From any thread.
  CollectiveTotals collectives() const;
  // What a profile of the first rank's steps has measured, for `collectives`.
  void AddCollectiveTimes(const ProfileTable& table);

  // StepRunner.
  int max_in_flight() const override { return ranks_[0].executor->max_in_flight(); }
  absl::Status Submit(const StepPlan& plan) override;
  absl::Status Wait(StepResult* result) override;
  absl::Status Run(const StepPlan& plan, StepResult* result) override;
  void Scrub(int32_t data_rank, const std::vector<PageId>& pages, const std::vector<StateSlot>& slots) override;
  int32_t vocab_size() const override { return static_cast<int32_t>(model().config().vocab_size); }

 private:
  // In the order in which they must live.
  struct Rank {
    std::unique_ptr<Ops> ops;
    std::unique_ptr<Communicator> world;
    std::unique_ptr<Communicator> tensor;
    std::unique_ptr<Communicator> data;
    std::unique_ptr<LoadedModel> loaded;
    std::unique_ptr<ModelConfig> config;  // the rank's share
    std::unique_ptr<Model> model;
    std::unique_ptr<Executor> executor;
    StepResult result;
  };

  explicit RankGroup(Options options);
  absl::Status Open(int local);
  // Puts a communicator where Abort finds it.
  void Keep(std::unique_ptr<Communicator> made, std::unique_ptr<Communicator>& place);
  // RankThreads::Run of a step's half, watched.
  absl::Status RunStep(const std::function<absl::Status(int)>& work);
  void WatchSteps();

  const Options options_;
  std::mutex communicators_mutex_;                          // guards the pointers to communicators, and:
  std::string aborted_;                                     // why, if so
  std::vector<std::unique_ptr<Communicator>> local_world_;  // handed to the ranks when they open
  std::vector<Rank> ranks_;
  std::mutex step_mutex_;
  std::condition_variable step_wake_;
  std::optional<std::chrono::steady_clock::time_point> step_deadline_;  // guarded by step_mutex_, like the next
  bool ending_ = false;
  RankThreads threads_;
  std::thread watch_;
};

}  // namespace k3
