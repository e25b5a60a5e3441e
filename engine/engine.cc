#include "engine/engine.h"

#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

constexpr double kLeastRetrySeconds = 0.05;
constexpr double kMostRetrySeconds = 120;  // clients ignore longer hints
constexpr double kUnknownRetrySeconds = 1;

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

StepStats CountTokens(const StepPlan& plan) {
  StepStats stats;
  stats.groups = static_cast<int32_t>(plan.ranks.size());
  for (const RankPlan& rank : plan.ranks) {
    stats.most_tokens = std::max(stats.most_tokens, rank.num_tokens());
    stats.tokens += rank.num_tokens();
    stats.sequences += rank.num_sequences();
    for (int32_t s = 0; s < rank.num_sequences(); ++s) {
      const int32_t count = rank.token_begin[static_cast<size_t>(s) + 1] - rank.token_begin[static_cast<size_t>(s)];
      if (count > 1) stats.prefill_tokens += count;
    }
  }
  return stats;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(EngineConfig config, StepRunner& runner,
                                                       EngineObserver* observer) {
  if (absl::Status status = config.Resolve(); !status.ok()) return status;
  if (config.vocab_size != runner.vocab_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("vocab_size is ", config.vocab_size, ", the model has ", runner.vocab_size()));
  }
  return std::unique_ptr<Engine>(new Engine(std::move(config), runner, observer));
}

Engine::Engine(EngineConfig config, StepRunner& runner, EngineObserver* observer)
    : config_(std::move(config)), runner_(runner), observer_(observer), scheduler_(config_, observer) {
  scheduler_.FillLoad(&load_);
  thread_ = std::thread([this] { Loop(); });
}

Engine::~Engine() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    admits_ = false;
  }
  wake_.notify_one();
  thread_.join();
}

absl::Status Engine::Refuse(absl::Status status, double retry_after_seconds) const {
  if (retry_after_seconds > 0) {
    const double bounded = std::clamp(retry_after_seconds, kLeastRetrySeconds, kMostRetrySeconds);
    status.SetPayload(kRetryAfterPayload, absl::Cord(absl::StrCat(std::llround(bounded * 1000))));
  }
  if (observer_ != nullptr) observer_->OnRejected(status);
  return status;
}

absl::StatusOr<RequestId> Engine::Submit(std::unique_ptr<Request> request) {
  if (absl::Status status = CheckRequest(config_, *request); !status.ok()) return Refuse(std::move(status), 0);
  absl::Status refused;
  double retry_after = 0;
  RequestId id = 0;
  {
    std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    // A burst that finds free slots does not wait longer than a step, so it must not fill the queue.
    const int32_t free_slots =
        std::max(0, std::min(config_.max_num_seqs, config_.state_slots * config_.data_parallel) - load_.running);
    const int32_t waiting = std::max(0, inbox_submits_ + queued_ - free_slots);
    if (!healthy_) {
      refused = absl::UnavailableError("the engine has failed");
    } else if (!admits_) {
      refused = absl::UnavailableError("the engine is shutting down");
      retry_after = kUnknownRetrySeconds;
    } else if (waiting >= config_.max_queue) {
      refused = absl::ResourceExhaustedError(
          absl::StrCat("the queue is full: ", waiting, " requests wait, max_queue is ", config_.max_queue));
      retry_after = estimator_.QueueSeconds() / std::max(waiting, 1);
      if (retry_after <= 0) retry_after = kUnknownRetrySeconds;
    } else if (request->deadline.has_value()) {
      const double left = Seconds(*request->deadline - now);
      const double needed = estimator_.SecondsNeeded(*request);
      if (left <= needed) {
        refused = absl::ResourceExhaustedError(absl::StrCat("the deadline cannot be met: ", std::max(left, 0.0),
                                                            " s are left, at least ", needed, " s are needed now"));
        // With the queue gone it may do; a deadline that an idle engine could not meet either has to grow by the rest.
        retry_after = std::max({estimator_.QueueSeconds(), needed - left, kLeastRetrySeconds});
      }
    }
    if (refused.ok()) {
      id = next_id_.fetch_add(1, std::memory_order_relaxed);
      if (!has_work_) {
        has_work_ = true;
        progress_at_ = now;
      }
      ++inbox_submits_;
      inbox_.push_back({Command::Kind::kSubmit, id, 0, now, std::move(request)});
    }
  }
  if (!refused.ok()) return Refuse(std::move(refused), retry_after);
  wake_.notify_one();
  return id;
}

