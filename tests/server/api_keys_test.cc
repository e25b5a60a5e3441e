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
  for (const char* file : {"caf\xc3\xa9key\n", "good\ntwo words\n", "good\n\x01\x02\n"}) {  // no header can carry them
    EXPECT_EQ(ApiKeys::Load(Write(file)).status().code(), absl::StatusCode::kInvalidArgument) << file;
  }
  EXPECT_EQ(ApiKeys::Load("/nowhere/keys").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ApiKeysTest, AReloadHoldsForAllCopiesAndABadFileChangesNothing) {
  auto keys = ApiKeys::Load(Write("old\nkept\n"));
  ASSERT_TRUE(keys.ok());
  const ApiKeys copy = *keys;
  uint64_t before = 0;
  uint64_t after = 0;
  ASSERT_TRUE(copy.Check("Bearer kept", &before).ok());
  Write("new\nkept\n");
  ASSERT_TRUE(keys->Reload().ok());
  EXPECT_TRUE(copy.Check("Bearer new").ok());
  EXPECT_FALSE(copy.Check("Bearer old").ok());
  ASSERT_TRUE(copy.Check("Bearer kept", &after).ok());
  EXPECT_EQ(before, after);
  EXPECT_NE(before, 0u);
  ASSERT_TRUE(copy.Check("Bearer new", &after).ok());
  EXPECT_NE(before, after);
  Write("# nothing\n");
  EXPECT_FALSE(keys->Reload().ok());
  EXPECT_TRUE(copy.Check("Bearer new").ok());
}

}  // namespace
}  // namespace k3
