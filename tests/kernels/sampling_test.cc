#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/kernels/op_fixture.h"
#include "tests/kernels/oracle.h"

namespace k3::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class SamplingTest : public OpTest {
 protected:
  struct Result {
    std::vector<int32_t> token, status, top_ids;
    std::vector<float> logprob, top_logprobs;
    std::vector<float> Top(int64_t row, int n) const {
      const int64_t stride = static_cast<int64_t>(top_logprobs.size()) / static_cast<int64_t>(token.size());
      return {top_logprobs.begin() + row * stride, top_logprobs.begin() + row * stride + n};
    }
  };

  Result Run(const std::vector<std::vector<float>>& logits, const std::vector<SampleRow>& rows,
             const std::vector<LogitEdit>& edits = {}, const std::vector<uint32_t>& mask = {}, int32_t max_top = 20) {
    const int64_t count = static_cast<int64_t>(rows.size()), vocab = static_cast<int64_t>(logits[0].size());
    std::vector<float> flat;
    for (const std::vector<float>& row : logits) flat.insert(flat.end(), row.begin(), row.end());
    const DeviceMatrix device_logits(ops(), DType::kF32, count, vocab, flat);
    const DeviceArray<SampleRow> device_rows(ops(), rows);
    const DeviceArray<LogitEdit> device_edits(ops(), edits);
    const DeviceArray<uint32_t> device_mask(ops(), mask);
    const DeviceArray<int32_t> token(ops(), rows.size()), status(ops(), rows.size()),
        top_ids(ops(), rows.size() * max_top);
    const DeviceArray<float> logprob(ops(), rows.size()), top_logprobs(ops(), rows.size() * max_top);
    const DeviceBytes scratch(ops(), ops().SampleScratchBytes(count, vocab));
    SampleParams params;
    params.logits = device_logits;
    params.rows = device_rows.data();
    params.edits = device_edits.data();
    params.allowed_mask = device_mask.data();
    params.max_top_logprobs = max_top;
    params.token = token.data();
    params.status = status.data();
    params.logprob = logprob.data();
    params.top_ids = top_ids.data();
    params.top_logprobs = top_logprobs.data();
    params.scratch = scratch.data();
    ops().Sample(params, ops().stream());
    return {token.Get(), status.Get(), top_ids.Get(), logprob.Get(), top_logprobs.Get()};
  }
  int32_t Token(const std::vector<float>& logits, const SampleRow& row, const std::vector<LogitEdit>& edits = {},
                const std::vector<uint32_t>& mask = {}) {
    return Run({logits}, {row}, edits, mask).token[0];
  }
  static SampleRow Row(float temperature, float uniform = 0) {
    SampleRow row;
    row.temperature = temperature;
    row.uniform = uniform;
    return row;
  }
};
K3_INSTANTIATE_OPS(SamplingTest);

TEST_P(SamplingTest, GreedyTakesTheLowestOfEqualMaxima) {
  for (int64_t vocab : {1, 2, 31, 32, 33, 100, 4096, 5000}) {
    std::vector<float> logits(static_cast<size_t>(vocab), -1.0f);
    EXPECT_EQ(Token(logits, Row(0)), 0) << vocab;
    logits[vocab - 1] = 2;
    EXPECT_EQ(Token(logits, Row(0)), vocab - 1) << vocab;
    logits[vocab / 2] = 2;
    EXPECT_EQ(Token(logits, Row(0)), vocab / 2) << vocab;
  }
}

