#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <memory>

namespace k3 {
namespace {

TEST(ThreadPoolTest, RunsEveryTaskOnceInThousandsOfLoops) {
  for (int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (int64_t loop = 0; loop < 3000; ++loop) {
      const int64_t tasks = loop % 37;
      std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
      std::atomic<int> bad_thread{0};
      pool.For(tasks, [&](int64_t task, int thread) {
        runs[static_cast<size_t>(task)].fetch_add(1);
        if (thread < 0 || thread >= threads) bad_thread.fetch_add(1);
      });
      for (const std::atomic<int>& count : runs) ASSERT_EQ(count.load(), 1);
      ASSERT_EQ(bad_thread.load(), 0);
    }
  }
}

TEST(ThreadPoolTest, WorkersWakeAfterAPause) {
  ThreadPool pool(3);
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // longer than any spinning
    std::atomic<int64_t> sum{0};
    pool.For(100, [&](int64_t task, int) { sum.fetch_add(task); });
    EXPECT_EQ(sum.load(), 4950);
  }
}

TEST(ThreadPoolTest, SeveralPoolsRunAtOnce) {
  std::vector<std::thread> callers;
  std::atomic<int> failures{0};
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      ThreadPool pool(2);
      for (int loop = 0; loop < 500; ++loop) {
        std::atomic<int64_t> sum{0};
        pool.For(16, [&](int64_t task, int) { sum.fetch_add(task); });
        if (sum.load() != 120) failures.fetch_add(1);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(failures.load(), 0);
}

TEST(ThreadPoolTest, UsableCpusFollowTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_GE(UsableCpus(), 1);
  EXPECT_LE(UsableCpus(), CPU_COUNT(&before));
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &before)) {
      CPU_SET(cpu, &one);
      break;
    }
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(UsableCpus(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

}  // namespace
}  // namespace k3
