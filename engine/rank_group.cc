#include "engine/rank_group.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/memory_plan.h"
#include "kernels/comm/local_communicator.h"
#include "kernels/core/check.h"

namespace k3 {

RankThreads::RankThreads(int count) : count_(count) {
  for (int i = 0; i < count && count > 1; ++i) threads_.emplace_back([this, i] { Loop(i); });
}

RankThreads::~RankThreads() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

absl::Status RankThreads::Run(const std::function<absl::Status(int)>& work) {
  if (count_ == 1) {
    const absl::Status status = Guarded(work, 0);
    if (!status.ok() && on_failure) on_failure(0, status);
    return status;
  }
  std::unique_lock lock(mutex_);
  K3_CHECK(busy_ == 0);
  work_ = &work;
  busy_ = size();
  first_failure_ = absl::OkStatus();
  ++round_;
  wake_.notify_all();
  done_.wait(lock, [this] { return busy_ == 0; });
  return first_failure_;
}

absl::Status RankThreads::Guarded(const std::function<absl::Status(int)>& work, int index) {
  try {
    return work(index);
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  } catch (...) {
    return absl::InternalError("a rank's thread threw");
  }
}

void RankThreads::Loop(int index) {
  uint64_t seen = 0;
  while (true) {
    const std::function<absl::Status(int)>* work;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
      if (stopping_) return;
      seen = round_;
      work = work_;
    }
    const absl::Status status = Guarded(*work, index);
    bool first = false;
    if (!status.ok()) {
      std::lock_guard lock(mutex_);
      first = first_failure_.ok();
      if (first) first_failure_ = status;
    }
    if (first && on_failure) on_failure(index, status);
    std::lock_guard lock(mutex_);
    if (--busy_ == 0) done_.notify_one();
  }
}

RankGroup::RankGroup(Options options)
    : options_(std::move(options)), ranks_(static_cast<size_t>(options_.local_ranks)), threads_(options_.local_ranks) {
  threads_.on_failure = [this](int local, const absl::Status& why) {
    Abort(absl::StrCat("rank ", rank_of(local), " failed: ", std::string(why.message())));
  };
}

RankGroup::~RankGroup() {
  if (watch_.joinable()) {
    {
      std::lock_guard lock(step_mutex_);
      ending_ = true;
    }
    step_wake_.notify_all();
    watch_.join();
  }
  // Communicators and device memory go on the threads that used them.
  static_cast<void>(threads_.Run([this](int local) {
    Rank& rank = ranks_[static_cast<size_t>(local)];
    rank.executor.reset();
    rank.model.reset();
    rank.loaded.reset();
    rank.data.reset();
    rank.tensor.reset();
    rank.world.reset();
    return absl::OkStatus();
  }));
}

absl::StatusOr<std::unique_ptr<RankGroup>> RankGroup::Create(Options options) {
  if (options.local_ranks == 0) options.local_ranks = options.layout.ranks();
  const int32_t ranks = options.layout.ranks();
  if (options.first_rank < 0 || options.first_rank + options.local_ranks > ranks) {
    return absl::InvalidArgumentError(absl::StrCat("ranks ", options.first_rank, " to ",
                                                   options.first_rank + options.local_ranks - 1,
                                                   " of this process are not all among the layout's ", ranks));
  }
  if (options.layout.expert_leaves != 0 && options.layout.expert_leaves % ranks != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.layout.expert_leaves, " groups of experts do not divide among ", ranks, " ranks"));
  }
  if (!options.make_world && options.local_ranks != ranks) {
    return absl::InvalidArgumentError(absl::StrCat("host memory connects the ranks of one process only, which has ",
                                                   options.local_ranks, " of ", ranks));
  }
  std::unique_ptr<RankGroup> group(new RankGroup(std::move(options)));
  if (!group->options_.make_world) {
    group->local_world_ = LocalCommunicator::MakeGroup(ranks, group->options_.timeout);
  }
  if (absl::Status status = group->threads_.Run([&](int local) { return group->Open(local); }); !status.ok()) {
    return status;
  }
  if (group->options_.step_timeout.count() > 0) group->watch_ = std::thread([raw = group.get()] { raw->WatchSteps(); });
  return group;
}

