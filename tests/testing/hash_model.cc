#include "tests/testing/hash_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "engine/sampler.h"

namespace k3::testing {
namespace {

uint64_t Scramble(uint64_t x) {
  x ^= x >> 31;
  x *= 0x7fb5d329728ea185ull;
  x ^= x >> 27;
  x *= 0x81dadef4bc2dd44dull;
  return x ^ (x >> 33);
}
uint64_t Combine(uint64_t a, uint64_t b) { return Scramble(a * 3 + Scramble(b + 0x9e3779b97f4a7c15ull)); }

bool Poisoned(const HashState& state) {
  return state.fold == kPoison || state.history[0] == kPoison || state.history[1] == kPoison ||
         state.history[2] == kPoison;
}

void Feed(const HashModel& model, int32_t token, HashState* state, std::vector<uint64_t>* lines, uint64_t* output) {
  lines->push_back(model.Line(*state, token));
  model.Advance(state, token);
  uint64_t attention = 0;
  for (uint64_t line : *lines) attention += model.Attend(line, token);
  *output = model.Output(*state, attention);
}

}  // namespace

uint64_t HashModel::Line(const HashState& before, int32_t token) const {
  if (Poisoned(before)) return kPoison;
  uint64_t line = Combine(seed_, static_cast<uint64_t>(token));
  for (uint64_t past : before.history) line = Combine(line, past);
  line = Combine(line, before.fold);
  return line == kPoison ? 0 : line;
}

void HashModel::Advance(HashState* state, int32_t token) const {
  if (Poisoned(*state)) {
    state->fold = kPoison;
    return;
  }
  uint64_t mixed = Combine(seed_ + 1, static_cast<uint64_t>(token));
  for (uint64_t past : state->history) mixed = Combine(mixed, past);
  state->fold = Combine(state->fold, mixed);
  if (state->fold == kPoison) state->fold = 0;
  state->history[0] = state->history[1];
  state->history[1] = state->history[2];
  state->history[2] = static_cast<uint64_t>(token) + 1;
}

uint64_t HashModel::Attend(uint64_t line, int32_t token) const { return Combine(line, static_cast<uint64_t>(token)); }

uint64_t HashModel::Output(const HashState& after, uint64_t attention) const {
  if (Poisoned(after)) return kPoison;
  const uint64_t output = Combine(Combine(after.fold, attention), after.history[2]);
  return output == kPoison ? 0 : output;
}

void HashModel::Logits(uint64_t output, std::vector<float>* logits) const {
  logits->resize(static_cast<size_t>(vocab_size_));
  for (int32_t id = 0; id < vocab_size_; ++id) {
    const uint64_t bits = Combine(output, static_cast<uint64_t>(id) + seed_);
    (*logits)[static_cast<size_t>(id)] =
        output == kPoison ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(bits >> 40) * 0x1p-21f - 4.0f;
  }
}

SampledRow SampleReference(std::vector<float> z, const SampleRow& row, std::span<const LogitEdit> edits,
                           std::span<const uint32_t> mask) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  SampledRow result;
  float best = -kInfinity;
  for (float value : z) {
    if (std::isnan(value) || value == kInfinity) result.status = SampleStatus::kNonFinite;
    best = std::max(best, value);
  }
  if (best == -kInfinity) result.status = SampleStatus::kNonFinite;
  if (result.status != SampleStatus::kOk) return result;

  double sum = 0;
  for (float value : z) sum += std::exp(static_cast<double>(value) - best);
  const double log_sum = std::log(sum) + best;
  const std::vector<float> raw = z;
  const auto logprob = [&](int32_t id) { return static_cast<float>(raw[static_cast<size_t>(id)] - log_sum); };
  std::vector<int32_t> order(z.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return raw[static_cast<size_t>(a)] > raw[static_cast<size_t>(b)]; });
  for (int32_t i = 0; i < row.top_logprobs; ++i) {
    result.top.push_back({order[static_cast<size_t>(i)], logprob(order[static_cast<size_t>(i)])});
  }
  if (row.draw == 0) {
    result.logprob = logprob(row.logprob_of);
    return result;
  }

  for (const LogitEdit& edit : edits) {
    float& value = z[static_cast<size_t>(edit.id)];
    if (edit.kind == LogitEditKind::kBias) {
      value += edit.value;
      continue;
    }
    if (edit.count > 0 || edit.in_prompt != 0) {
      value = value > 0 ? value / row.repetition_penalty : value * row.repetition_penalty;
    }
    if (edit.count > 0) value -= row.presence_penalty + row.frequency_penalty * static_cast<float>(edit.count);
  }
  if (row.mask_row >= 0) {
    for (size_t id = 0; id < z.size(); ++id) {
      if ((mask[id / 32] >> (id % 32) & 1) == 0) z[id] = -kInfinity;
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const float x = z[static_cast<size_t>(a)], y = z[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  });
  if (z[static_cast<size_t>(order[0])] == -kInfinity) {
    result.status = SampleStatus::kNothingAllowed;
    return result;
  }
  if (row.temperature == 0) {
    result.token = order[0];
    result.logprob = logprob(result.token);
    return result;
  }
  size_t kept = row.top_k > 0 ? std::min<size_t>(static_cast<size_t>(row.top_k), z.size()) : z.size();
  std::vector<double> p(kept);
  double total = 0;
  const double top = z[static_cast<size_t>(order[0])];
  for (size_t i = 0; i < kept; ++i) {
    p[i] = std::exp((static_cast<double>(z[static_cast<size_t>(order[i])]) - top) / row.temperature);
    total += p[i];
  }
  double before = 0;
  size_t nucleus = 0;
  while (nucleus < kept && (nucleus == 0 || before < row.top_p * total)) before += p[nucleus++];
  kept = nucleus;
  while (kept > 1 && p[kept - 1] < row.min_p * p[0]) --kept;
  std::vector<std::pair<int32_t, double>> by_id;
  double mass = 0;
  for (size_t i = 0; i < kept; ++i) {
    if (p[i] == 0) continue;
    by_id.emplace_back(order[i], p[i]);
    mass += p[i];
  }
  std::sort(by_id.begin(), by_id.end());
  double reached = 0;
  result.token = by_id.back().first;
  for (const auto& [id, weight] : by_id) {
    reached += weight;
    if (row.uniform * mass < reached) {
      result.token = id;
      break;
    }
  }
  result.logprob = logprob(result.token);
  return result;
}

