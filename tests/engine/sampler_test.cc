#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace k3 {
namespace {

TEST(UniformAtTest, IsPhilox) {
  // Published known answers of Philox 4x32-10 (first word): counter and key all zero; all ones in every bit.
  EXPECT_EQ(UniformAt(0, 0, 0), static_cast<float>(0x6627e8d5u >> 8) * 0x1.0p-24f);
}

TEST(UniformAtTest, DependsOnEveryArgumentAndOnNothingElse) {
  std::set<float> seen;
  int draws = 0;
  for (uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, ~uint64_t{0}}) {
    for (int32_t choice : {0, 1, 7}) {
      for (int64_t position : {int64_t{0}, int64_t{1}, int64_t{1} << 32}) {
        const float uniform = UniformAt(seed, choice, position);
        EXPECT_EQ(uniform, UniformAt(seed, choice, position));
        EXPECT_GE(uniform, 0.0f);
        EXPECT_LT(uniform, 1.0f);
        seen.insert(uniform);
        ++draws;
      }
    }
  }
  EXPECT_EQ(static_cast<int>(seen.size()), draws);
}

TEST(UniformAtTest, IsUniform) {
  constexpr int kDraws = 100000, kBins = 20;
  int bins[kBins] = {};
  double sum = 0;
  for (int i = 0; i < kDraws; ++i) {
    const float uniform = UniformAt(12345, 0, i);
    ++bins[static_cast<int>(uniform * kBins)];
    sum += uniform;
  }
  EXPECT_NEAR(sum / kDraws, 0.5, 0.005);
  double chi_squared = 0;
  for (int count : bins) chi_squared += std::pow(count - kDraws / kBins, 2) / (kDraws / kBins);
  EXPECT_LT(chi_squared, 50);  // 19 degrees of freedom: beyond 43.8 once in a thousand
}

class SamplerTest : public ::testing::Test {
 protected:
  void Begin() { sampler_.Begin(params_, /*choice=*/2, prompt_, eos_, kVocab); }
  SampleRow Draw(TokenConstraint* constraint = nullptr) {
    plan_.Clear();
    sampler_.AppendDraw(5, constraint, &plan_);
    return plan_.sample_rows.back();
  }
  static constexpr int32_t kVocab = 70;
  SamplingParams params_;
  std::vector<int32_t> prompt_{3, 4, 3};
  std::vector<int32_t> eos_{69};
  Sampler sampler_;
  RankPlan plan_;
};

TEST_F(SamplerTest, PlainRowHasNoEdits) {
  params_.seed = 9;
  Begin();
  const SampleRow row = Draw();
  EXPECT_EQ(plan_.logits_row, std::vector<int32_t>{5});
  EXPECT_EQ(row.uniform, UniformAt(9, 2, 0));
  EXPECT_EQ(row.edit_begin, row.edit_end);
  EXPECT_EQ(row.mask_row, -1);
  EXPECT_EQ(row.draw, 1);
  EXPECT_EQ(row.logprob_of, -1);
  sampler_.Count(1);
  EXPECT_EQ(Draw().uniform, UniformAt(9, 2, 1));
}

TEST_F(SamplerTest, TopKOffOrBeyondTheVocabularyIsZero) {
  for (int32_t top_k : {-5, -1, 0, kVocab, kVocab + 1, INT32_MAX}) {
    params_.top_k = top_k;
    Sampler sampler;
    sampler.Begin(params_, 0, prompt_, eos_, kVocab);
    plan_.Clear();
    sampler.AppendDraw(0, nullptr, &plan_);
    EXPECT_EQ(plan_.sample_rows[0].top_k, 0) << top_k;
  }
  params_.top_k = kVocab - 1;
  Begin();
  EXPECT_EQ(Draw().top_k, kVocab - 1);
}

TEST_F(SamplerTest, CountsAreKeptAsTokensCome) {
  params_.frequency_penalty = 0.5f;
  Begin();
  EXPECT_EQ(Draw().edit_end, 0);  // the prompt does not count
  for (int32_t token : {3, 8, 3, 3}) sampler_.Count(token);
  Draw();
  ASSERT_EQ(plan_.logit_edits.size(), 2u);
  EXPECT_EQ(plan_.logit_edits[0].id, 3);
  EXPECT_EQ(plan_.logit_edits[0].count, 3);
  EXPECT_EQ(plan_.logit_edits[0].in_prompt, 0);
  EXPECT_EQ(plan_.logit_edits[1].id, 8);
  EXPECT_EQ(plan_.logit_edits[1].count, 1);
}

TEST_F(SamplerTest, RepetitionPenaltyKnowsThePrompt) {
  params_.repetition_penalty = 1.5f;
  Begin();
  sampler_.Count(4);
  sampler_.Count(9);
  Draw();
  ASSERT_EQ(plan_.logit_edits.size(), 3u);
  EXPECT_EQ(plan_.logit_edits[0].id, 3);
  EXPECT_EQ(plan_.logit_edits[0].in_prompt, 1);
  EXPECT_EQ(plan_.logit_edits[0].count, 0);
  EXPECT_EQ(plan_.logit_edits[1].id, 4);
  EXPECT_EQ(plan_.logit_edits[1].in_prompt, 1);
  EXPECT_EQ(plan_.logit_edits[1].count, 1);
  EXPECT_EQ(plan_.logit_edits[2].in_prompt, 0);
}

