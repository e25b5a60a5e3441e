#include "server/commands/bench_runner.h"

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "absl/strings/str_format.h"

namespace k3 {
namespace {

constexpr auto kProgressInterval = std::chrono::milliseconds(200);

Clock::duration Duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// The records so far; client threads add, the runner waits.
class Collector {
 public:
  explicit Collector(int64_t total) { progress_.total = total; }

  void Add(RequestRecord record) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++progress_.done;
    if (!record.ok()) ++progress_.failed;
    progress_.output_tokens += record.output_tokens();
    records_.push_back(std::move(record));
    // Under the lock: the waiter may destroy this object as soon as it has seen the last record.
    changed_.notify_all();
  }

  void CountSent() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++progress_.sent;
  }

  // Until `time`, or until at most `in_flight` requests are under way. True when the second holds.
  bool WaitUntil(Clock::time_point time, int64_t in_flight) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_until(lock, time, [&] { return progress_.sent - progress_.done <= in_flight; });
  }

  BenchProgress progress() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return progress_;
  }

  std::vector<RequestRecord> Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::move(records_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  BenchProgress progress_;              // guarded by mutex_
  std::vector<RequestRecord> records_;  // guarded by mutex_
};

}  // namespace

std::string BenchLoad::Name() const {
  if (concurrency.has_value()) return absl::StrFormat("concurrency %d", *concurrency);
  if (!rate.has_value()) return "trace times";
  return std::isinf(*rate) ? "all at once" : absl::StrFormat("%g req/s", *rate);
}

std::vector<RequestRecord> RunBenchLoad(const BenchConfig& config, const BenchLoad& load, const Workload& workload,
                                        BenchClient& client,
                                        const std::function<void(const BenchProgress&)>& progress) {
  Collector collector(workload.size());
  const Clock::time_point start = Clock::now();
  const Clock::time_point end =
      config.duration_seconds.has_value() ? start + Duration(*config.duration_seconds) : Clock::time_point::max();
  const auto report = [&] {
    BenchProgress now = collector.progress();
    now.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    progress(now);
  };

  Clock::time_point due = start;
  for (int64_t i = 0; i < workload.size(); ++i) {
    BenchRequest request = workload.Make(i);  // before it is due: a long prompt takes a while to make
    if (load.concurrency.has_value()) {
      while (!collector.WaitUntil(Clock::now() + kProgressInterval, *load.concurrency - 1)) report();
      due = Clock::now();
    } else {
      due = load.rate.has_value() ? due + Duration(workload.PoissonGap(i, *load.rate))
                                  : start + Duration(request.arrival_seconds);
      if (due >= end) break;
      // In slices, to show progress. A sleep may end late; that shows as send lag.
      for (Clock::time_point now = Clock::now(); now < due; now = Clock::now()) {
        collector.WaitUntil(std::min(due, now + kProgressInterval), -1);
        report();
      }
    }
    if (Clock::now() >= end) break;
    collector.CountSent();
    client.Send(request, [&collector, due, paced = !load.concurrency.has_value()](RequestRecord record) {
      record.scheduled = paced ? due : record.sent;
      collector.Add(std::move(record));
    });
  }
  while (!collector.WaitUntil(Clock::now() + kProgressInterval, 0)) report();
  report();
  return collector.Take();
}

}  // namespace k3
