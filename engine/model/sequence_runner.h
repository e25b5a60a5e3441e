#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/model/model.h"

namespace k3 {

// Runs one sequence through a model without scheduler or sampling: for `verify`, the start-up self-check and tests.
// Owns one state slot, the pages, and a workspace for `max_chunk` tokens a call. Throws DeviceError like the ops.
class SequenceRunner {
 public:
  SequenceRunner(const Model& model, Ops& ops, int64_t max_context, int64_t max_chunk, int32_t page_size = 64);
  ~SequenceRunner();

  // Back to an empty sequence with a zeroed state.
  void Reset();
  int64_t length() const { return length_; }

  // Appends tokens (at most max_chunk) and returns the logits of the packed rows `rows` of this call, [rows, V] on the
  // host. `probe` as in Model::Forward.
  std::vector<float> Append(std::span<const int32_t> tokens, std::span<const int32_t> rows,
                            RoutingProbe* probe = nullptr);

  // With several groups: takes part, without tokens, in a call of another group's Append with `rows` tokens.
  void LendExperts(int64_t rows);
  // Called with the number of tokens before each forward pass of Append: for whoever tells the other groups.
  std::function<void(int64_t)> before_forward;

  CacheStorage& cache() { return cache_; }

 private:
  const Model& model_;
  Ops& ops_;
  int64_t max_chunk_;
  Workspace workspace_;
  CacheStorage cache_;
  std::vector<int32_t> page_table_;
  int32_t* inputs_ = nullptr;  // device staging for ids
  size_t input_capacity_ = 0;  // int32 elements
  int64_t length_ = 0;
};

}  // namespace k3
