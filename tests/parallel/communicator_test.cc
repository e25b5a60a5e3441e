#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "kernels/comm/local_communicator.h"
#include "kernels/core/error.h"
#include "kernels/core/tree_sum.h"
#include "tests/parallel/rows_exchange.h"

namespace k3 {
namespace {

using testing::CheckAllToAllRows;
using ::testing::HasSubstr;
using Ranks = std::vector<std::unique_ptr<Communicator>>;

void OnEach(Ranks& ranks, const std::function<void(Communicator&)>& work) {
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&] { work(*rank); });
  for (std::thread& thread : threads) thread.join();
}

std::vector<float> Values(int rank, int64_t count) {
  std::mt19937 random(static_cast<uint32_t>(rank) * 977 + 5);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// The order that every communicator promises, written out.
float Sum(const std::vector<float>& parts) {
  std::vector<float> level = parts;
  while (level.size() > 1) {
    std::vector<float> next;
    for (size_t i = 0; i < level.size(); i += 2)
      next.push_back(i + 1 < level.size() ? level[i] + level[i + 1] : level[i]);
    level = next;
  }
  return level[0];
}

class LocalCommunicatorTest : public ::testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }
  Ranks ranks = LocalCommunicator::MakeGroup(GetParam());
  std::vector<float> Expected(int64_t begin, int64_t count, int64_t of) const {
    std::vector<float> sums;
    for (int64_t i = begin; i < begin + count; ++i) {
      std::vector<float> parts;
      for (int r = 0; r < size(); ++r) parts.push_back(Values(r, of)[static_cast<size_t>(i)]);
      sums.push_back(Sum(parts));
    }
    return sums;
  }
};
INSTANTIATE_TEST_SUITE_P(Sizes, LocalCommunicatorTest, ::testing::Values(1, 2, 3, 4, 7, 16));

TEST_P(LocalCommunicatorTest, AllReduceSumsInTheFixedTree) {
  for (const int64_t count : {1, 5, 1000}) {
    const std::vector<float> expected = Expected(0, count, count);
    OnEach(ranks, [&](Communicator& comm) {
      for (int again = 0; again < 3; ++again) {
        std::vector<float> data = Values(comm.rank(), count);
        comm.AllReduce(data.data(), count, DType::kF32, nullptr);
        EXPECT_EQ(data, expected);
      }
    });
  }
}

TEST_P(LocalCommunicatorTest, ReduceScatterGivesEachRankItsBlockOfTheSameSums) {
  constexpr int64_t kCount = 33;
  OnEach(ranks, [&](Communicator& comm) {
    const std::vector<float> in = Values(comm.rank(), kCount * size());
    std::vector<float> out(kCount);
    comm.ReduceScatter(in.data(), out.data(), kCount, DType::kF32, nullptr);
    EXPECT_EQ(out, Expected(kCount * comm.rank(), kCount, kCount * size()));
  });
}

TEST_P(LocalCommunicatorTest, AllGatherAllToAllAndBroadcast) {
  const int n = size();
  OnEach(ranks, [&](Communicator& comm) {
    std::vector<int> out(static_cast<size_t>(n)), gathered(static_cast<size_t>(n));
    out[static_cast<size_t>(comm.rank())] = 100 + comm.rank();
    comm.AllGather(&out[static_cast<size_t>(comm.rank())], out.data(), sizeof(int), nullptr);  // in place
    for (int r = 0; r < n; ++r) EXPECT_EQ(out[static_cast<size_t>(r)], 100 + r);
    for (int r = 0; r < n; ++r) out[static_cast<size_t>(r)] = comm.rank() * 100 + r;
    comm.AllToAll(out.data(), gathered.data(), sizeof(int), nullptr);
    for (int r = 0; r < n; ++r) EXPECT_EQ(gathered[static_cast<size_t>(r)], r * 100 + comm.rank());
    int value = comm.rank() * 7;
    comm.Broadcast(&value, sizeof value, n - 1, nullptr);
    EXPECT_EQ(value, (n - 1) * 7);
  });
}

TEST_P(LocalCommunicatorTest, AllToAllRowsBringsTheRowsThatAreThereAndTouchesNoOthers) {
  const int n = size();
  OnEach(ranks, [&](Communicator& comm) { CheckAllToAllRows(comm); });
  OnEach(ranks, [&](Communicator& comm) {
    const std::vector<int32_t> sent(static_cast<size_t>(n), 3);
    std::vector<char> in(static_cast<size_t>(n) * 2), out(in.size());
    EXPECT_THROW(comm.AllToAllRows(in.data(), out.data(), 2, 1, sent.data(), nullptr, nullptr), DeviceError);
  });
}

TEST_P(LocalCommunicatorTest, SplitsByColorInTheOrderOfKeys) {
  OnEach(ranks, [&](Communicator& comm) {
    const auto half = comm.Split(comm.rank() % 2, -comm.rank());
    const int same = (size() + 1 - comm.rank() % 2) / 2;
    EXPECT_EQ(half->size(), same);
    EXPECT_EQ(half->rank(), same - 1 - comm.rank() / 2);
    float sum = 1;
    half->AllReduce(&sum, 1, DType::kF32, nullptr);
    EXPECT_EQ(sum, static_cast<float>(same));
  });
}

