#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "tests/engine/model/loaded_checkpoint.h"
#include "tests/testing/log_capture.h"

namespace k3 {
namespace {

using ::testing::AllOf;
using testing::FailureAfter;
using ::testing::HasSubstr;
using testing::Loaded;
using testing::Recorded;
using testing::Stacked;
using testing::TestCheckpoint;

// B42: four forms.
class TiedHeadTest : public ::testing::TestWithParam<bool> {
 protected:
  static ModelConfig Config(bool tied) {
    ModelConfig config = GetParam() ? testing::SmallK3Config() : testing::SmallKimiLinearConfig();
    config.tie_word_embeddings = tied;
    return config;
  }
  static std::string Head() { return GetParam() ? "language_model.lm_head.weight" : "lm_head.weight"; }
  static std::string Embedding() {
    return GetParam() ? "language_model.model.embed_tokens.weight" : "model.embed_tokens.weight";
  }
};

TEST_P(TiedHeadTest, TiedWithoutHeadSharesTheEmbedding) {
  const TestCheckpoint content(Config(true));
  const testing::LogCapture log;
  const Loaded loaded(content);
  ASSERT_TRUE(loaded.model.ok()) << loaded.model.status();
  EXPECT_EQ(Recorded(loaded.weights().lm_head).values, Stacked(content, "", {"model.embed_tokens.weight"}));
  EXPECT_EQ(log.Count("warn"), 0);
}

TEST_P(TiedHeadTest, TiedWithEqualHead) {
  TestCheckpoint content(Config(true));
  testing::CheckpointTensor head = *content.Find(Embedding());
  head.name = Head();
  content.tensors.push_back(head);
  const testing::LogCapture log;
  const Loaded loaded(content);
  ASSERT_TRUE(loaded.model.ok()) << loaded.model.status();
  EXPECT_EQ(Recorded(loaded.weights().lm_head).values, Stacked(content, "", {"model.embed_tokens.weight"}));
  EXPECT_EQ(log.Count("warn"), 0);
}

TEST_P(TiedHeadTest, TiedWithEqualHeadOfAnotherType) {
  TestCheckpoint content(Config(true));
  testing::CheckpointTensor head{Head(), "F32", content.Find(Embedding())->shape, {}};
  for (double value : content.Doubles("model.embed_tokens.weight")) {
    const float single = static_cast<float>(value);
    head.data.insert(head.data.end(), reinterpret_cast<const uint8_t*>(&single),
                     reinterpret_cast<const uint8_t*>(&single) + 4);
  }
  content.tensors.push_back(head);
  const testing::LogCapture log;
  const Loaded loaded(content);
  ASSERT_TRUE(loaded.model.ok()) << loaded.model.status();
  EXPECT_EQ(log.Count("warn"), 0);
}

TEST_P(TiedHeadTest, TiedWithDifferentHeadUsesTheHeadAndWarnsOnce) {
  TestCheckpoint content(Config(false));
  content.config.tie_word_embeddings = true;
  const testing::LogCapture log;
  const Loaded loaded(content);
  ASSERT_TRUE(loaded.model.ok()) << loaded.model.status();
  EXPECT_EQ(Recorded(loaded.weights().lm_head).values, Stacked(content, "", {"lm_head.weight"}));
  EXPECT_EQ(log.Count("warn"), 1);
  EXPECT_THAT(log.text(), AllOf(HasSubstr(Head()), HasSubstr("differs from the embedding")));
}

TEST_P(TiedHeadTest, UntiedWithoutHeadStops) {
  EXPECT_THAT(FailureAfter(Config(false), [&](TestCheckpoint& c) { c.Remove(Head()); }),
              AllOf(HasSubstr("missing"), HasSubstr(Head())));
}

INSTANTIATE_TEST_SUITE_P(Families, TiedHeadTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "K3" : "KimiLinear"; });

}  // namespace
}  // namespace k3