TEST_P(SamplingTest, LogProbabilitiesMatchTheOracle) {
  Random random(1);
  for (int64_t vocab : {7, 100, 4096, 20000}) {
    const std::vector<float> logits = random.Normal(vocab, 4);
    SampleRow row = Row(0);
    row.top_logprobs = static_cast<int32_t>(std::min<int64_t>(vocab, 20));
    const Result result = Run({logits}, {row});
    const oracle::SampleResult expected = oracle::Sample(logits, row, {}, {});
    std::vector<int32_t> order(static_cast<size_t>(vocab));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    EXPECT_EQ(result.token[0], order[0]);
    for (int32_t i = 0; i < row.top_logprobs; ++i) {
      EXPECT_EQ(result.top_ids[i], order[i]);
      EXPECT_NEAR(result.top_logprobs[i], expected.log_probabilities[order[i]], 2e-5);
    }
    for (int32_t i = row.top_logprobs; i < 20; ++i) EXPECT_EQ(result.top_ids[i], -1);
    // Exactly equal: clients compare the two to see whether a token was the greedy one.
    EXPECT_EQ(result.logprob[0], result.top_logprobs[0]);
  }
}

TEST_P(SamplingTest, PromptRowsReturnTheAskedLogProbabilityAndNoToken) {
  Random random(2);
  const std::vector<float> logits = random.Normal(300);
  SampleRow row = Row(1, 0.5f);
  row.draw = 0;
  row.logprob_of = 123;
  row.top_logprobs = 3;
  const Result result = Run({logits}, {row});
  EXPECT_EQ(result.token[0], -1);
  EXPECT_EQ(result.status[0], static_cast<int32_t>(SampleStatus::kOk));
  EXPECT_NEAR(result.logprob[0], oracle::Sample(logits, Row(0), {}, {}).log_probabilities[123], 1e-5);
  EXPECT_NE(result.top_ids[0], -1);
}

// Every filter alone and together: the drawn token is the oracle's wherever `uniform` is not on a boundary.
TEST_P(SamplingTest, DrawsFollowTheOracle) {
  Random random(3);
  int compared = 0;
  for (int64_t vocab : {5, 64, 1000, 4096, 9001}) {
    for (int variant = 0; variant < 24; ++variant) {
      const std::vector<float> logits = random.Normal(vocab, variant % 2 == 0 ? 3.0f : 0.5f);
      SampleRow row = Row(variant % 3 == 0 ? 0.7f : variant % 3 == 1 ? 1.0f : 2.5f);
      if (variant & 1) row.top_k = random.Int(1, static_cast<int>(variant & 8 ? std::min<int64_t>(vocab, 60) : vocab));
      if (variant & 2) row.top_p = random.Uniform(1, 0.05f, 0.99f)[0];
      if (variant & 4) row.min_p = random.Uniform(1, 0.01f, 0.5f)[0];
      std::vector<SampleRow> rows;
      std::vector<std::vector<float>> same;
      for (int i = 0; i < 30; ++i) {
        row.uniform = random.Uniform(1, 0, 1)[0];
        rows.push_back(row);
        same.push_back(logits);
      }
      const Result result = Run(same, rows);
      const oracle::SampleResult expected = oracle::Sample(logits, row, {}, {});
      for (size_t i = 0; i < rows.size(); ++i) {
        const double u = double{rows[i].uniform};
        // fp32 weights place the boundaries within about 1e-5 of the fp64 ones.
        const int32_t low = oracle::Draw(expected, std::max(0.0, u - 2e-5));
        const int32_t high = oracle::Draw(expected, std::min(0.9999999, u + 2e-5));
        if (low != high) continue;
        ++compared;
        EXPECT_EQ(result.token[i], low) << "vocabulary " << vocab << ", variant " << variant << ", uniform " << u;
      }
    }
  }
  EXPECT_GT(compared, 2000);
}

TEST_P(SamplingTest, UniformZeroAndAlmostOneStayInside) {
  const std::vector<float> logits = {-kInf, 0.0f, 0.0f, -kInf};
  EXPECT_EQ(Token(logits, Row(1, 0.0f)), 1);
  EXPECT_EQ(Token(logits, Row(1, 0.49f)), 1);
  EXPECT_EQ(Token(logits, Row(1, 0.51f)), 2);
  EXPECT_EQ(Token(logits, Row(1, std::nextafter(1.0f, 0.0f))), 2);
}

