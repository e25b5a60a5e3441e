#include "engine/process_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "engine/socket_communicator.h"
#include "engine/step_wire.h"
#include "tests/parallel/rows_exchange.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;
constexpr auto kPatience = std::chrono::seconds(20);

int FreePort() {
  const auto listener = ProcessListener::Listen(0);
  return (*listener)->port();
}

ProcessPlace Place(int process, int processes, int port) {
  return {.process = process,
          .processes = processes,
          .local_process = process,
          .master_host = "127.0.0.1",
          .master_port = port};
}

TEST(StepWireTest, PlansAndResultsArriveAsTheyWere) {
  StepPlan plan;
  plan.ranks.resize(2);
  RankPlan& rank = plan.ranks[1];
  rank.tokens = {5, TokenOfRow(3)};
  rank.token_begin = {0, 2};
  rank.state_copies = {{StateSlot{1}, StateSlot{2}}};
  rank.page_copies = {{PageId{7}, PageId{8}}};
  rank.snapshots = {{1, StateSlot{4}}};
  rank.page_table = {1, 2, 3};
  rank.page_table_stride = 3;
  rank.sample_rows = {{.temperature = 0.5f, .uniform = 0.25f}};
  rank.logit_edits = {{.id = 9, .value = -1.5f}};
  rank.allowed_mask = {0xF0F0F0F0u};
  rank.max_top_logprobs = 4;
  const std::string bytes = EncodePlan(plan);
  StepPlan copy;
  ASSERT_TRUE(DecodePlan(bytes, &copy).ok());
  EXPECT_EQ(EncodePlan(copy), bytes);
  EXPECT_EQ(copy.ranks[1].tokens, rank.tokens);
  EXPECT_EQ(copy.ranks[1].logit_edits[0].value, -1.5f);
  for (size_t cut : {size_t{0}, size_t{3}, bytes.size() / 2, bytes.size() - 1}) {
    EXPECT_FALSE(DecodePlan(bytes.substr(0, cut), &copy).ok()) << cut;
  }

  StepResult result, other;
  result.ranks.resize(2);
  result.ranks[1] = {
      .token = {3}, .status = {SampleStatus::kOk}, .logprob = {-0.5f}, .top_ids = {}, .top_logprobs = {}};
  other.ranks.resize(2);
  other.ranks[0].token = {11};
  ASSERT_TRUE(DecodeResult(EncodeResult(result), &other).ok());
  EXPECT_EQ(other.ranks[0].token, std::vector<int32_t>{11});  // not of this sender
  EXPECT_EQ(other.ranks[1].token, std::vector<int32_t>{3});
}

TEST(ProcessGroupTest, ExchangesWordsAndTellsTheEndOfAPeerAtOnce) {
  const int port = FreePort();
  std::atomic<bool> may_end{false};
  std::vector<std::thread> followers;
  for (int process : {1, 2}) {
    followers.emplace_back([=, &may_end] {
      auto group = ProcessGroup::Join(Place(process, 3, port), "same", kPatience);
      ASSERT_TRUE(group.ok()) << group.status();
      const auto words = (*group)->Exchange("word " + std::to_string(process));
      ASSERT_TRUE(words.ok());
      EXPECT_EQ(*words, (std::vector<std::string>{"word 0", "word 1", "word 2"}));
      if (process == 2) return;  // this one dies
      while (!may_end) std::this_thread::yield();
    });
  }
  auto group = ProcessGroup::Join(Place(0, 3, port), "same", kPatience);
  ASSERT_TRUE(group.ok()) << group.status();
  ASSERT_TRUE((*group)->Exchange("word 0").ok());
  std::atomic<bool> told{false};
  std::string reason;
  (*group)->Watch([&](const std::string& why) {
    reason = why;
    told = true;
  });
  const auto start = std::chrono::steady_clock::now();
  while (!told && std::chrono::steady_clock::now() - start < kPatience) std::this_thread::yield();
  EXPECT_THAT(reason, HasSubstr("process 2 of 3 is lost"));
  EXPECT_FALSE((*group)->Next(2).ok());
  may_end = true;
  for (std::thread& thread : followers) thread.join();
}

TEST(ProcessGroupTest, RefusesAProcessThatWasStartedForSomethingElse) {
  const int port = FreePort();
  std::thread follower([=] {
    const auto group = ProcessGroup::Join(Place(1, 2, port), "2x1 ranks", kPatience);
    EXPECT_THAT(std::string(group.status().message()), HasSubstr("process 1 was started for something else"));
  });
  const auto group = ProcessGroup::Join(Place(0, 2, port), "1x2 ranks", kPatience);
  EXPECT_THAT(std::string(group.status().message()), HasSubstr("\"2x1 ranks\""));
  follower.join();
}

TEST(ProcessGroupTest, SaysHowManyCame) {
  const auto group = ProcessGroup::Join(Place(0, 3, FreePort()), "", std::chrono::milliseconds(100));
  EXPECT_THAT(std::string(group.status().message()), HasSubstr("only 1 of 3 processes came"));
  const auto alone = ProcessGroup::Join(Place(1, 2, FreePort()), "", std::chrono::milliseconds(100));
  EXPECT_THAT(std::string(alone.status().message()), HasSubstr("MASTER_ADDR"));
}

TEST(SocketCommunicatorTest, GivesTheSumsOfTheLocalOne) {
  const int port = FreePort();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([=] {
      const auto comm = SocketCommunicator::Join(rank, 4, port);
      std::vector<float> data = {0.1f * static_cast<float>(rank), 1e8f, static_cast<float>(rank)};
      comm->AllReduce(data.data(), 3, DType::kF32, nullptr);
      EXPECT_EQ(data[0], (0.1f * 0 + 0.1f * 1) + (0.1f * 2 + 0.1f * 3));
      EXPECT_EQ(data[2], 6);
      std::vector<float> all(4), out(1);
      const float own = static_cast<float>(rank);
      comm->AllGather(&own, all.data(), sizeof own, nullptr);
      EXPECT_EQ(all, (std::vector<float>{0, 1, 2, 3}));
      comm->ReduceScatter(all.data(), out.data(), 1, DType::kF32, nullptr);
      EXPECT_EQ(out[0], 4 * own);
      testing::CheckAllToAllRows(*comm);
      EXPECT_GT(comm->counters(Collective::kAllToAll).bytes, 0u);
      const auto pair = comm->Split(rank / 2, -rank);
      EXPECT_EQ(pair->size(), 2);
      EXPECT_EQ(pair->rank(), 1 - rank % 2);
      float sum = own;
      pair->AllReduce(&sum, 1, DType::kF32, nullptr);
      EXPECT_EQ(sum, rank < 2 ? 1 : 5);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(SocketCommunicatorTest, ALostRankEndsTheOthers) {
  const int port = FreePort();
  std::thread lost([=] { SocketCommunicator::Join(1, 2, port); });
  const auto comm = SocketCommunicator::Join(0, 2, port);
  lost.join();
  float value = 0;
  EXPECT_THROW(comm->AllReduce(&value, 1, DType::kF32, nullptr), DeviceError);
  EXPECT_THROW(comm->Check(), DeviceError);
}

}  // namespace
}  // namespace k3
