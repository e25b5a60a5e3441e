#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>

#include "tests/e2e/random_schedules.h"

// The same answer always, bit for bit: random requests under random schedules, budgets and pools on a real model, with
// preemption, cancels, deadlines, prefix hits and poisoned free memory, against each request alone.
// tests/parallel/schedule_test.cc does the same over several ranks.
namespace k3::testing {
namespace {

ScheduleTotals RunAgainstAlone(const StepMode& mode) {
  const std::unique_ptr<TestModel> model = TestModel::Micro();
  std::map<std::string, Outcome> alone;
  return RunSchedules(*model, mode, 400, [&](const TestRequest& request, const Outcome& outcome, bool cut) {
    const auto [it, fresh] = alone.try_emplace(AnswerKey(request));
    if (fresh) it->second = RunAlone(*model, request);
    ExpectSameAnswer(outcome, it->second, cut);
  });
}

TEST(EquivalenceTest, RandomSchedules) { EXPECT_EQ(RunAgainstAlone({}).steps_ahead, 0); }

// Steps planned while one is in flight, fed with tokens that only the device knows, decodes padded to fixed sizes.
TEST(EquivalenceTest, RandomSchedulesPlannedAheadAndPadded) {
  EXPECT_GT(RunAgainstAlone({.plan_ahead = true, .decode_sizes = {1, 2, 4, 8}}).steps_ahead, 2000);
}

}  // namespace
}  // namespace k3::testing