TEST_P(LocalCommunicatorTest, CountsWhatIsSent) {
  OnEach(ranks, [&](Communicator& comm) {
    std::vector<char> out(static_cast<size_t>(size()) * 10);
    comm.AllGather(out.data() + comm.rank() * 10, out.data(), 10, nullptr);
    const CommCounters& gathers = comm.counters(Collective::kAllGather);
    EXPECT_EQ(gathers.bytes, static_cast<uint64_t>(size() - 1) * 10);
    EXPECT_EQ(gathers.calls, 1u);
    EXPECT_GT(gathers.nanoseconds, 0u);
    // Rows by rank: rank r sends r + p of them to rank p, and tells everybody how many.
    constexpr size_t kRowBytes = 12;
    const int64_t rows = 2 * size();
    std::vector<char> in(static_cast<size_t>(size() * rows) * kRowBytes), got(in.size());
    std::vector<int32_t> sent, received(static_cast<size_t>(size()));
    uint64_t expected = 4 * static_cast<uint64_t>(size() - 1);
    for (int p = 0; p < size(); ++p) {
      sent.push_back(comm.rank() + p);
      if (p != comm.rank()) expected += static_cast<uint64_t>(sent.back()) * kRowBytes;
    }
    comm.AllToAllRows(in.data(), got.data(), rows, kRowBytes, sent.data(), received.data(), nullptr);
    const CommCounters& rows_sent = comm.counters(Collective::kAllToAll);
    EXPECT_EQ(rows_sent.bytes, expected);
    EXPECT_EQ(comm.bytes_sent(), gathers.bytes + expected);
  });
}

TEST(LocalCommunicatorFailureTest, AnAbortFreesWhoeverWaitsAndEndsTheSplitGroupsToo) {
  Ranks ranks = LocalCommunicator::MakeGroup(3);
  OnEach(ranks, [&](Communicator& comm) {
    const auto pair = comm.Split(comm.rank() == 2, 0);
    if (comm.rank() == 1) {
      comm.Abort("rank 1 lost its device");
      return;
    }
    float value = 0;
    try {
      (comm.rank() == 0 ? *pair : comm).AllReduce(&value, 1, DType::kF32, nullptr);
      ADD_FAILURE() << "nothing thrown on rank " << comm.rank();
    } catch (const DeviceError& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 1 lost its device"));
    }
    EXPECT_THROW(comm.Check(), DeviceError);
  });
}

TEST(LocalCommunicatorFailureTest, APeerThatDoesNotComeIsNamedAfterTheTimeout) {
  Ranks ranks = LocalCommunicator::MakeGroup(3, std::chrono::milliseconds(50));
  OnEach(ranks, [&](Communicator& comm) {
    if (comm.rank() == 1) return;
    float value = 0;
    try {
      comm.AllReduce(&value, 1, DType::kF32, nullptr);
      ADD_FAILURE() << "nothing thrown";
    } catch (const DeviceError& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 1 of 3 did not enter AllReduce within 50 ms"));
    }
  });
}

TEST(LocalCommunicatorFailureTest, CallsThatDoNotMatchAreAnErrorOnAllRanks) {
  Ranks ranks = LocalCommunicator::MakeGroup(2);
  OnEach(ranks, [&](Communicator& comm) {
    std::vector<float> values(4);
    EXPECT_THROW(comm.AllReduce(values.data(), 3 + comm.rank(), DType::kF32, nullptr), DeviceError);
  });
  Ranks others = LocalCommunicator::MakeGroup(2);
  OnEach(others, [&](Communicator& comm) {
    std::vector<float> values(4), out(4);
    if (comm.rank() == 0) {
      EXPECT_THROW(comm.AllReduce(values.data(), 1, DType::kF32, nullptr), DeviceError);
    } else {
      EXPECT_THROW(comm.AllGather(values.data(), out.data(), 1, nullptr), DeviceError);
    }
  });
}

TEST(TreeSumTest, ASubtreePerRankGivesTheBitsOfTheWholeTree) {
  constexpr int kLeaves = 16;
  constexpr int64_t kCount = 700;
  std::vector<std::vector<float>> leaves;
  for (int leaf = 0; leaf < kLeaves; ++leaf) leaves.push_back(Values(leaf, kCount));
  const auto sum = [&](const std::vector<std::vector<float>>& parts) {
    std::vector<float> out(kCount);
    TreeSum([&](int j) { return parts[static_cast<size_t>(j)].data(); }, static_cast<int>(parts.size()), 0, kCount,
            out.data());
    return out;
  };
  const std::vector<float> whole = sum(leaves);
  for (const int ranks : {2, 4, 8}) {
    std::vector<std::vector<float>> partial;
    for (int r = 0; r < ranks; ++r) {
      const int share = kLeaves / ranks;
      partial.push_back(sum({leaves.begin() + r * share, leaves.begin() + (r + 1) * share}));
    }
    EXPECT_EQ(sum(partial), whole);
  }
}

TEST(NullCommunicatorTest, AGroupOfOneHasItsResultAlready) {
  NullCommunicator comm;
  EXPECT_EQ(comm.size(), 1);
  float value = 3;
  comm.AllReduce(&value, 1, DType::kF32, nullptr);
  comm.AllGather(&value, &value, sizeof value, nullptr);
  EXPECT_EQ(value, 3);
  float other = 0;
  EXPECT_THROW(comm.AllGather(&value, &other, sizeof value, nullptr), DeviceError);
  EXPECT_EQ(comm.Split(0, 0)->size(), 1);
}

}  // namespace
}  // namespace k3
