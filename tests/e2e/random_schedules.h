#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tests/e2e/engine_harness.h"

namespace k3::testing {

// What the schedules of a run have met.
struct ScheduleTotals {
  uint64_t preemptions = 0;
  uint64_t hit_tokens = 0;
  uint64_t verified_hits = 0;
  int cancelled = 0;
  int overdue = 0;
  int64_t steps_ahead = 0;
};

// Everything that decides the answer to a request, as a key.
std::string AnswerKey(const TestRequest& request);

// One random schedule: requests with prefixes in common, of random lengths, priorities, sessions and deadlines, arrive
// at random steps of an engine with random budgets and small pools; some are cancelled, and some of those asked again.
// Every one must end exactly once, nothing may be left in the pools, and `check` sees each answer; `cut`: it was
// cancelled or overdue, so only its beginning counts.
void RunSchedule(TestModel& model, uint64_t seed, const StepMode& mode,
                 const std::function<void(const TestRequest&, const Outcome&, bool cut)>& check,
                 ScheduleTotals* totals);

// `schedules` of them, or as many as K3_EQUIVALENCE_SCHEDULES says, from K3_EQUIVALENCE_SEED or 1 on, up to the first
// failure (scripts/long_tests.sh). They must have met what they are for.
ScheduleTotals RunSchedules(TestModel& model, const StepMode& mode, int64_t schedules,
                            const std::function<void(const TestRequest&, const Outcome&, bool cut)>& check);

}  // namespace k3::testing
