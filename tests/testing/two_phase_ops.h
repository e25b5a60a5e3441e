#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/forwarding_ops.h"

namespace k3::testing {

// An Ops that mixes attention residuals in two phases wherever there is a closed block, whatever is faster. Fails the
// test when a site reads a mix other than its own.
class TwoPhaseOps final : public ForwardingOps {
 public:
  explicit TwoPhaseOps(std::unique_ptr<Ops> inner) : ForwardingOps(std::move(inner)) {}

  AttnResForm ChooseAttnResForm(int64_t, int64_t, int32_t, int32_t) const override { return AttnResForm::kTwoPhases; }

  void AttnResClosed(const AttnResClosedParams& params, Stream stream) override {
    // A mix that nobody has asked for yet would have been made in vain.
    EXPECT_EQ(used_, closed_.sites);
    closed_ = params;
    used_ = 0;
    groups.push_back({params.closed, params.sites});
    inner_->AttnResClosed(params, stream);
  }
  void AttnResMix(const AttnResMixParams& params, Stream stream) override {
    if (params.live_block > 0) {
      EXPECT_EQ(params.mixes, closed_.mixes);
      EXPECT_EQ(params.site, used_++);
      EXPECT_EQ(params.mixes_settled, params.site > 0);
      EXPECT_EQ(params.query, closed_.queries[std::min(params.site, kAttnResSites - 1)]);
      EXPECT_EQ(params.live_block, closed_.closed);
      EXPECT_EQ(params.bank, closed_.bank);
      EXPECT_EQ(params.block_stride, closed_.block_stride);
      EXPECT_EQ(params.rows, closed_.rows);
      EXPECT_EQ(params.cols, closed_.cols);
    } else {
      EXPECT_EQ(params.mixes, nullptr);
    }
    inner_->AttnResMix(params, stream);
  }

  struct Group {
    int32_t closed;
    int32_t sites;
    bool operator==(const Group&) const = default;
  };
  std::vector<Group> groups;  // in the order in which they came

 private:
  AttnResClosedParams closed_;
  int32_t used_ = 0;  // sites of closed_ that have come
};

}  // namespace k3::testing