TEST_P(SamplingTest, TiesAtTheCutGoToTheLowerId) {
  const std::vector<float> logits(10, 1.0f);
  SampleRow row = Row(1, std::nextafter(1.0f, 0.0f));
  row.top_k = 3;
  EXPECT_EQ(Token(logits, row), 2);
  row.top_k = 0;
  row.top_p = 0.45f;  // needs five of the ten
  EXPECT_EQ(Token(logits, row), 4);
}

TEST_P(SamplingTest, TinyTemperatureIsGreedy) {
  Random random(4);
  const std::vector<float> logits = random.Normal(500);
  for (float uniform : {0.0f, 0.5f, 0.999f}) EXPECT_EQ(Token(logits, Row(1e-30f, uniform)), Token(logits, Row(0)));
}

// B17: top_k of the vocabulary size or more, zero and negative are "off", per row, beside greedy rows.
TEST_P(SamplingTest, TopKBeyondTheVocabularyIsOff) {
  Random random(5);
  const int32_t vocab = 1000;
  const std::vector<float> logits = random.Normal(vocab);
  const std::vector<int32_t> values = {-1, 0, 1, vocab - 1, vocab, vocab + 1, 2147483647};
  std::vector<SampleRow> rows;
  std::vector<int32_t> alone;
  for (int32_t top_k : values) {
    SampleRow row = Row(1, 0.737f);
    row.top_k = top_k;
    rows.push_back(row);
    alone.push_back(Token(logits, row));
  }
  rows.push_back(Row(0));
  const Result together = Run(std::vector<std::vector<float>>(rows.size(), logits), rows);
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(together.token[i], alone[i]) << "top_k " << values[i];
  for (size_t off : {0, 4, 5, 6}) EXPECT_EQ(alone[off], alone[1]) << "top_k " << values[off];
  EXPECT_EQ(alone[2], together.token.back()) << "top_k 1 is greedy";
}

// B19: an edit outside the vocabulary changes nothing, and neither the row nor its neighbour is disturbed.
TEST_P(SamplingTest, EditsOutsideTheVocabularyAreSkipped) {
  Random random(6);
  const int32_t vocab = 200;
  const std::vector<float> logits = random.Normal(vocab);
  std::vector<LogitEdit> edits;
  for (int32_t id : {vocab, -1, 2147483647, -2147483647}) edits.push_back({id, LogitEditKind::kBias, 0, 0, 100});
  SampleRow row = Row(0);
  row.edit_end = 4;
  const Result result = Run({logits, logits}, {row, Row(0)}, edits);
  EXPECT_EQ(result.token[0], Token(logits, Row(0)));
  EXPECT_EQ(result.token[1], result.token[0]);
}

TEST_P(SamplingTest, BiasMovesTheChoice) {
  Random random(7);
  const std::vector<float> logits = random.Normal(200);
  const int32_t best = Token(logits, Row(0));
  SampleRow row = Row(0);
  row.edit_end = 1;
  row.top_logprobs = 1;
  EXPECT_NE(Token(logits, row, {{best, LogitEditKind::kBias, 0, 0, -100}}), best);
  EXPECT_NE(Token(logits, row, {{best, LogitEditKind::kBias, 0, 0, -kInf}}), best);
  EXPECT_EQ(Token(logits, row, {{17, LogitEditKind::kBias, 0, 0, 100}}), 17);
  EXPECT_EQ(Token(logits, row, {{199, LogitEditKind::kBias, 0, 0, 100}}), 199);
  // Log-probabilities are of the raw logits.
  const Result result = Run({logits}, {row}, {{17, LogitEditKind::kBias, 0, 0, 100}});
  const oracle::SampleResult raw = oracle::Sample(logits, Row(0), {}, {});
  EXPECT_NEAR(result.logprob[0], raw.log_probabilities[17], 1e-5);
  EXPECT_EQ(result.top_ids[0], best);
}

