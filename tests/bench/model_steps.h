#pragma once

#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/cache/cache_storage.h"
#include "engine/step.h"

// What the benchmarks of whole models have in common.
namespace k3::bench {

using WallClock = std::chrono::steady_clock;
constexpr int32_t kPageSize = 64;

inline double SecondsSince(WallClock::time_point start) {
  return std::chrono::duration<double>(WallClock::now() - start).count();
}

inline void OrDie(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
}
template <typename T>
T OrDie(absl::StatusOr<T> value) {
  OrDie(value.status());
  return *std::move(value);
}

// Caches of the type that the device computes in.
inline CacheGeometry MakeGeometry(const Ops& ops, int32_t pages, int32_t slots) {
  CacheGeometry geometry;
  geometry.pages = pages;
  geometry.page_size = kPageSize;
  geometry.slots = slots;
  geometry.page_dtype = geometry.conv_dtype = ops.activation_dtype();
  return geometry;
}

// A step in which each sequence of each group computes `tokens` tokens behind `context` earlier ones. Contexts beyond
// the pool begin at its front again. `from_last`: the tokens are those that the step before draws.
inline StepPlan MakePlan(const std::vector<int32_t>& sequences_of_group, int32_t tokens, int32_t context,
                         int32_t pool_pages, bool from_last) {
  StepPlan step;
  for (const int32_t sequences : sequences_of_group) {
    RankPlan& plan = step.ranks.emplace_back();
    if (sequences == 0) continue;
    const int32_t pages = (context + tokens + kPageSize - 1) / kPageSize;
    plan.page_table_stride = pages;
    for (int32_t s = 0; s < sequences; ++s) {
      plan.token_begin.push_back(s * tokens);
      plan.context.push_back(context);
      plan.state_slot.push_back(s);
      for (int32_t p = 0; p < pages; ++p) plan.page_table.push_back((s * pages + p) % pool_pages);
      for (int32_t t = 0; t < tokens; ++t) {
        plan.tokens.push_back(from_last ? TokenOfRow(s) : 100 + (s * 31 + (context + t) * 7) % 3000);
        plan.sequence_of_token.push_back(s);
        plan.position.push_back(context + t);
      }
      plan.logits_row.push_back((s + 1) * tokens - 1);
      plan.sample_rows.push_back({.temperature = 1, .uniform = 0.37f});
    }
    plan.token_begin.push_back(sequences * tokens);
  }
  return step;
}

inline void CheckResult(const StepResult& result) {
  for (const RankResult& rank : result.ranks) {
    for (SampleStatus status : rank.status) {
      if (status != SampleStatus::kOk) throw std::runtime_error("a step gave non-finite logits");
    }
  }
}

}  // namespace k3::bench
