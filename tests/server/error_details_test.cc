#include "server/error_details.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace k3 {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

TEST(ErrorDetailsTest, TravelWithTheStatus) {
  ErrorDetails details;
  details.reason = "why";
  details.numbers = {{"a", "1"}};
  details.fields = {{"x.y", "bad \xFF byte"}};
  details.preconditions = {{"t", "s", "d"}};
  details.quotas = {{"queue", "full"}};
  details.resource = ErrorDetails::Resource{"model", "m"};
  details.retry_after = absl::Milliseconds(1500);
  const ErrorDetails back = DetailsOf(WithDetails(absl::InternalError("e"), details));
  EXPECT_EQ(back.reason, "why");
  EXPECT_THAT(back.numbers, ElementsAre(Pair("a", "1")));
  ASSERT_EQ(back.fields.size(), 1u);
  EXPECT_EQ(back.fields[0].path, "x.y");
  EXPECT_EQ(back.fields[0].description, "bad \xEF\xBF\xBD byte");
  EXPECT_EQ(back.preconditions[0].subject, "s");
  EXPECT_EQ(back.quotas[0].description, "full");
  EXPECT_EQ(back.resource->name, "m");
  EXPECT_EQ(back.retry_after, absl::Milliseconds(1500));
}

TEST(ErrorDetailsTest, AbsentDetailsAreEmpty) {
  EXPECT_EQ(DetailsOf(absl::InternalError("e")).reason, "");
  EXPECT_FALSE(DetailsOf(absl::OkStatus()).retry_after.has_value());
}

TEST(ErrorDetailsTest, ExcerptsAreShortValidAndWithoutControls) {
  EXPECT_EQ(Excerpt("a\nb\x01"
                    "c"),
            "a b c");
  EXPECT_EQ(Excerpt("caf\xC3"), "caf\xEF\xBF\xBD");
  EXPECT_EQ(Excerpt(std::string(1000, 'x'), 4), "xxxx...");
}

}  // namespace
}  // namespace k3
