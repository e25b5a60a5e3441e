#include "server/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

namespace k3 {
namespace {

TEST(WorkerPoolTest, RunsEverythingBeforeItEnds) {
  std::atomic<int> ran{0};
  {
    WorkerPool pool(2);
    for (int i = 0; i < 1000; ++i) pool.Post([&] { ++ran; });
  }
  EXPECT_EQ(ran, 1000);
}

TEST(WorkerPoolTest, AFullQueueRefuses) {
  std::promise<void> gate;
  std::promise<void> started;
  WorkerPool pool(1);  // ends first: its task uses the promises
  pool.Post([&] {
    started.set_value();
    gate.get_future().wait();
  });
  started.get_future().wait();
  EXPECT_TRUE(pool.TryPost([] {}, 1));
  EXPECT_FALSE(pool.TryPost([] {}, 1));
  gate.set_value();
}

TEST(WorkerPoolTest, OneThreadKeepsTheOrder) {
  std::vector<int> order;
  {
    WorkerPool pool(1);
    for (int i = 0; i < 100; ++i) pool.Post([&order, i] { order.push_back(i); });
  }
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

}  // namespace
}  // namespace k3
