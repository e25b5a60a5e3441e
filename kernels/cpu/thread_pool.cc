#include "kernels/cpu/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>
#include <string>

namespace k3 {
namespace {

constexpr int kTaskBits = 24;
constexpr uint64_t kTaskMask = (uint64_t{1} << kTaskBits) - 1;
// How long a thread spins before it sleeps or yields. A pause takes 10 to 140 cycles, so the clock decides, not a
// count.
constexpr std::chrono::microseconds kSpinTime{50};
constexpr int kPausesPerLook = 32;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `done` holds or kSpinTime has passed; says which.
template <typename Done>
bool SpinUntil(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (done()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// Path of this process in a cgroup hierarchy ("" is cgroup v2), from lines "id:controllers:path".
std::string CgroupPath(const std::string& controller) {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::stringstream controllers(line.substr(first + 1, second - first - 1));
    std::string path = line.substr(second + 1);
    if (controller.empty() && second == first + 1) return path;
    for (std::string name; std::getline(controllers, name, ',');) {
      if (name == controller) return path;
    }
  }
  return "/";
}

// The CPUs that quota / period amount to, rounded up; 0 without a limit.
int QuotaCpus(double quota, double period) {
  if (quota <= 0 || period <= 0) return 0;
  return std::max(1, static_cast<int>((quota + period - 1) / period));
}

// The tightest limit on the way from the process's group to the root. Inside a container the path of the host may not
// exist; the walk then ends at the mount point, which is the container's own group.
template <typename ReadLimit>
int TightestLimit(const std::string& mount, std::string path, ReadLimit read) {
  int limit = 0;
  while (true) {
    const int here = read(mount + path);
    if (here > 0) limit = limit == 0 ? here : std::min(limit, here);
    const size_t slash = path.find_last_of('/');
    if (path.empty() || slash == std::string::npos) return limit;
    path.resize(slash);
  }
}

int CgroupCpus() {
  const int v2 = TightestLimit("/sys/fs/cgroup", CgroupPath(""), [](const std::string& dir) {
    std::ifstream file(dir + "/cpu.max");
    std::string quota;
    double period = 0;
    if (!(file >> quota >> period) || quota == "max") return 0;
    return QuotaCpus(std::atof(quota.c_str()), period);
  });
  const int v1 = TightestLimit("/sys/fs/cgroup/cpu", CgroupPath("cpu"), [](const std::string& dir) {
    std::ifstream quota_file(dir + "/cpu.cfs_quota_us"), period_file(dir + "/cpu.cfs_period_us");
    double quota = 0, period = 0;
    if (!(quota_file >> quota) || !(period_file >> period)) return 0;
    return QuotaCpus(quota, period);
  });
  return v1 > 0 && v2 > 0 ? std::min(v1, v2) : std::max(v1, v2);
}

}  // namespace

int UsableCpus() {
  int cpus = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) cpus = CPU_COUNT(&mask);
  const int quota = CgroupCpus();
  if (quota > 0) cpus = std::min(cpus, quota);
  return std::max(cpus, 1);
}

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { Work(i); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  loops_.fetch_add(1);
  loops_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(int64_t tasks, Call call, const void* body) {
  done_.store(0, std::memory_order_relaxed);
  call_.store(call, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  const uint64_t loop = (ticket_.load(std::memory_order_relaxed) >> (2 * kTaskBits)) + 1;
  ticket_.store(loop << (2 * kTaskBits) | static_cast<uint64_t>(tasks) << kTaskBits, std::memory_order_release);
  // Sequentially consistent with the worker's announcement below: either it sees this loop, or we see it asleep.
  loops_.fetch_add(1);
  if (sleeping_.load() > 0) loops_.notify_all();
  TakeTasks(0);
  const auto done = [&] { return done_.load(std::memory_order_acquire) == tasks; };
  while (!SpinUntil(done)) std::this_thread::yield();
}

void ThreadPool::TakeTasks(int thread) {
  while (true) {
    // Looked at before it is taken from, so that idle spinning does not run the task field over.
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if ((ticket & kTaskMask) >= ((ticket >> kTaskBits) & kTaskMask)) break;
    ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    const uint64_t task = ticket & kTaskMask;
    if (task >= ((ticket >> kTaskBits) & kTaskMask)) break;
    // The loop cannot end before this task is done, hence call_ and body_ are this loop's.
    call_.load(std::memory_order_relaxed)(body_.load(std::memory_order_relaxed), static_cast<int64_t>(task), thread);
    done_.fetch_add(1, std::memory_order_release);
  }
}

void ThreadPool::Work(int thread) {
  uint32_t seen = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (!SpinUntil([&] { return loops_.load(std::memory_order_acquire) != seen; })) {
      sleeping_.fetch_add(1);
      loops_.wait(seen);
      sleeping_.fetch_sub(1);
    }
    seen = loops_.load(std::memory_order_acquire);
    TakeTasks(thread);
  }
}

}  // namespace k3
