#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "kernels/comm/communicator.h"

namespace k3::testing {

// One rank's part of a check of AllToAllRows over host memory: rank r sends (r + 2p) % 4 rows to rank p, each named by
// sender, receiver and place; what is not a row keeps its poison.
inline void CheckAllToAllRows(Communicator& comm) {
  constexpr int32_t kPoison = -77;
  constexpr int64_t kRows = 3;
  const int n = comm.size(), own = comm.rank();
  const auto count = [](int from, int to) { return (from + 2 * to) % 4; };
  const auto name = [](int from, int to, int64_t row) { return static_cast<int32_t>(from * 10000 + to * 100 + row); };
  std::vector<int32_t> in(static_cast<size_t>(n * kRows * 2), kPoison), out(in.size(), kPoison);
  std::vector<int32_t> sent, received(static_cast<size_t>(n), kPoison);
  for (int p = 0; p < n; ++p) {
    sent.push_back(count(own, p));
    for (int64_t row = 0; row < sent.back(); ++row) {
      in[static_cast<size_t>((p * kRows + row) * 2)] = name(own, p, row);
      in[static_cast<size_t>((p * kRows + row) * 2 + 1)] = -name(own, p, row);
    }
  }
  for (const bool counts : {true, false}) {
    std::fill(out.begin(), out.end(), kPoison);
    comm.AllToAllRows(in.data(), out.data(), kRows, 2 * sizeof(int32_t), sent.data(),
                      counts ? received.data() : nullptr, nullptr);
    for (int r = 0; r < n; ++r) {
      EXPECT_EQ(received[static_cast<size_t>(r)], count(r, own));
      for (int64_t row = 0; row < kRows; ++row) {
        const bool there = row < count(r, own);
        const size_t at = static_cast<size_t>((r * kRows + row) * 2);
        EXPECT_EQ(out[at], there ? name(r, own, row) : kPoison) << "rank " << own << " from " << r << " row " << row;
        EXPECT_EQ(out[at + 1], there ? -name(r, own, row) : kPoison);
      }
    }
  }
}

}  // namespace k3::testing
