#pragma once

#include <cstdint>

#include "kernels/comm/communicator.h"

namespace k3 {

// tensor x data ranks. Rank r is place (r % tensor) of group (r / tensor): the ranks of a group compute the same
// sequences, each with its share of heads, widths and vocabulary; different groups compute different sequences. Experts
// are spread over all ranks.
struct ParallelLayout {
  int32_t tensor = 1;
  int32_t data = 1;
  // Groups of experts whose sums are kept apart until they meet in one fixed tree, so that fewer ranks give the bits of
  // `expert_leaves` ranks; a multiple of ranks(). 0: one group a rank. For tests of equality, at the price of memory
  // and time.
  int32_t expert_leaves = 0;

  int32_t ranks() const { return tensor * data; }
  int32_t TensorRank(int32_t rank) const { return rank % tensor; }
  int32_t DataRank(int32_t rank) const { return rank / tensor; }
  // The experts' order over ranks puts groups side by side first, as the sums do: over groups, then within one.
  int32_t ExpertRank(int32_t rank) const { return TensorRank(rank) * data + DataRank(rank); }
  int32_t LeavesPerRank() const { return expert_leaves > ranks() ? expert_leaves / ranks() : 1; }
};

// How tokens reach the experts of other groups.
enum class ExpertTransport : uint8_t {
  kAllGather,  // all-gather and reduce-scatter: every rank sees all tokens
  kAllToAll,   // padded all-to-all, rank-major: a token goes once to each rank whose experts it chose; sums in the
              // fixed tree everywhere. Over NCCL the padding travels too: what it saves there is the experts' rows only
};

// What one rank's model talks over. The communicators outlive the model.
struct ParallelContext {
  Communicator* tensor = nullptr;  // the ranks of this group
  Communicator* data = nullptr;    // the ranks at the same place of all groups
  ExpertTransport transport = ExpertTransport::kAllGather;

  int32_t tensor_size() const { return tensor == nullptr ? 1 : tensor->size(); }
  int32_t data_size() const { return data == nullptr ? 1 : data->size(); }
  int32_t tensor_rank() const { return tensor == nullptr ? 0 : tensor->rank(); }
  int32_t data_rank() const { return data == nullptr ? 0 : data->rank(); }
};

}  // namespace k3
