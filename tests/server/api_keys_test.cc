#include "server/api_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "server/error_details.h"

namespace k3 {
namespace {

std::string Write(const std::string& text) {
  const std::string path = ::testing::TempDir() + "/k3serve_api_keys";
  std::ofstream(path) << text;
  return path;
}

TEST(ApiKeysTest, NoKeysAskForNothing) {
  const ApiKeys keys;
  EXPECT_FALSE(keys.required());
  EXPECT_TRUE(keys.Check("").ok());
}

TEST(ApiKeysTest, KeysOfTheFileAreKnown) {
  const auto keys = ApiKeys::Load(Write("# team\n\n first \nsecond\n"));
  ASSERT_TRUE(keys.ok());
  EXPECT_TRUE(keys->required());
  EXPECT_TRUE(keys->Check("Bearer first").ok());
  EXPECT_TRUE(keys->Check("bearer second").ok());
  EXPECT_EQ(DetailsOf(keys->Check("")).reason, "missing_api_key");
  for (const char* wrong : {"Bearer firs", "Bearer first ", "Bearer", "first", "Basic first", "Bearer # team"}) {
    EXPECT_EQ(keys->Check(wrong).code(), absl::StatusCode::kUnauthenticated) << wrong;
    EXPECT_EQ(DetailsOf(keys->Check(wrong)).reason, "invalid_api_key") << wrong;
  }
}

TEST(ApiKeysTest, AFileWithoutKeysIsAnError) {
  EXPECT_EQ(ApiKeys::Load(Write("# nothing\n")).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ApiKeys::Load("/nowhere/keys").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace k3
