#include "server/model_name.h"

#include <gtest/gtest.h>

#include <filesystem>

namespace k3 {
namespace {

TEST(ModelNameTest, TheFoldersName) {
  EXPECT_EQ(ModelNameOf("configs/models/tiny-k3"), "tiny-k3");
  EXPECT_EQ(ModelNameOf("/srv/models/tiny-k3/"), "tiny-k3");
  EXPECT_EQ(ModelNameOf("/srv/models/tiny-k3/."), "tiny-k3");
  EXPECT_EQ(ModelNameOf("/srv/models/x/../tiny-k3"), "tiny-k3");
  EXPECT_EQ(ModelNameOf("."), std::filesystem::current_path().filename().string());
  EXPECT_EQ(ModelNameOf("/"), "model");
}

TEST(ModelNameTest, TheHubsCacheNamesFoldersAfterCommits) {
  EXPECT_EQ(ModelNameOf("/root/hub/models--moonshotai--Kimi-K3/snapshots/0a1b2c"), "moonshotai/Kimi-K3");
  EXPECT_EQ(ModelNameOf("/root/hub/models--moonshotai--Kimi-K3/snapshots/0a1b2c/"), "moonshotai/Kimi-K3");
  EXPECT_EQ(ModelNameOf("models--gpt2/snapshots/0a1b2c"), "gpt2");
  EXPECT_EQ(ModelNameOf("models--a--b--c/snapshots/0"), "a/b--c");
  EXPECT_EQ(ModelNameOf("/srv/snapshots/tiny-k3"), "tiny-k3");
  EXPECT_EQ(ModelNameOf("models--/snapshots/0"), "0");
}

}  // namespace
}  // namespace k3
