#include "server/health.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/error_details.h"

namespace k3 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(HealthTest, LoadingRefusesWithItsProgress) {
  ServerHealth health;
  health.SetLoadPercent(41.6);
  const absl::Status status = health.Admission();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("42 %"));
  EXPECT_EQ(DetailsOf(status).reason, "loading");
  EXPECT_TRUE(DetailsOf(status).retry_after.has_value());
}

TEST(HealthTest, ListenersHearEveryChangeOnce) {
  ServerHealth health(std::chrono::seconds(1));
  std::vector<ServingState> seen;
  const int id = health.Subscribe([&](ServingState state) { seen.push_back(state); });
  health.SetServing();
  health.SetServing();
  EngineLoad load;
  load.seconds_since_step = 1.5;
  health.Observe(load);
  health.Observe(load);
  load.seconds_since_step = 0.1;
  health.Observe(load);
  health.StartDrain(Clock::duration::zero());
  health.SetServing();
  EXPECT_THAT(seen, ElementsAre(ServingState::kServing, ServingState::kStalled, ServingState::kServing,
                                ServingState::kDraining));
  health.Unsubscribe(id);
}

TEST(HealthTest, AFailedDeviceStalls) {
  ServerHealth health;
  health.SetServing();
  EngineLoad load;
  load.healthy = false;
  health.Observe(load);
  EXPECT_EQ(health.State(), ServingState::kStalled);
  EXPECT_EQ(DetailsOf(health.Admission()).reason, "stalled");
}

TEST(HealthTest, DrainTakesWorkUntilTheLagHasPassed) {
  ServerHealth health;
  health.SetServing();
  health.StartDrain(std::chrono::hours(1));
  EXPECT_FALSE(health.IsServing());
  EXPECT_TRUE(health.Admission().ok());
  ServerHealth other;
  other.SetServing();
  other.StartDrain(Clock::duration::zero());
  EXPECT_EQ(other.Admission().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(DetailsOf(other.Admission()).reason, "draining");
}

}  // namespace
}  // namespace k3