absl::Status RankGroup::Open(int local) {
  Rank& rank = ranks_[static_cast<size_t>(local)];
  const int number = rank_of(local);
  rank.ops = options_.make_ops(local);
  rank.ops->BindThread();
  Keep(options_.make_world ? options_.make_world(number, *rank.ops)
                           : std::move(local_world_[static_cast<size_t>(number)]),
       rank.world);
  Keep(rank.world->Split(layout().DataRank(number), layout().TensorRank(number)), rank.tensor);
  Keep(rank.world->Split(layout().TensorRank(number), layout().DataRank(number)), rank.data);
  return absl::OkStatus();
}

void RankGroup::Keep(std::unique_ptr<Communicator> made, std::unique_ptr<Communicator>& place) {
  std::lock_guard lock(communicators_mutex_);
  if (!aborted_.empty()) made->Abort(aborted_);
  place = std::move(made);
}

absl::Status RankGroup::Load(const std::string& dir, const ModelConfig& config, const LoadOptions& options) {
  return threads_.Run([&](int local) -> absl::Status {
    Rank& rank = ranks_[static_cast<size_t>(local)];
    const int number = rank_of(local);
    LoadOptions share = options;
    share.tensor_parallel_rank = layout().TensorRank(number);
    share.tensor_parallel_size = layout().tensor;
    share.expert_rank = layout().ExpertRank(number);
    share.expert_ranks = layout().ranks();
    share.expert_leaves = layout().LeavesPerRank();
    if (local > 0) {
      share.progress = nullptr;
      share.print_progress = false;
    }
    auto loaded = LoadWeights(dir, config, *rank.ops, share);
    if (!loaded.ok()) return loaded.status();
    rank.loaded = *std::move(loaded);
    rank.config = std::make_unique<ModelConfig>(RankConfig(rank.loaded->config, layout().tensor));
    const ParallelContext parallel{rank.tensor.get(), rank.data.get(), options_.transport};
    rank.model = std::make_unique<Model>(*rank.config, rank.loaded->weights, *rank.ops, parallel);
    return absl::OkStatus();
  });
}

absl::Status RankGroup::MakeExecutors(const StepBounds& bounds, const CacheGeometry& geometry,
                                      const ExecutorOptions& options) {
  return threads_.Run([&](int local) -> absl::Status {
    Rank& rank = ranks_[static_cast<size_t>(local)];
    ExecutorOptions own = options;
    if (local > 0) own.profile = nullptr;
    if (own.balance.has_value() && tensor_rank_of(local) != 0) own.balance->log = nullptr;  // the same epochs
    auto executor = Executor::Create(*rank.model, *rank.ops, bounds, geometry, std::move(own));
    if (!executor.ok()) return executor.status();
    rank.executor = *std::move(executor);
    return absl::OkStatus();
  });
}

absl::StatusOr<WarmUpReport> RankGroup::WarmUp() {
  WarmUpReport first;
  const absl::Status status = threads_.Run([&](int local) -> absl::Status {
    auto report = ranks_[static_cast<size_t>(local)].executor->WarmUp();
    if (report.ok() && local == 0) first = *report;
    return report.status();
  });
  if (!status.ok()) return status;
  return first;
}

StepRunner& RankGroup::runner() {
  if (layout().ranks() == 1) return executor();
  return *this;
}

void RankGroup::Abort(const std::string& why) noexcept {
  std::lock_guard lock(communicators_mutex_);
  if (aborted_.empty()) aborted_ = why;
  for (Rank& rank : ranks_) {
    for (Communicator* group : {rank.world.get(), rank.tensor.get(), rank.data.get()}) {
      if (group != nullptr) group->Abort(why);
    }
  }
}