void Engine::Post(Command command) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    inbox_.push_back(std::move(command));
  }
  wake_.notify_one();
}

void Engine::Cancel(RequestId id) { Post({Command::Kind::kCancel, id, 0, {}, nullptr}); }

void Engine::StopChoice(RequestId id, int32_t choice) { Post({Command::Kind::kStopChoice, id, choice, {}, nullptr}); }

void Engine::FlushCache() { Post({Command::Kind::kFlush, 0, 0, {}, nullptr}); }

void Engine::StopAdmission() {
  std::lock_guard lock(mutex_);
  admits_ = false;
}

EngineLoad Engine::Load() const {
  std::lock_guard lock(mutex_);
  EngineLoad load = load_;
  load.waiting += inbox_submits_;
  load.healthy = healthy_;
  load.seconds_since_step = has_work_ ? Seconds(Clock::now() - progress_at_) : 0;
  return load;
}

bool Engine::Drain(Clock::duration timeout) {
  std::unique_lock lock(mutex_);
  admits_ = false;
  if (idle_.wait_for(lock, timeout, [this] { return !has_work_; })) return true;
  cut_off_ = true;
  wake_.notify_one();
  idle_.wait(lock, [this] { return !has_work_; });
  return false;
}

void Engine::PublishLoad() {
  EngineLoad load;
  scheduler_.FillLoad(&load);
  if (load.routing.alarms > routing_alarms_) {
    spdlog::warn(
        "balance of experts: more than 5 % of a layer's choices were changed; it is routed exactly for now "
        "({} times since the start)",
        load.routing.alarms);
    routing_alarms_ = load.routing.alarms;
  }
  const bool lives = scheduler_.HasWork();
  std::lock_guard lock(mutex_);
  load_ = load;
  queued_ = scheduler_.backlog().queued;
  has_work_ = lives || inbox_submits_ > 0;
  if (!has_work_) idle_.notify_all();
}

void Engine::Apply(Command& command) {
  const Clock::time_point now = Clock::now();
  switch (command.kind) {
    case Command::Kind::kSubmit:
      scheduler_.Submit(command.id, std::move(command.request), command.arrival);
      break;
    case Command::Kind::kCancel:
      scheduler_.Cancel(command.id, absl::CancelledError("the request was cancelled"), now);
      break;
    case Command::Kind::kStopChoice:
      scheduler_.StopChoice(command.id, command.choice, now);
      break;
    case Command::Kind::kFlush:
      scheduler_.FlushCache();
      break;
  }
}

bool Engine::ServeInbox(bool planned) {
  bool stopping = false, cut_off = false;
  {
    std::unique_lock lock(mutex_);
    if (!planned) {
      const auto something = [this] { return !inbox_.empty() || stopping_ || cut_off_; };
      const std::optional<Clock::time_point> deadline = scheduler_.NextDeadline();
      if (deadline.has_value()) {
        wake_.wait_until(lock, *deadline, something);
      } else {
        wake_.wait(lock, something);
      }
    }
    commands_.swap(inbox_);
    queued_ += inbox_submits_;
    load_.waiting += std::exchange(inbox_submits_, 0);
    stopping = stopping_;
    cut_off = std::exchange(cut_off_, false);
  }
  for (Command& command : commands_) Apply(command);
  const bool changed = !commands_.empty();
  commands_.clear();
  if (failed_) {
    // Accepted just before the failure became known.
    scheduler_.FailAll(absl::InternalError("the engine has failed"), Clock::now());
  } else if (stopping || cut_off) {
    AbandonFlights();
    scheduler_.FailAll(absl::UnavailableError("the engine is shutting down"), Clock::now());
  }
  if (changed || stopping || cut_off) PublishLoad();
  return !stopping;
}

