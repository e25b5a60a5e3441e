#pragma once

#include <atomic>

#include "engine/request.h"

namespace k3 {

// What the prompts of one client's request have in common: it was let in as a whole, and its time limits count from its
// own start and for all of them. Made by GenerationService::OpenBatch.
struct RequestBatch {
  explicit RequestBatch(Clock::time_point begin) : arrival(begin) {}
  const Clock::time_point arrival;
  std::atomic<bool> left_queue{false};  // a prompt of it has had a slot: the others wait for their own company
};

}  // namespace k3