// B20: a row without a usable distribution gives a status, never a token; its neighbours are as alone.
TEST_P(SamplingTest, NonFiniteRowsGiveNoToken) {
  Random random(8);
  const int64_t vocab = 333;
  std::vector<float> good = random.Normal(vocab), one_nan = good, one_inf = good;
  one_nan[vocab - 1] = kNan;
  one_inf[100] = kInf;
  const std::vector<std::vector<float>> logits = {std::vector<float>(vocab, kNan), std::vector<float>(vocab, -kInf),
                                                  one_nan, one_inf, good};
  for (float temperature : {0.0f, 1.0f}) {
    SampleRow row = Row(temperature, 0.3f);
    row.top_logprobs = 2;
    const Result result = Run(logits, std::vector<SampleRow>(5, row));
    for (int r = 0; r < 4; ++r) {
      EXPECT_EQ(result.status[r], static_cast<int32_t>(SampleStatus::kNonFinite)) << r;
      EXPECT_EQ(result.token[r], -1) << r;
      EXPECT_EQ(result.top_ids[r * 20], -1) << r;
    }
    EXPECT_EQ(result.status[4], static_cast<int32_t>(SampleStatus::kOk));
    EXPECT_EQ(result.token[4], Token(good, row));
  }
}

// B21: presence and frequency see generated tokens only; repetition sees the prompt as well.
TEST_P(SamplingTest, PenaltiesFollowTheirCounts) {
  const int32_t x = 3;
  std::vector<float> logits = {0.0f, 4.0f, 1.0f, 5.0f, -1.0f};
  SampleRow row = Row(0);
  row.presence_penalty = 2;
  row.frequency_penalty = 2;
  row.edit_end = 1;
  // In the prompt only: as without penalties.
  EXPECT_EQ(Token(logits, row, {{x, LogitEditKind::kPenalty, 0, 1, 0}}), x);
  // Generated twice: lower by 2 + 2 * 2 = 6, so 5 becomes -1 and token 1 wins; a bias of 5.5 would keep it ahead.
  EXPECT_EQ(Token(logits, row, {{x, LogitEditKind::kPenalty, 2, 1, 0}}), 1);
  row.edit_end = 2;
  EXPECT_EQ(Token(logits, row, {{x, LogitEditKind::kPenalty, 2, 1, 0}, {x, LogitEditKind::kBias, 0, 0, 5.1f}}), x);
  EXPECT_EQ(Token(logits, row, {{x, LogitEditKind::kPenalty, 2, 1, 0}, {x, LogitEditKind::kBias, 0, 0, 4.9f}}), 1);
  // Repetition: halved when positive, doubled when negative.
  SampleRow repetition = Row(0);
  repetition.repetition_penalty = 2;
  repetition.edit_end = 1;
  EXPECT_EQ(Token(logits, repetition, {{x, LogitEditKind::kPenalty, 0, 1, 0}}), 1);
  std::vector<float> negative = {-3.0f, -1.0f, -1.9f};
  EXPECT_EQ(Token(negative, repetition, {{1, LogitEditKind::kPenalty, 1, 0, 0}}), 2);
  negative[2] = -2.1f;
  EXPECT_EQ(Token(negative, repetition, {{1, LogitEditKind::kPenalty, 1, 0, 0}}), 1);
}

TEST_P(SamplingTest, MasksLimitTheChoice) {
  Random random(9);
  const int64_t vocab = 70;
  const std::vector<float> logits = random.Normal(vocab);
  std::vector<uint32_t> mask(2 * 3, 0);
  mask[3 + 0] = 1u << 5;
  mask[3 + 2] = 1u << 5;  // ids 5 and 69 of the second mask row
  SampleRow row = Row(0);
  row.mask_row = 1;
  EXPECT_EQ(Token(logits, row, {}, mask), logits[5] >= logits[69] ? 5 : 69);
  std::vector<int> seen(70);
  for (int i = 0; i < 20; ++i) {
    SampleRow draw = Row(2, static_cast<float>(i) / 20);
    draw.mask_row = 1;
    ++seen[Token(logits, draw, {}, mask)];
  }
  EXPECT_EQ(seen[5] + seen[69], 20);
  EXPECT_GT(seen[5], 0);
  EXPECT_GT(seen[69], 0);
  // Nothing allowed: a status of its own.
  row.mask_row = 0;
  const Result result = Run({logits, logits}, {row, Row(0)}, {}, mask);
  EXPECT_EQ(result.status[0], static_cast<int32_t>(SampleStatus::kNothingAllowed));
  EXPECT_EQ(result.token[0], -1);
  EXPECT_EQ(result.status[1], static_cast<int32_t>(SampleStatus::kOk));
}