CollectiveTotals RankGroup::collectives() const {
  CollectiveTotals totals;
  totals.ranks = local_ranks();
  for (const Rank& rank : ranks_) {
    for (const Communicator* group : {rank.world.get(), rank.tensor.get(), rank.data.get()}) {
      if (group == nullptr) continue;
      for (int kind = 0; kind < kCollectives; ++kind) {
        const CommCounters& counters = group->counters(static_cast<Collective>(kind));
        CollectiveTotals::Kind& total = totals.kinds[static_cast<size_t>(kind)];
        total.calls += counters.calls;
        total.bytes += counters.bytes;
        total.seconds += static_cast<double>(counters.nanoseconds) * 1e-9;
      }
    }
  }
  return totals;
}

void RankGroup::AddCollectiveTimes(const ProfileTable& table) {
  for (const ProfileLine& line : table.lines) {
    for (int kind = 0; kind < kCollectives; ++kind) {
      if (line.name != Name(static_cast<Collective>(kind))) continue;
      world().AddTime(static_cast<Collective>(kind), static_cast<uint64_t>(line.milliseconds * 1e6));
    }
  }
}

absl::Status RankGroup::RunStep(const std::function<absl::Status(int)>& work) {
  if (options_.step_timeout.count() == 0) return threads_.Run(work);
  {
    std::lock_guard lock(step_mutex_);
    step_deadline_ = std::chrono::steady_clock::now() + options_.step_timeout;
  }
  step_wake_.notify_all();
  const absl::Status status = threads_.Run(work);
  std::lock_guard lock(step_mutex_);
  step_deadline_.reset();
  return status;
}

void RankGroup::WatchSteps() {
  std::unique_lock lock(step_mutex_);
  while (!ending_) {
    if (!step_deadline_.has_value()) {
      step_wake_.wait(lock);
      continue;
    }
    const auto deadline = *step_deadline_;
    step_wake_.wait_until(lock, deadline);
    if (ending_ || step_deadline_ != deadline || std::chrono::steady_clock::now() < deadline) continue;
    step_deadline_.reset();
    lock.unlock();
    Abort(absl::StrCat("a step has not ended within ", options_.step_timeout.count() / 1000,
                       " s: a rank does not come to a collective, or its device hangs"));
    lock.lock();
  }
}

absl::Status RankGroup::Submit(const StepPlan& plan) {
  return RunStep([&](int local) { return ranks_[static_cast<size_t>(local)].executor->Submit(plan); });
}

absl::Status RankGroup::Wait(StepResult* result) {
  const absl::Status status = RunStep([&](int local) {
    Rank& rank = ranks_[static_cast<size_t>(local)];
    const absl::Status waited = rank.executor->Wait(&rank.result);
    if (waited.ok()) rank.world->Check();  // what an ended communicator left behind is no result
    return waited;
  });
  if (!status.ok()) return status;
  // A group's ranks have drawn the same tokens; the first one's results count.
  result->ranks.resize(static_cast<size_t>(layout().data));
  for (int local = 0; local < local_ranks(); ++local) {
    if (tensor_rank_of(local) != 0) continue;
    const size_t group = static_cast<size_t>(data_rank_of(local));
    std::swap(result->ranks[group], ranks_[static_cast<size_t>(local)].result.ranks[group]);
  }
  return absl::OkStatus();
}

absl::Status RankGroup::Run(const StepPlan& plan, StepResult* result) {
  if (absl::Status status = Submit(plan); !status.ok()) return status;
  return Wait(result);
}

void RankGroup::Scrub(int32_t data_rank, const std::vector<PageId>& pages, const std::vector<StateSlot>& slots) {
  const absl::Status status = threads_.Run([&](int local) -> absl::Status {
    if (data_rank_of(local) == data_rank) {
      ranks_[static_cast<size_t>(local)].executor->Scrub(data_rank, pages, slots);
    }
    return absl::OkStatus();
  });
  if (!status.ok()) throw DeviceError(std::string(status.message()));
}

}  // namespace k3
