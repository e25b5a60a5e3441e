#include "engine/sampler.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace k3 {
namespace {

constexpr float kBan = -std::numeric_limits<float>::infinity();

LogitEdit Bias(int32_t id, float value) {
  LogitEdit edit;
  edit.id = id;
  edit.kind = LogitEditKind::kBias;
  edit.value = value;
  return edit;
}

}  // namespace

// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011): the Philox 4x32 bijection.
float UniformAt(uint64_t seed, int32_t choice, int64_t position) {
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32);
  uint32_t c2 = static_cast<uint32_t>(choice), c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<float>(c0 >> 8) * 0x1.0p-24f;  // 24 bits: exact, and never 1
}

void Sampler::Begin(const SamplingParams& params, int32_t choice, std::span<const int32_t> prompt,
                    std::span<const int32_t> eos, int32_t vocab_size) {
  params_ = &params;
  choice_ = choice;
  vocab_size_ = vocab_size;
  stops_ = params.stop_token_ids;
  if (!params.ignore_eos) stops_.insert(stops_.end(), eos.begin(), eos.end());
  std::sort(stops_.begin(), stops_.end());
  stops_.erase(std::unique(stops_.begin(), stops_.end()), stops_.end());

  const bool repetition = params.repetition_penalty != 1.0f;
  count_generated_ = repetition || params.presence_penalty != 0.0f || params.frequency_penalty != 0.0f;
  if (repetition) {
    for (int32_t id : prompt) {
      if (!penalty_of_.try_emplace(id, static_cast<int32_t>(penalties_.size())).second) continue;
      LogitEdit edit;
      edit.id = id;
      edit.kind = LogitEditKind::kPenalty;
      edit.in_prompt = 1;
      penalties_.push_back(edit);
    }
  }
  for (const auto& [id, value] : params.logit_bias) biases_.push_back(Bias(id, value));
  std::vector<int32_t> banned = params.banned_ids;
  std::sort(banned.begin(), banned.end());
  banned.erase(std::unique(banned.begin(), banned.end()), banned.end());
  for (int32_t id : banned) biases_.push_back(Bias(id, kBan));
  if (!params.allowed_ids.empty()) {
    allowed_.assign(static_cast<size_t>(vocab_size + 31) / 32, 0);
    for (int32_t id : params.allowed_ids) allowed_[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
  }
}

void Sampler::Count(int32_t token) {
  ++generated_;
  if (!count_generated_) return;
  const auto [place, fresh] = penalty_of_.try_emplace(token, static_cast<int32_t>(penalties_.size()));
  if (fresh) {
    LogitEdit edit;
    edit.id = token;
    edit.kind = LogitEditKind::kPenalty;
    penalties_.push_back(edit);
  }
  ++penalties_[static_cast<size_t>(place->second)].count;
}

void Sampler::AppendDraw(int32_t row, TokenConstraint* constraint, RankPlan* plan, int32_t unknown) const {
  const int32_t position = generated_ + unknown;
  plan->logits_row.push_back(row);
  SampleRow& sample = plan->sample_rows.emplace_back();
  sample.temperature = params_->temperature;
  sample.top_p = params_->top_p;
  sample.min_p = params_->min_p;
  sample.top_k = params_->top_k > 0 && params_->top_k < vocab_size_ ? params_->top_k : 0;
  sample.presence_penalty = params_->presence_penalty;
  sample.frequency_penalty = params_->frequency_penalty;
  sample.repetition_penalty = params_->repetition_penalty;
  sample.uniform = params_->temperature > 0 ? UniformAt(params_->seed, choice_, position) : 0;
  sample.top_logprobs = std::max(0, params_->top_logprobs);
  plan->max_top_logprobs = std::max(plan->max_top_logprobs, sample.top_logprobs);

  sample.edit_begin = static_cast<int32_t>(plan->logit_edits.size());
  plan->logit_edits.insert(plan->logit_edits.end(), penalties_.begin(), penalties_.end());
  plan->logit_edits.insert(plan->logit_edits.end(), biases_.begin(), biases_.end());
  sample.mask_row = AppendMask(constraint, plan);
  // Where the mask leaves nothing but stops, it is stronger: a grammar that is complete ends before min_new_tokens.
  if (position < params_->min_new_tokens && AllowsMoreThanStops(sample.mask_row, *plan)) {
    for (int32_t id : stops_) plan->logit_edits.push_back(Bias(id, kBan));
  }
  sample.edit_end = static_cast<int32_t>(plan->logit_edits.size());
}

int32_t Sampler::AppendMask(TokenConstraint* constraint, RankPlan* plan) const {
  if (constraint == nullptr && allowed_.empty()) return -1;
  const size_t words = static_cast<size_t>(vocab_size_ + 31) / 32;
  const size_t begin = plan->allowed_mask.size();
  plan->allowed_mask.resize(begin + words);
  const std::span<uint32_t> mask(plan->allowed_mask.data() + begin, words);
  const bool constrained = constraint != nullptr && constraint->FillMask(mask);
  if (!constrained && allowed_.empty()) {
    plan->allowed_mask.resize(begin);
    return -1;
  }
  for (size_t i = 0; i < allowed_.size(); ++i) mask[i] = constrained ? mask[i] & allowed_[i] : allowed_[i];
  return static_cast<int32_t>(begin / words);
}

bool Sampler::AllowsMoreThanStops(int32_t mask_row, const RankPlan& plan) const {
  if (mask_row < 0) return true;
  const size_t words = static_cast<size_t>(vocab_size_ + 31) / 32;
  const uint32_t* mask = plan.allowed_mask.data() + static_cast<size_t>(mask_row) * words;
  size_t allowed = 0, stops = 0;
  for (size_t i = 0; i < words; ++i) {
    const bool last = i + 1 == words && vocab_size_ % 32 != 0;
    allowed += static_cast<size_t>(std::popcount(last ? mask[i] & ((1u << (vocab_size_ % 32)) - 1) : mask[i]));
  }
  for (const int32_t id : stops_) stops += mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1;
  return allowed > stops || allowed == 0;
}

void Sampler::AppendScore(int32_t row, int32_t token, RankPlan* plan) const {
  plan->logits_row.push_back(row);
  SampleRow& sample = plan->sample_rows.emplace_back();
  sample.logprob_of = token;
  sample.draw = 0;
  sample.top_logprobs = std::max(0, params_->top_logprobs);
  plan->max_top_logprobs = std::max(plan->max_top_logprobs, sample.top_logprobs);
  sample.edit_begin = sample.edit_end = static_cast<int32_t>(plan->logit_edits.size());
}

bool Sampler::IsStop(int32_t token) const { return std::binary_search(stops_.begin(), stops_.end(), token); }

}  // namespace k3
