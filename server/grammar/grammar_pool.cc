#include "server/grammar/grammar_pool.h"

#include <cstdint>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

using Clock = std::chrono::steady_clock;

absl::Status TooSlow(std::chrono::milliseconds limit) {
  return absl::InvalidArgumentError(
      absl::StrCat("takes more than ", limit.count() / 1000.0, " seconds to compile: it is too large or too deep"));
}

absl::Status Overloaded() { return absl::ResourceExhaustedError("too many grammars wait to be compiled"); }

}  // namespace

struct GrammarPool::Shared {
  // Ordered by cost, then by arrival.
  using Line = std::set<std::tuple<double, uint64_t, std::string>>;
  struct Job {
    GrammarNode root;
    double cost = 0;
    uint64_t number = 0;
    Clock::time_point deadline;
    std::vector<Done> waiters;
    bool started = false;
  };
  // A compiled grammar, or why there is none.
  struct Entry {
    std::string key;
    Result result;
    size_t bytes;
  };

  Shared(Options options_in, std::unique_ptr<GrammarEngine> engine_in)
      : options(options_in), engine(std::move(engine_in)) {}

  // With the lock held.
  void Remember(const std::string& key, const Result& result) {
    if (const auto old = index.find(key); old != index.end()) {
      bytes -= old->second->bytes;
      entries.erase(old->second);
      index.erase(old);
    }
    entries.push_front({key, result, key.size() + 512 + (result.ok() ? (*result)->bytes() : 0)});
    index[key] = entries.begin();
    bytes += entries.front().bytes;
    while (entries.size() > 1 && (bytes > options.cache_bytes || entries.size() > options.cache_entries)) {
      bytes -= entries.back().bytes;
      index.erase(entries.back().key);
      entries.pop_back();
    }
  }

  void Finish(const std::string& key, const Result& result) {
    std::vector<Done> waiters;
    {
      std::lock_guard lock(mutex);
      Remember(key, result);
      if (const auto job = jobs.find(key); job != jobs.end()) {
        waiters = std::move(job->second.waiters);
        jobs.erase(job);
      }
    }
    for (const Done& done : waiters) done(result);
  }

  void Work(bool slow) {
    Line& line = slow ? slow_line : quick_line;
    std::unique_lock lock(mutex);
    while (true) {
      wake.wait(lock, [&] { return stopping || !line.empty(); });
      if (stopping) break;
      const std::string key = std::get<std::string>(*line.begin());
      line.erase(line.begin());
      const auto job = jobs.find(key);
      if (job == jobs.end()) continue;  // gave up waiting
      job->second.started = true;
      // The engine gives up by itself, in processor time; this is for one that does not.
      job->second.deadline = Clock::now() + 2 * options.time_limit;
      const GrammarNode root = job->second.root;
      lock.unlock();
      const std::chrono::milliseconds quick = root.HasForeign() ? options.foreign_limit : options.quick_limit;
      Result result = engine->Compile(root, slow ? options.time_limit : quick);
      if (result.ok() && (*result)->bytes() > options.max_bytes) {
        result = absl::InvalidArgumentError(
            absl::StrCat("needs ", (*result)->bytes() >> 20, " MiB when compiled; at most ", options.max_bytes >> 20));
      }
      const bool late = result.status().code() == absl::StatusCode::kDeadlineExceeded;
      lock.lock();
      if (late && !slow) {
        MoveToSlow(key, &lock);
        continue;
      }
      if (late) result = TooSlow(options.time_limit);
      lock.unlock();
      Finish(key, result);
      lock.lock();
    }
    --running;
    ended.notify_all();
  }

  // With the lock held, which is let go meanwhile where those who wait are told that the line is too long.
  void MoveToSlow(const std::string& key, std::unique_lock<std::mutex>* lock) {
    const auto job = jobs.find(key);
    if (job == jobs.end()) return;  // nobody waits for it any more
    if (slow_line.size() < options.max_slow_waiting) {
      job->second.started = false;
      job->second.deadline = Clock::now() + options.time_limit;
      slow_line.emplace(job->second.cost, job->second.number, key);
      wake.notify_all();
      watch.notify_one();
      return;
    }
    const std::vector<Done> waiters = std::move(job->second.waiters);
    jobs.erase(job);
    lock->unlock();
    for (const Done& done : waiters) done(Overloaded());
    lock->lock();
  }