TEST_P(SamplingTest, RowsDoNotDependOnTheBatch) {
  Random random(10);
  for (int64_t vocab : {4096, 20011}) {
    std::vector<std::vector<float>> logits;
    std::vector<SampleRow> rows;
    for (int i = 0; i < 40; ++i) {
      logits.push_back(random.Normal(vocab, 2));
      // Many equal values: more entries may be among the best than fast paths have room for.
      if (i % 7 == 3) {
        for (float& z : logits.back()) z = std::round(z);
      }
      SampleRow row = Row(i % 4 == 0 ? 0.0f : 1.0f, random.Uniform(1, 0, 1)[0]);
      row.top_p = i % 3 == 0 ? 0.9f : 1.0f;
      row.top_k = i % 5 == 0 ? 50 : i % 5 == 1 ? 7 : i % 5 == 2 ? 64 : 0;
      row.top_logprobs = i % 6 == 2 ? 3 : 0;
      row.draw = i % 11 != 5;
      row.logprob_of = i % 11 == 5 ? i : -1;
      rows.push_back(row);
    }
    const Result all = Run(logits, rows);
    for (size_t i = 0; i < rows.size(); ++i) {
      const Result one = Run({logits[i]}, {rows[i]});
      EXPECT_EQ(one.token[0], all.token[i]) << i;
      EXPECT_EQ(one.status[0], all.status[i]) << i;
      EXPECT_EQ(one.logprob[0], all.logprob[i]) << i;
      EXPECT_EQ(one.Top(0, rows[i].top_logprobs), all.Top(static_cast<int64_t>(i), rows[i].top_logprobs)) << i;
    }
  }
}

// A full batch over a large vocabulary: rows of every kind beside each other, with values so coarse that hundreds are
// equal at the cut, with others that no draw may take, and rows without a distribution.
TEST_P(SamplingTest, LargeBatchesFollowTheOracle) {
  Random random(12);
  const int64_t vocab = 12289;
  int compared = 0;
  std::vector<std::vector<float>> logits;
  std::vector<SampleRow> rows;
  for (int i = 0; i < 72; ++i) {
    const float coarse = i % 4 == 1 ? 1.0f : i % 4 == 2 ? 0.125f : 0.0f;
    std::vector<float> row_logits = random.Normal(vocab, i % 3 == 0 ? 0.01f : 3.0f);
    for (float& z : row_logits) {
      if (coarse > 0) z = std::round(z / coarse) * coarse;
    }
    if (i % 9 == 4) std::fill(row_logits.begin() + 20, row_logits.end(), -kInf);
    if (i % 9 == 5) std::fill(row_logits.begin(), row_logits.end(), 1.5f);
    if (i == 17) row_logits[9000] = kNan;
    if (i == 40) row_logits[12288] = kInf;
    if (i == 63) std::fill(row_logits.begin(), row_logits.end(), -kInf);
    SampleRow row = Row(i % 8 == 7 ? 0.0f : 0.8f, random.Uniform(1, 0, 1)[0]);
    row.top_k = i % 5 == 4 ? 200 : random.Int(1, 64);
    row.top_p = i % 2 == 0 ? 0.95f : 1.0f;
    row.min_p = i % 6 == 3 ? 0.05f : 0.0f;
    rows.push_back(row);
    logits.push_back(std::move(row_logits));
  }
  const Result result = Run(logits, rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i == 17 || i == 40 || i == 63) {
      EXPECT_EQ(result.status[i], static_cast<int32_t>(SampleStatus::kNonFinite)) << i;
      EXPECT_EQ(result.token[i], -1) << i;
      continue;
    }
    EXPECT_EQ(result.status[i], static_cast<int32_t>(SampleStatus::kOk)) << i;
    const oracle::SampleResult expected = oracle::Sample(logits[i], rows[i], {}, {});
    const double u = double{rows[i].uniform};
    const int32_t low = oracle::Draw(expected, std::max(0.0, u - 2e-5));
    const int32_t high = oracle::Draw(expected, std::min(0.9999999, u + 2e-5));
    if (low != high) continue;
    ++compared;
    EXPECT_EQ(result.token[i], low) << i;
    EXPECT_NEAR(result.logprob[i], expected.log_probabilities[low], 5e-5) << i;
  }
  EXPECT_GT(compared, 60);
}

