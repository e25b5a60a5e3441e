#include "server/grammar/mask_workers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <vector>

namespace k3 {
namespace {

TEST(MaskWorkersTest, EachJobIsDoneOnceByAWorkerOrLeftToItsOwner) {
  MaskWorkers workers(3);
  std::atomic<int> done{0};
  int left = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<std::shared_ptr<MaskWorkers::Job>> jobs;
    for (int i = 0; i < 20; ++i) {
      jobs.push_back(std::make_shared<MaskWorkers::Job>([&done] { ++done; }));
      workers.Post(jobs.back());
    }
    for (const auto& job : jobs) {
      const bool taken = workers.Take(*job);
      EXPECT_EQ(workers.Take(*job), taken) << "the answer does not change";
      left += taken ? 0 : 1;
    }
  }
  EXPECT_EQ(done + left, 200 * 20);
}

TEST(MaskWorkersTest, TakingWaitsForWhatRuns) {
  MaskWorkers workers(1);
  std::promise<void> began, go_on;
  bool finished = false;
  const auto job = std::make_shared<MaskWorkers::Job>([&] {
    began.set_value();
    go_on.get_future().wait();
    finished = true;
  });
  workers.Post(job);
  began.get_future().wait();
  std::thread other([&] { go_on.set_value(); });
  EXPECT_TRUE(workers.Take(*job));
  EXPECT_TRUE(finished);
  other.join();
}

TEST(MaskWorkersTest, WithoutThreadsAndAfterTheEndNothingRuns) {
  const auto job = std::make_shared<MaskWorkers::Job>([] { FAIL(); });
  {
    MaskWorkers none(0);
    none.Post(job);
    EXPECT_FALSE(none.Take(*job));
  }
  std::promise<void> began, go_on;
  const auto blocking = std::make_shared<MaskWorkers::Job>([&] {
    began.set_value();
    go_on.get_future().wait();
  });
  const auto waiting = std::make_shared<MaskWorkers::Job>([] { FAIL(); });
  auto workers = std::make_unique<MaskWorkers>(1);
  workers->Post(blocking);
  began.get_future().wait();
  workers->Post(waiting);
  EXPECT_FALSE(workers->Take(*waiting));
  go_on.set_value();
  workers.reset();
}

}  // namespace
}  // namespace k3
