#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "engine/step.h"

namespace k3 {

// Steps and results as bytes, between processes of one build on machines of one kind: plain copies of the arrays. What
// arrives is checked for its length only, since both ends are this program (ProcessLink makes sure).
std::string EncodePlan(const StepPlan& plan);
absl::Status DecodePlan(std::string_view bytes, StepPlan* plan);

std::string EncodeResult(const StepResult& result);
// Takes over what the sender has filled in: ranks without rows stay as they are.
absl::Status DecodeResult(std::string_view bytes, StepResult* result);

struct ScrubOrder {
  int32_t data_rank = 0;
  std::vector<PageId> pages;
  std::vector<StateSlot> slots;
};
std::string EncodeScrub(const ScrubOrder& order);
absl::Status DecodeScrub(std::string_view bytes, ScrubOrder* order);

}  // namespace k3