void Engine::Fail(const absl::Status& status) {
  failed_ = true;
  finished_ = started_;  // whatever is still in flight is lost
  spdlog::error("engine: step failed, the device is lost: {}", status.ToString());
  {
    std::lock_guard lock(mutex_);
    healthy_ = false;
  }
  scheduler_.FailAll(absl::InternalError("the engine has failed"), Clock::now());
  PublishLoad();
}

template <typename Call>
absl::Status Engine::Guarded(const char* what, Call&& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat(what, " threw: ", error.what()));
  } catch (...) {
    return absl::InternalError(absl::StrCat(what, " threw"));
  }
}

bool Engine::StartStep() {
  Flight& flight = flights_[started_ % kFlights];
  flight.start = Clock::now();
  if (!scheduler_.PlanStep(flight.start, &flight.plan)) return false;
  PublishLoad();  // who was admitted shows at once, however long the step takes
  flight.stats = CountTokens(flight.plan);
  flight.run = Clock::now();
  ++started_;
  const absl::Status status = Guarded("the step runner", [&] { return runner_.Submit(flight.plan); });
  if (!status.ok()) Fail(status);
  return true;
}

void Engine::FinishStep() {
  Flight& flight = flights_[finished_ % kFlights];
  const absl::Status status = Guarded("the step runner", [&] { return runner_.Wait(&result_); });
  if (!status.ok()) return Fail(status);
  const Clock::time_point ran = Clock::now();
  ++finished_;
  scheduler_.CommitStep(flight.plan, result_, ran);
  if (scheduler_.TakeScrub(&scrub_)) {
    const absl::Status scrubbed = Guarded("scrubbing", [&] {
      for (size_t rank = 0; rank < scrub_.size(); ++rank) {
        if (!scrub_[rank].empty()) runner_.Scrub(static_cast<int32_t>(rank), scrub_[rank].pages, scrub_[rank].slots);
      }
      return absl::OkStatus();
    });
    if (!scrubbed.ok()) return Fail(scrubbed);
  }
  const Clock::time_point end = Clock::now();
  // Steps that overlap share the time: each counts from the end of the one before.
  flight.stats.seconds = Seconds(end - std::max(flight.start, last_end_));
  flight.stats.run_seconds = std::min(Seconds(ran - std::max(flight.run, last_ran_)), flight.stats.seconds);
  last_ran_ = ran;
  last_end_ = end;
  if (observer_ != nullptr) observer_->OnStep(flight.stats);
  PublishLoad();
  std::lock_guard lock(mutex_);
  progress_at_ = end;
  estimator_.OnStep(flight.stats, scheduler_.backlog(), load_, end);
}

void Engine::AbandonFlights() {
  for (; finished_ < started_; ++finished_) {
    const absl::Status status = Guarded("the step runner", [&] { return runner_.Wait(&result_); });
    if (!status.ok()) return Fail(status);
  }
}

bool Engine::Step() {
  if (failed_) return false;
  const uint64_t room = static_cast<uint64_t>(std::clamp<int>(runner_.max_in_flight(), 1, kFlights));
  const auto may_start = [&] {
    return started_ == finished_ || (started_ - finished_ < room && scheduler_.CanPlanAhead());
  };
  const bool started = may_start() && StartStep();
  if (failed_) return true;
  if (started_ == finished_) return false;
  // The inbox is served before the next step is planned; with room for it nothing is waited for yet.
  if (!(started && may_start())) FinishStep();
  return true;
}

void Engine::Loop() {
  pthread_setname_np(pthread_self(), "k3-engine");
  bool planned = false;
  while (ServeInbox(planned)) {
    planned = Step();
    if (!planned) PublishLoad();  // deadlines may have ended requests
  }
}

}  // namespace k3