ExpectedChoice ExpectedTokens(const HashModel& model, const std::vector<int32_t>& prompt, const SamplingParams& params,
                              int32_t choice, const std::vector<int32_t>& eos, TokenConstraint* constraint) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  ExpectedChoice expected;
  HashState state;
  std::vector<uint64_t> lines;
  uint64_t output = 0;
  for (int32_t token : prompt) Feed(model, token, &state, &lines, &output);
  std::vector<float> logits;
  while (static_cast<int32_t>(expected.tokens.size()) < params.max_new_tokens) {
    const int32_t position = static_cast<int32_t>(expected.tokens.size());
    model.Logits(output, &logits);
    SampleRow row;
    row.temperature = params.temperature;
    row.top_p = params.top_p;
    row.min_p = params.min_p;
    row.top_k = params.top_k > 0 && params.top_k < model.vocab_size() ? params.top_k : 0;
    row.presence_penalty = params.presence_penalty;
    row.frequency_penalty = params.frequency_penalty;
    row.repetition_penalty = params.repetition_penalty;
    row.uniform = UniformAt(params.seed, choice, position);
    std::vector<int32_t> stops = params.stop_token_ids;
    if (!params.ignore_eos) stops.insert(stops.end(), eos.begin(), eos.end());
    std::map<int32_t, LogitEdit> counts;
    for (int32_t id : prompt) counts[id].in_prompt = 1;
    for (int32_t id : expected.tokens) ++counts[id].count;
    std::vector<LogitEdit> edits;
    for (auto& [id, edit] : counts) {
      edit.id = id;
      edit.kind = LogitEditKind::kPenalty;
      edits.push_back(edit);
    }
    const auto bias = [&](int32_t id, float value) { edits.push_back({id, LogitEditKind::kBias, 0, 0, value}); };
    for (const auto& [id, value] : params.logit_bias) bias(id, value);
    for (int32_t id : params.banned_ids) bias(id, -kInfinity);
    std::vector<uint32_t> mask(static_cast<size_t>(model.vocab_size() + 31) / 32, ~0u);
    if (constraint != nullptr && constraint->FillMask(mask)) row.mask_row = 0;
    if (!params.allowed_ids.empty()) {
      std::vector<uint32_t> allowed(mask.size(), 0);
      for (int32_t id : params.allowed_ids) allowed[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
      for (size_t i = 0; i < mask.size(); ++i) mask[i] = row.mask_row == 0 ? mask[i] & allowed[i] : allowed[i];
      row.mask_row = 0;
    }
    bool more_than_stops = row.mask_row < 0;
    for (int32_t id = 0; id < model.vocab_size() && !more_than_stops; ++id) {
      more_than_stops = (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0 &&
                        std::find(stops.begin(), stops.end(), id) == stops.end();
    }
    if (position < params.min_new_tokens && more_than_stops) {
      for (int32_t id : stops) bias(id, -kInfinity);
    }
    const SampledRow sampled = SampleReference(logits, row, edits, mask);
    if (sampled.status != SampleStatus::kOk) {
      expected.reason = FinishReason::kError;
      return expected;
    }
    if (constraint != nullptr) constraint->Accept(sampled.token);
    expected.tokens.push_back(sampled.token);
    expected.logprobs.push_back(sampled.logprob);
    if (std::find(stops.begin(), stops.end(), sampled.token) != stops.end()) {
      expected.reason = FinishReason::kStop;
      return expected;
    }
    const size_t n = expected.tokens.size();
    for (int32_t period = 1; params.repetition_count >= 2 && period <= params.repetition_max_period; ++period) {
      const size_t span = static_cast<size_t>(period) * static_cast<size_t>(params.repetition_count);
      if (span > n) break;
      bool repeats = true;
      for (size_t i = n - span + static_cast<size_t>(period); i < n; ++i) {
        repeats &= expected.tokens[i] == expected.tokens[i - static_cast<size_t>(period)];
      }
      if (repeats) {
        expected.reason = FinishReason::kRepetition;
        return expected;
      }
    }
    Feed(model, sampled.token, &state, &lines, &output);
  }
  return expected;
}

std::vector<float> ExpectedPromptLogprobs(const HashModel& model, const std::vector<int32_t>& prompt) {
  std::vector<float> expected, logits;
  HashState state;
  std::vector<uint64_t> lines;
  uint64_t output = 0;
  for (size_t i = 0; i + 1 < prompt.size(); ++i) {
    Feed(model, prompt[i], &state, &lines, &output);
    model.Logits(output, &logits);
    SampleRow row;
    row.draw = 0;
    row.logprob_of = prompt[i + 1];
    expected.push_back(SampleReference(logits, row, {}, {}).logprob);
  }
  return expected;
}

}  // namespace k3::testing
