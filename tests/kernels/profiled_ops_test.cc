#include "kernels/profiled_ops.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace k3 {
namespace {

class ProfiledOpsTest : public testing::Test {
 protected:
  // One step as the executor runs it; whether it was the profile's last.
  bool Step() {
    if (ops_.TakeRequest()) ++stopped_;
    ops_.Measure("piece", ops_.stream(), [] {});
    return ops_.EndStep();
  }

  const std::shared_ptr<ProfileSwitch> switch_ = std::make_shared<ProfileSwitch>();
  ProfiledOps ops_{MakeCpuOps(), switch_};
  int stopped_ = 0;  // profiles that ended between steps
};

TEST_F(ProfiledOpsTest, MeasuresNothingUnasked) {
  EXPECT_FALSE(Step());
  EXPECT_FALSE(ops_.active());
  EXPECT_EQ(ops_.Result().steps, 0);
  EXPECT_FALSE(switch_->Stop().has_value());
}

TEST_F(ProfiledOpsTest, SoManySteps) {
  switch_->Start(2);
  EXPECT_TRUE(ops_.requested());
  EXPECT_FALSE(Step());
  EXPECT_FALSE(ops_.requested());
  EXPECT_TRUE(Step());
  EXPECT_FALSE(Step());
  const std::optional<ProfileTable> table = switch_->Stop();
  ASSERT_TRUE(table.has_value());
  EXPECT_EQ(table->steps, 2);
  ASSERT_EQ(table->lines.size(), 1u);
  EXPECT_EQ(table->lines[0].name, "piece");
  EXPECT_EQ(table->lines[0].calls, 2u);
  EXPECT_NE(table->Text().find("2 steps"), std::string::npos);
  EXPECT_FALSE(switch_->Stop().has_value()) << "it was told already";
}

TEST_F(ProfiledOpsTest, UntilStopped) {
  switch_->Start(ProfileSwitch::kUntilStopped);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(Step());
  EXPECT_TRUE(ops_.active());
  EXPECT_EQ(switch_->Stop()->steps, 3);
  EXPECT_TRUE(ops_.requested()) << "steps end one by one until the next one has taken notice";
  EXPECT_FALSE(Step());
  EXPECT_EQ(stopped_, 1);
  EXPECT_FALSE(ops_.active());
  EXPECT_EQ(ops_.Result().steps, 3);
}

TEST_F(ProfiledOpsTest, StoppedBeforeAnyStep) {
  switch_->Start(5);
  EXPECT_EQ(switch_->Stop()->steps, 0);
  EXPECT_FALSE(Step());
  EXPECT_EQ(stopped_, 0);
  EXPECT_FALSE(ops_.active());
}

TEST_F(ProfiledOpsTest, ANewStartGivesUpTheProfileThatRuns) {
  switch_->Start(5);
  EXPECT_FALSE(Step());
  ops_.Measure("of the old one", ops_.stream(), [] {});
  switch_->Start(2);
  EXPECT_FALSE(ops_.EndStep());  // of the old one, ended behind the call
  EXPECT_FALSE(Step());
  EXPECT_TRUE(Step());
  const std::optional<ProfileTable> table = switch_->Stop();
  EXPECT_EQ(table->steps, 2);
  ASSERT_EQ(table->lines.size(), 1u);
  EXPECT_EQ(table->lines[0].name, "piece");
}

}  // namespace
}  // namespace k3