  // Ends what has waited too long.
  void Watch() {
    std::unique_lock lock(mutex);
    while (!stopping) {
      std::optional<Clock::time_point> next;
      std::vector<std::pair<std::string, bool>> late;
      const Clock::time_point now = Clock::now();
      for (const auto& [key, job] : jobs) {
        if (job.deadline <= now) {
          late.emplace_back(key, job.started);
        } else if (!next.has_value() || job.deadline < *next) {
          next = job.deadline;
        }
      }
      if (!late.empty()) {
        lock.unlock();
        for (const auto& [key, started] : late) Expire(key, started);
        lock.lock();
        continue;
      }
      if (next.has_value()) {
        watch.wait_until(lock, *next);
      } else {
        watch.wait(lock);
      }
    }
    --running;
    ended.notify_all();
  }

  void Expire(const std::string& key, bool started) {
    if (started) return Finish(key, TooSlow(options.time_limit));
    // Its turn never came: others held the threads, which says nothing about this one.
    std::vector<Done> waiters;
    {
      std::lock_guard lock(mutex);
      const auto job = jobs.find(key);
      if (job == jobs.end()) return;
      waiters = std::move(job->second.waiters);
      const std::tuple<double, uint64_t, std::string> place{job->second.cost, job->second.number, key};
      quick_line.erase(place);
      slow_line.erase(place);
      jobs.erase(job);
    }
    for (const Done& done : waiters) done(Overloaded());
  }

  const Options options;
  const std::unique_ptr<GrammarEngine> engine;

  std::mutex mutex;  // guards all below
  std::condition_variable wake;
  std::condition_variable watch;
  std::condition_variable ended;
  bool stopping = false;
  int running = 0;
  Line quick_line, slow_line;
  uint64_t next_number = 0;
  std::unordered_map<std::string, Job> jobs;
  std::list<Entry> entries;  // latest use first
  std::unordered_map<std::string, std::list<Entry>::iterator> index;
  size_t bytes = 0;
};

GrammarPool::GrammarPool(Options options, std::unique_ptr<GrammarEngine> engine)
    : shared_(std::make_shared<Shared>(options, std::move(engine))) {
  shared_->running = options.quick_threads + options.slow_threads + 1;
  for (int i = 0; i < options.quick_threads + options.slow_threads; ++i) {
    std::thread([shared = shared_, slow = i >= options.quick_threads] { shared->Work(slow); }).detach();
  }
  std::thread([shared = shared_] { shared->Watch(); }).detach();
}

GrammarPool::~GrammarPool() { Stop(); }

void GrammarPool::Stop() {
  std::unordered_map<std::string, Shared::Job> jobs;
  {
    std::unique_lock lock(shared_->mutex);
    shared_->stopping = true;
    shared_->wake.notify_all();
    shared_->watch.notify_all();
    shared_->ended.wait_for(lock, std::chrono::seconds(2), [&] { return shared_->running == 0; });
    jobs.swap(shared_->jobs);
  }
  for (auto& [key, job] : jobs) {
    for (const Done& done : job.waiters) done(absl::UnavailableError("the server is stopping"));
  }
}

void GrammarPool::Get(const GrammarNode& root, Done done) {
  std::string key;
  root.AppendKey(&key);
  std::optional<Result> result;
  {
    std::lock_guard lock(shared_->mutex);
    if (const auto found = shared_->index.find(key); found != shared_->index.end()) {
      shared_->entries.splice(shared_->entries.begin(), shared_->entries, found->second);
      result = found->second->result;
    } else if (const auto job = shared_->jobs.find(key); job != shared_->jobs.end()) {
      if (job->second.waiters.size() < shared_->options.max_waiters) {
        job->second.waiters.push_back(std::move(done));
      } else {
        result = absl::ResourceExhaustedError("too many requests wait for this grammar");
      }
    } else if (shared_->stopping) {
      result = absl::UnavailableError("the server is stopping");
    } else {
      const double cost = root.Cost();
      const bool slow = cost > shared_->options.quick_cost;
      Shared::Line& line = slow ? shared_->slow_line : shared_->quick_line;
      if (line.size() >= (slow ? shared_->options.max_slow_waiting : shared_->options.max_waiting)) {
        result = Overloaded();
      } else {
        Shared::Job& added = shared_->jobs[key];
        added.root = root;
        added.cost = cost;
        added.number = shared_->next_number++;
        added.deadline = Clock::now() + shared_->options.time_limit;
        added.waiters.push_back(std::move(done));
        line.emplace(cost, added.number, key);
        shared_->wake.notify_all();
        shared_->watch.notify_one();
      }
    }
  }
  if (result.has_value()) done(*std::move(result));
}

size_t GrammarPool::cached_bytes() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->bytes;
}

}  // namespace k3