// One row more than a device may give whole clusters to, each with another way to the draw: small enough for
// `compute-sanitizer --tool racecheck`, which then sees every kernel (one row alone takes another than nine).
TEST_P(SamplingTest, NineRowsOfEveryKind) {
  Random random(13);
  const int64_t vocab = 4103;
  std::vector<std::vector<float>> logits;
  std::vector<SampleRow> rows;
  for (int i = 0; i < 9; ++i) {
    SampleRow row = Row(i == 0 ? 0.0f : 0.9f, 0.05f + 0.1f * static_cast<float>(i));
    row.top_k = i == 1 ? 1 : i == 2 ? 7 : i == 3 || i == 4 ? 64 : i == 5 ? 300 : 0;
    row.top_p = i == 4 || i == 6 ? 0.8f : 1.0f;
    row.min_p = i == 7 ? 0.02f : 0.0f;
    logits.push_back(random.Normal(vocab, 2));
    // All equal: more entries are among the best than the fast paths have room for.
    if (i == 3) std::fill(logits.back().begin(), logits.back().end(), 0.25f);
    rows.push_back(row);
  }
  const Result all = Run(logits, rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    const oracle::SampleResult expected = oracle::Sample(logits[i], rows[i], {}, {});
    EXPECT_EQ(all.status[i], static_cast<int32_t>(SampleStatus::kOk)) << i;
    const double u = double{rows[i].uniform};
    const int32_t token = oracle::Draw(expected, u);
    if (token != oracle::Draw(expected, u + 2e-5) || token != oracle::Draw(expected, u - 2e-5)) continue;
    EXPECT_EQ(all.token[i], token) << i;
    EXPECT_NEAR(all.logprob[i], expected.log_probabilities[token], 5e-5) << i;
  }
  for (size_t i : {size_t{2}, size_t{3}, size_t{6}}) {
    const Result one = Run({logits[i]}, {rows[i]});
    EXPECT_EQ(one.token[0], all.token[i]) << i;
    EXPECT_EQ(one.logprob[0], all.logprob[i]) << i;
  }
}

TEST_P(SamplingTest, TheWholePublishedVocabulary) {
  Random random(11);
  const int64_t vocab = 163840;
  const std::vector<float> logits = random.Normal(vocab, 3);
  SampleRow row = Row(1, 0.42f);
  row.top_p = 0.95f;
  row.top_k = 1000;
  row.top_logprobs = 20;
  const Result result = Run({logits}, {row});
  const oracle::SampleResult expected = oracle::Sample(logits, row, {}, {});
  EXPECT_EQ(result.token[0], oracle::Draw(expected, double{0.42f}));
  EXPECT_NEAR(result.logprob[0], expected.log_probabilities[result.token[0]], 5e-5);
}

TEST_P(SamplingTest, ImpossibleRowsAreRefusedWithNumbers) {
  if (!ops().is_cpu()) GTEST_SKIP() << "rows are device memory: the host cannot look at them";
  SampleRow row = Row(0);
  row.top_logprobs = 21;
  try {
    Run({std::vector<float>(10, 1.0f)}, {row});
    FAIL() << "no error";
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("21"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace k3::testing
