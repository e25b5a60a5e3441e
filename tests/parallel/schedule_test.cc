#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <ostream>
#include <string>

#include "tests/e2e/random_schedules.h"
#include "tests/parallel/parallel_model.h"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/temp_dir.h"

// The engine's random schedules over several ranks. Each answer is compared twice: with the same request alone on one
// group of as many tensor-parallel ranks, whose bits it must have, since the experts' sums meet in one fixed tree; and
// alone on one rank, where tensor parallelism may change the last bits of the sums over heads and widths.
namespace k3::testing {
namespace {

constexpr int32_t kLeaves = 8;       // the generated model's experts
constexpr float kTolerance = 5e-5f;  // of log-probabilities: logits of about 5 within 1e-5

struct Case {
  const char* name;
  int32_t tensor;
  int32_t data;
  ExpertTransport transport;
  StepMode mode;
  int64_t schedules;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::unique_ptr<TestModel> Load(const std::string& dir, const ParallelLayout& layout, ExpertTransport transport) {
  return std::make_unique<TestModel>(LoadRanks(dir, layout, transport));
}

// Whether `actual` is the answer of one rank: its tokens, with log-probabilities that differ in their last bits. Over
// many answers a few leave it, where two tokens are as likely, a random number falls between two, or two experts have
// the same score.
bool IsNear(const Outcome& actual, const Outcome& alone) {
  const auto near = [](float a, float b) { return std::abs(a - b) <= kTolerance; };
  if (actual.choices.size() != alone.choices.size()) return false;
  for (size_t c = 0; c < alone.choices.size(); ++c) {
    const ChoiceOutcome& a = actual.choices[c];
    const ChoiceOutcome& b = alone.choices[c];
    for (size_t t = 0; t < std::min(a.tokens.size(), b.tokens.size()); ++t) {
      if (a.tokens[t] != b.tokens[t] || !near(a.logprobs[t], b.logprobs[t])) return false;
    }
  }
  for (size_t t = 0; t < std::min(actual.prompt_logprobs.size(), alone.prompt_logprobs.size()); ++t) {
    if (!near(actual.prompt_logprobs[t], alone.prompt_logprobs[t])) return false;
  }
  return true;
}

class ScheduleTest : public ::testing::TestWithParam<Case> {};

TEST_P(ScheduleTest, EveryAnswerIsThatOfTheRequestAlone) {
  const Case& c = GetParam();
  const TempDir dir;
  TestCheckpoint(SmallK3Config()).Write(dir.path());
  const auto ranks = Load(dir.path(), {.tensor = c.tensor, .data = c.data, .expert_leaves = kLeaves}, c.transport);
  const auto group = Load(dir.path(), {.tensor = c.tensor, .expert_leaves = kLeaves}, ExpertTransport::kAllGather);
  const auto one = std::make_unique<TestModel>(dir.path());
  struct Alone {
    Outcome group, one;
  };
  std::map<std::string, Alone> alone;
  int left = 0, answers = 0;
  RunSchedules(*ranks, c.mode, c.schedules, [&](const TestRequest& request, const Outcome& outcome, bool cut) {
    const auto [it, fresh] = alone.try_emplace(AnswerKey(request));
    if (fresh) it->second = {RunAlone(*group, request), RunAlone(*one, request)};
    ++answers;
    ExpectSameAnswer(outcome, it->second.group, cut);
    left += !IsNear(outcome, it->second.one);
  });
  EXPECT_LE(left, 1 + answers / 500);
}

const StepMode kAhead{.plan_ahead = true, .decode_sizes = {1, 2, 4, 8}};
INSTANTIATE_TEST_SUITE_P(Layouts, ScheduleTest,
                         ::testing::Values(Case{"Tp2", 2, 1, ExpertTransport::kAllGather, {}, 60},
                                           Case{"Dp2", 1, 2, ExpertTransport::kAllGather, kAhead, 30},
                                           Case{"Dp2AllToAll", 1, 2, ExpertTransport::kAllToAll, {}, 30},
                                           Case{"Tp2Dp2AllToAll", 2, 2, ExpertTransport::kAllToAll, kAhead, 20},
                                           Case{"Dp4", 1, 4, ExpertTransport::kAllGather, {}, 20}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace k3::testing
