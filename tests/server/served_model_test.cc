#include "server/served_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/testing/log_capture.h"
#include "tests/testing/paths.h"

namespace k3 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::StatusOr<SamplingDefaults> Load(const std::string& text) {
  const std::string dir = ::testing::TempDir() + "/k3serve_generation_config";
  std::filesystem::create_directories(dir);
  std::ofstream(dir + "/generation_config.json") << text;
  return LoadSamplingDefaults(dir);
}

TEST(ServedModelTest, TinyK3HasItsOwnDefaults) {
  const auto defaults = LoadSamplingDefaults(testing::TinyK3());
  ASSERT_TRUE(defaults.ok());
  EXPECT_EQ(defaults->temperature, 0.6f);
  EXPECT_EQ(defaults->top_p, 0.95f);
  EXPECT_EQ(defaults->top_k, std::nullopt);
  EXPECT_THAT(defaults->eos_token_ids, ElementsAre(3842));
}

TEST(ServedModelTest, NoFileMeansNoDefaults) {
  const auto defaults = LoadSamplingDefaults("/nowhere");
  ASSERT_TRUE(defaults.ok());
  EXPECT_FALSE(defaults->temperature.has_value());
}

// A container's mount of a missing file leaves a folder.
TEST(ServedModelTest, AFolderInTheFilesPlaceIsAnError) {
  const std::string dir = ::testing::TempDir() + "/k3serve_generation_folder";
  std::filesystem::create_directories(dir + "/generation_config.json");
  EXPECT_THAT(std::string(LoadSamplingDefaults(dir).status().message()),
              HasSubstr("generation_config.json: expected a file, found a directory"));
}

TEST(ServedModelTest, GreedyIsASwitchAndEosMayBeAList) {
  const auto defaults = Load(R"({"do_sample": false, "temperature": 0.7, "eos_token_id": [1, 2], "top_k": null})");
  ASSERT_TRUE(defaults.ok());
  EXPECT_EQ(defaults->temperature, 0.0f);
  EXPECT_THAT(defaults->eos_token_ids, ElementsAre(1, 2));
}

TEST(ServedModelTest, BadFilesNameFileAndField) {
  EXPECT_THAT(std::string(Load("[]").status().message()), HasSubstr("generation_config.json: is not a JSON object"));
  EXPECT_THAT(std::string(Load(R"({"top_p": 2})").status().message()), HasSubstr("top_p must be from"));
  EXPECT_THAT(std::string(Load(R"({"temperature": "x"})").status().message()),
              HasSubstr("temperature must be a number"));
  for (const char* eos : {"\"x\"", "-1", "[1, 4294967298]", "1.5", "[[1]]", "true"}) {
    const auto defaults = Load(std::string(R"({"eos_token_id": )") + eos + "}");
    EXPECT_THAT(std::string(defaults.status().message()), HasSubstr("eos_token_id must hold token ids")) << eos;
  }
  EXPECT_THAT(std::string(Load(R"({"top_k": 1.5})").status().message()), HasSubstr("top_k must be a whole number"));
}

TEST(ServedModelTest, WhatCannotBeFollowedIsNamed) {
  const testing::LogCapture log;
  ASSERT_TRUE(Load(R"({"num_beams": 1, "typical_p": 1.0, "max_length": 20, "suppress_tokens": null, "stop_strings": [],
                       "forced_eos_token_id": null, "min_new_tokens": 0, "max_new_tokens": 7})")
                  .ok());
  EXPECT_EQ(log.text(), "");
  ASSERT_TRUE(Load(R"({"num_beams": 4, "suppress_tokens": [7], "typical_p": 0.9, "forced_bos_token_id": 0})").ok());
  EXPECT_EQ(log.Count("not followed: num_beams, typical_p, suppress_tokens, forced_bos_token_id"), 1) << log.text();
}

}  // namespace
}  // namespace k3
