#include "server/load_summary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

namespace k3 {
namespace {

using ::testing::HasSubstr;

TEST(LoadSummaryTest, ShowsRatesOverTheInterval) {
  LoadSample before;
  before.prefill_tokens = 1000;
  before.engine.prompt_tokens = 7;  // counted on arrival: not a rate of work
  before.engine.generated_tokens = 100;
  before.engine.prefix_query_tokens = 500;
  before.engine.prefix_hit_tokens = 400;
  before.engine.preemptions = 4;
  LoadSample now = before;
  now.prefill_tokens = 6000;
  now.engine.running = 3;
  now.engine.waiting = 2;
  now.engine.prompt_tokens = 1000000;
  now.engine.generated_tokens = 350;
  now.engine.pages_used = 25;
  now.engine.pages_total = 200;
  now.engine.pages_cached = 9;
  now.engine.state_slots_used = 3;
  now.engine.state_slots_total = 4;
  now.engine.snapshots_used = 5;
  now.engine.snapshots_total = 16;
  now.engine.prefix_query_tokens = 1500;
  now.engine.prefix_hit_tokens = 650;
  now.engine.preemptions = 5;
  EXPECT_EQ(
      FormatLoadSummary(before, now, 10),
      "load: running 3, waiting 2, prefill 500.0 tokens/s, decode 25.0 tokens/s, pages 25/200 (12.5 %, cached 9), "
      "state slots 3/4 (75.0 %), snapshots 5/16, cache hits 25.0 % of 1000 prompt tokens, preemptions 1");
}

TEST(LoadSummaryTest, EmptyPoolsAndNoTimeAreNotADivision) {
  const std::string line = FormatLoadSummary(LoadSample(), LoadSample(), 0);
  EXPECT_THAT(line, HasSubstr("decode 0.0 tokens/s"));
  EXPECT_THAT(line, HasSubstr("pages 0/0 (0.0 %"));
}

TEST(LoadSummaryTest, LogsWhileBusyOnceWhenIdleThenNot) {
  std::atomic<int> running = 1;
  std::mutex mutex;
  std::vector<std::string> lines;
  const auto count = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    return lines.size();
  };
  LoadSummaryLogger logger(
      [&running] {
        LoadSample sample;
        sample.engine.running = running;
        return sample;
      },
      0.01,
      [&](const std::string& line) {
        const std::lock_guard<std::mutex> lock(mutex);
        lines.push_back(line);
      });
  while (count() < 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  running = 0;
  while (true) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (lines.back().find("running 0,") != std::string::npos) break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const size_t at_idle = count();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(count(), at_idle) << "an idle server must stay quiet";
}

}  // namespace
}  // namespace k3