TEST_F(SamplerTest, PenaltiesComeBeforeBiasesAndBans) {
  params_.presence_penalty = 1;
  params_.logit_bias = {{7, 2.5f}};
  params_.banned_ids = {8};
  params_.stop_token_ids = {10};
  params_.min_new_tokens = 2;
  Begin();
  sampler_.Count(3);
  Draw();
  std::vector<std::pair<int32_t, LogitEditKind>> got;
  for (const LogitEdit& edit : plan_.logit_edits) got.emplace_back(edit.id, edit.kind);
  const auto bias = LogitEditKind::kBias;
  EXPECT_EQ(got, (std::vector<std::pair<int32_t, LogitEditKind>>{
                     {3, LogitEditKind::kPenalty}, {7, bias}, {8, bias}, {10, bias}, {69, bias}}));
  EXPECT_EQ(plan_.logit_edits[1].value, 2.5f);
  EXPECT_EQ(plan_.logit_edits[2].value, -INFINITY);
  EXPECT_EQ(plan_.logit_edits[4].value, -INFINITY);
  sampler_.Count(3);
  Draw();
  EXPECT_EQ(plan_.logit_edits.size(), 3u);  // the minimum is reached: stops are free
}

TEST_F(SamplerTest, IgnoringTheEndOfTextKeepsOwnStops) {
  params_.ignore_eos = true;
  params_.stop_token_ids = {10};
  Begin();
  EXPECT_TRUE(sampler_.IsStop(10));
  EXPECT_FALSE(sampler_.IsStop(69));
  params_.ignore_eos = false;
  Sampler other;
  other.Begin(params_, 0, prompt_, eos_, kVocab);
  EXPECT_TRUE(other.IsStop(69));
  EXPECT_FALSE(other.IsStop(3));
}

class OddConstraint : public TokenConstraint {
 public:
  bool FillMask(std::span<uint32_t> mask) override {
    if (!active) return false;
    EXPECT_EQ(mask.size(), 3u);  // 70 ids
    for (uint32_t& word : mask) word = 0xAAAAAAAAu;
    return true;
  }
  bool Accept(int32_t) override { return true; }
  std::unique_ptr<TokenConstraint> Fork() const override { return std::make_unique<OddConstraint>(); }
  bool active = true;
};

TEST_F(SamplerTest, MaskIsWhatBothConstraintAndAllowedIdsAllow) {
  OddConstraint constraint;
  Begin();
  EXPECT_EQ(Draw(&constraint).mask_row, 0);
  EXPECT_EQ(plan_.allowed_mask, (std::vector<uint32_t>{0xAAAAAAAAu, 0xAAAAAAAAu, 0xAAAAAAAAu}));
  constraint.active = false;
  EXPECT_EQ(Draw(&constraint).mask_row, -1);
  EXPECT_TRUE(plan_.allowed_mask.empty());

  params_.allowed_ids = {0, 1, 33, 64};
  Sampler limited;
  limited.Begin(params_, 0, prompt_, eos_, kVocab);
  plan_.Clear();
  limited.AppendDraw(0, &constraint, &plan_);
  constraint.active = true;
  limited.AppendDraw(1, &constraint, &plan_);
  EXPECT_EQ(plan_.sample_rows[0].mask_row, 0);
  EXPECT_EQ(plan_.sample_rows[1].mask_row, 1);
  EXPECT_EQ(plan_.allowed_mask, (std::vector<uint32_t>{3, 2, 1, 2, 2, 0}));
}

class OnlyConstraint : public TokenConstraint {
 public:
  explicit OnlyConstraint(std::vector<int32_t> ids) : ids_(std::move(ids)) {}
  bool FillMask(std::span<uint32_t> mask) override {
    std::fill(mask.begin(), mask.end(), 0u);
    mask.back() = ~0u << 6;  // beyond the vocabulary: means nothing
    for (const int32_t id : ids_) mask[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
    return true;
  }
  bool Accept(int32_t) override { return true; }
  std::unique_ptr<TokenConstraint> Fork() const override { return std::make_unique<OnlyConstraint>(ids_); }

 private:
  std::vector<int32_t> ids_;
};

// A grammar that is complete leaves nothing but the end, however many tokens were wanted.
TEST_F(SamplerTest, MinimumYieldsWhereOnlyStopsAreAllowed) {
  params_.min_new_tokens = 5;
  params_.stop_token_ids = {3};
  Begin();
  OnlyConstraint complete({3, 69}), open({3, 40, 69});
  SampleRow row = Draw(&complete);
  EXPECT_EQ(row.edit_begin, row.edit_end);
  row = Draw(&open);
  EXPECT_EQ(row.edit_end - row.edit_begin, 2);
}

TEST_F(SamplerTest, ScoresAskForOneLogprobAndDrawNothing) {
  params_.top_logprobs = 4;
  params_.presence_penalty = 1;
  Begin();
  sampler_.Count(3);
  plan_.Clear();
  sampler_.AppendScore(2, 17, &plan_);
  EXPECT_EQ(plan_.logits_row, std::vector<int32_t>{2});
  const SampleRow& row = plan_.sample_rows[0];
  EXPECT_EQ(row.draw, 0);
  EXPECT_EQ(row.logprob_of, 17);
  EXPECT_EQ(row.top_logprobs, 4);
  EXPECT_EQ(plan_.max_top_logprobs, 4);
  EXPECT_EQ(row.edit_begin, row.edit_end);
}

}  // namespace
}  // namespace k3
